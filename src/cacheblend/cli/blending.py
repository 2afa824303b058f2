"""Options of how a prompt is blended, for `ask` and `inspect`, and what they come to."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cacheblend.cli.options import BLENDING

Ratios = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio",
        "-r",
        help="Share of loaded tokens to recompute, 0..1. Several: one for each check layer, falling. "
        "Default: the model's profile, or 0.15.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
SelectorName = Annotated[
    str | None,
    typer.Option(
        "--selector",
        help="hkvd: rows whose KV deviates most; query: sentences that the question attends to; hybrid: both; "
        "or threshold, head, random, none, all. Default: the model's profile, or hkvd.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
CheckLayers = Annotated[
    list[int] | None,
    typer.Option(
        "--check-layer",
        help="Where deviation is measured. Several: gradual filtering. Default: the model's profile, or 1.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
Measure = Annotated[
    Literal["kv", "k", "v"] | None,
    typer.Option(
        "--measure",
        help="Deviation over keys and values, or one of them. Default: the model's profile, or kv.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
Threshold = Annotated[
    float | None, typer.Option("--threshold", help="Bound of the selector threshold.", rich_help_panel=BLENDING)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="The model's profile, where it is not blend-profile.json in its folder.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]


def blending_settings(
    ratio: list[float] | None,
    selector: str | None,
    check_layer: list[int] | None,
    measure: str | None,
    threshold: float | None,
) -> dict[str, Any]:
    """Fields of `BlendConfig` that the user set; none leaves them to the model's profile."""
    given = {"selector": selector, "measure": measure, "threshold": threshold}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if ratio or check_layer:
        ratios, layers = _levels(ratio or [0.15], check_layer or [1], selector or "hkvd")
        settings |= {"recompute_ratio": ratios[-1], "check_layers": layers}
        settings |= {"ratios": ratios} if len(ratios) > 1 else {}
    return settings


def _levels(ratios: list[float], layers: list[int], selector: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Ratios and check layers: one ratio for all layers, or one for each (gradual filtering)."""
    from cacheblend.core.errors import InvalidInputError

    if len(ratios) > 1 and selector not in ("hkvd", "hybrid"):
        raise InvalidInputError(f"several --ratio are for the selectors hkvd and hybrid; {selector} takes one")
    if len(ratios) > 1 and len(ratios) != len(layers):
        raise InvalidInputError(f"{len(ratios)} --ratio need as many --check-layer, one each, got {len(layers)}")
    return tuple(ratios), tuple(layers)
