"""`cacheblend doctor`: can this model be blended, and how much must be recomputed to keep its answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import IN_MEMORY, MOST_SEED, Anchor, AsJson, DeviceOptions, ModelOrShape, StoreOptions
from cacheblend.cli.output import console, print_json, status
from cacheblend.cli.prompt_options import QuestionOptions

if TYPE_CHECKING:
    from cacheblend.cli.quality import GateOptions
    from cacheblend.engines.hf.doctor import Check, Diagnosis
    from cacheblend.evaluation.gate import Bar

GATE = "Quality gate"


@dataclass(frozen=True)
class QualityOptions:
    """What the quality gate tries, and what it demands."""

    quality: Annotated[
        bool,
        typer.Option(
            "--quality", help="Find the cheapest setting that agrees with full recompute.", rich_help_panel=GATE
        ),
    ] = False
    selector: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            help="Selectors to try, as for evaluate; several times. Default: hkvd, gradual, query, query that "
            "follows the words of what it finds, hybrid, and narrowing (hybrid, most rows in the first layers).",
            rich_help_panel=GATE,
            show_default=False,
        ),
    ] = None
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            "-r",
            min=0,
            max=1,
            help="Ratios to try; several times. Default: 0.05 to 0.5.",
            rich_help_panel=GATE,
            show_default=False,
        ),
    ] = None
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="Share of first tokens that must agree, 0..1.", rich_help_panel=GATE),
    ] = 0.99
    confidence: Annotated[
        float, typer.Option("--confidence", help="Confidence of the one-sided bounds, 0..1.", rich_help_panel=GATE)
    ] = 0.95
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, max=4096, help="Tokens of an answer.", rich_help_panel=GATE)
    ] = 16
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of the split of the rows.", rich_help_panel=GATE),
    ] = 0
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="File to write the profile to. Default: blend-profile.json in the model's folder.",
            rich_help_panel=GATE,
            show_default=False,
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no profile.", rich_help_panel=GATE)] = False


MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}


def doctor(
    model: ModelOrShape,
    device: DeviceOptions,
    questions: QuestionOptions,
    gate: QualityOptions,
    anchor: Anchor = "auto",
    store: StoreOptions = IN_MEMORY,
    json: AsJson = False,
) -> None:
    """Check whether a model can be blended, including a live run of both exactness invariants. Exit code 1 means no.

    With --quality, on your own prompts (598 rows or more for the defaults): find the cheapest setting that is shown to
    agree with full recompute, and write it as the model's profile. Exit code 1: no setting was shown to.
    """
    from cacheblend.core.errors import InvalidInputError

    chosen = model.chosen()
    if not gate.quality:
        if questions.data:
            raise InvalidInputError("--data is for the quality gate; add --quality")
        _examine(model, device, json)
        return
    if model.model is None or chosen.model is None or questions.file is None:
        raise InvalidInputError("--quality needs a model folder (--model) and questions with passages (--data)")

    from cacheblend.cli.quality import run_quality

    options, bar = _gate(model.model, chosen.model, device, questions, gate, anchor, store.store)
    if not run_quality(options, bar, as_json=json):
        raise typer.Exit(1)


def _gate(
    model: Path,
    folder: Path,
    device: DeviceOptions,
    questions: QuestionOptions,
    gate: QualityOptions,
    anchor: str,
    store: str,
) -> "tuple[GateOptions, Bar]":
    from cacheblend.cli.quality import GateOptions
    from cacheblend.engines.settings import PROFILE_NAME
    from cacheblend.evaluation.gate import Bar

    options = GateOptions(
        model=model,
        questions=questions,
        anchor=anchor,
        selectors=tuple(gate.selector or ()),
        ratios=tuple(gate.ratio or ()),
        seed=gate.seed,
        store=store,
        profile=None if gate.dry_run else gate.profile or folder / PROFILE_NAME,
        device=device,
    )
    return options, Bar(threshold=gate.threshold, confidence=gate.confidence, answer_tokens=gate.max_tokens)


def _examine(model: ModelOrShape, device: DeviceOptions, as_json: bool) -> None:
    from cacheblend.cli.models import model_folder

    with status("examining ...", quiet=as_json) as say:
        diagnosis = _diagnose(model, device, say)
        if model.model is not None and diagnosis.blendable:
            diagnosis.checks.append(_profile(model_folder(model.model)))
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        _show(diagnosis)
    if not diagnosis.blendable:
        raise typer.Exit(1)


def _diagnose(model: ModelOrShape, device: DeviceOptions, say: Callable[[str], None]) -> "Diagnosis":
    from cacheblend.cli.models import checked_device, checked_dtype, model_folder, model_name, quiet_transformers

    quiet_transformers()
    from cacheblend.engines.hf.doctor import diagnose

    dtype, place = checked_dtype(device.dtype), checked_device(device.device)
    if model.model is not None:
        return diagnose(
            model_folder(model.model), name=model_name(model.model), dtype=dtype, device=place, on_check=say
        )
    import torch

    from cacheblend.engines.hf.shapes import build_shape

    assert model.shape is not None  # one of the two is given
    wanted = torch.bfloat16 if dtype == "auto" else dtype
    built = build_shape(model.shape, dtype=wanted, device=device.device)
    return diagnose(built, name=f"{model.shape} (random weights)", on_check=say)


def _profile(model: Path) -> "Check":
    """The settings of an engine on this folder; a damaged profile is a failed check."""
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.engines.fingerprint import fingerprint_folder
    from cacheblend.engines.hf.doctor import Check
    from cacheblend.engines.settings import resolve_settings

    try:
        settings = resolve_settings(None, model, fingerprint_folder(model))
    except InvalidInputError as error:
        return Check("profile", False, str(error).removeprefix("the profile "))
    blends = settings.profile is not None and settings.profile.blend
    return Check("profile", True if blends else None, settings.source.removeprefix("the profile "))


def _show(diagnosis: "Diagnosis") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=diagnosis.model, title_justify="left", box=None, padding=(0, 1), show_header=False)
    for overflow in ("ellipsis", "ellipsis", "fold"):  # wrap a long path instead of cutting it
        table.add_column(overflow=overflow)
    for check in diagnosis.checks:
        table.add_row(Text(*MARKS[check.ok]), check.name, check.detail)
    out = console()
    out.print(table)
    if diagnosis.blendable:
        out.print(Text.assemble("\n", ("yes", "bold green"), ", this model can be blended"))
    else:
        out.print(Text.assemble("\n", ("no", "bold red"), ": ", diagnosis.reason))
