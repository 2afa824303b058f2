"""Options that say which loaded rows are recomputed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cacheblend.cli.values import numbers

BLENDING = "Blending"
Ratios = Annotated[
    list[str] | None,
    typer.Option(
        "--ratio",
        "-r",
        help="Share of the loaded tokens to recompute, 0..1; falling ones with commas for several --check-layers. "
        "Default: the model's profile, or 0.15. Commands that compare settings take it several times, and 0.15 by "
        "default.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class SelectionOptions:
    """Which loaded rows are recomputed. What is not given is taken from the model's profile, or `BlendConfig`."""

    ratio: Ratios = None
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector",
            help="hkvd: rows whose KV deviates most; query: sentences that the question attends to; hybrid: both; "
            "or threshold, head, random, none, all. Default: the model's profile, or hkvd, filtered gradually. "
            "Further settings follow a colon: query:question_words=1,pool=16.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None
    check_layers: Annotated[
        str | None,
        typer.Option(
            "--check-layers",
            help="Layers before which deviation is measured: 1, or 1,2,3 with as many ratios. Default: the model's "
            "profile, or the selector's own: 1 to 4 with falling ratios for hkvd (gradual filtering), 1 for others.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None
    measure: Annotated[
        Literal["kv", "k", "v"] | None,
        typer.Option(
            "--measure",
            help="kv, k or v: deviation over keys and values, or one of them. Default: the model's profile, or kv.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", min=0, help="Bound of --selector threshold.", rich_help_panel=BLENDING),
    ] = None
    hops: Annotated[
        int | None,
        typer.Option(
            "--hops",
            min=0,
            max=4,
            help="How often --selector query or hybrid asks the best sentences that it has found in turn. Default: the "
            "model's profile, or 0.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None
    hop_spans: Annotated[
        int | None,
        typer.Option(
            "--hop-spans",
            min=1,
            max=8,
            help="Most sentences that a hop asks. Default: the model's profile, or 2.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None
    hop_rows: Annotated[
        int | None,
        typer.Option(
            "--hop-rows",
            min=0,
            help="Most tokens of a sentence whose attention a hop uses; 0: it looks for the sentence's rare words "
            "alone, which computes nothing. Default: the model's profile, or 64.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="The model's profile, where it is not blend-profile.json in its folder.",
            rich_help_panel=BLENDING,
            show_default=False,
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig` that the user set; the others are left to the model's profile.

        Raises:
            InvalidInputError: ratios and check layers do not fit each other, or are no numbers; or a threshold or hops
                are given for another selector.
        """
        from cacheblend.core.select.selection import SelectorChoice

        self._check_effect("--threshold", self.threshold, "threshold")
        self._check_effect("--hops", self.hops, "query", "hybrid")
        self._check_effect("--hop-spans", self.hop_spans, "query", "hybrid")
        self._check_effect("--hop-rows", self.hop_rows, "query", "hybrid")
        settings = {} if self.selector is None else dict(SelectorChoice.parse(self.selector).settings)
        given = ("measure", "threshold", "hops", "hop_spans", "hop_rows")
        settings |= {name: value for name in given if (value := getattr(self, name)) is not None}
        if self.ratio or self.check_layers:
            ratios, layers = self._levels()
            settings |= {"recompute_ratio": ratios[-1]} | ({"check_layers": layers} if layers else {})
            settings |= {"ratios": ratios} if len(ratios) > 1 else {}
        return settings

    @property
    def _selector(self) -> str | None:
        """Its name, without further settings."""
        return None if self.selector is None else self.selector.partition(":")[0]

    def _check_effect(self, option: str, value: float | None, *selectors: str) -> None:
        from cacheblend.core.errors import InvalidInputError

        if value is not None and self._selector not in selectors:
            raise InvalidInputError(
                f"{option} {value:g} has no effect without --selector {' or '.join(selectors)}; add it, or leave "
                f"{option} out"
            )

    def _levels(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Ratios and check layers: one ratio for all layers, or one for each; no layers: the selector's own."""
        from cacheblend.core.errors import InvalidInputError

        given, selector = self.ratio or ["0.15"], self._selector or "hkvd"
        if len(given) > 1:
            raise InvalidInputError(
                f"--ratio is given {len(given)} times, this command takes one; several check layers' ratios are "
                f"written with commas: --ratio {','.join(given)}"
            )
        ratios = numbers("--ratio", given[0], float)
        layers = numbers("--check-layers", self.check_layers, int) if self.check_layers else ()
        if len(ratios) > 1 and selector not in ("hkvd", "hybrid"):
            raise InvalidInputError(f"--ratio {given[0]}: only hkvd and hybrid take several; {selector} takes one")
        if len(ratios) > 1 and len(ratios) != len(layers):
            raise InvalidInputError(
                f"--ratio {given[0]}: {len(ratios)} ratios need as many --check-layers, got {len(layers)}"
            )
        return ratios, layers
