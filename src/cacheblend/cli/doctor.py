"""`cacheblend doctor`: can this model be blended, and how much must be recomputed for its answers to stay the same."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import AnchorRule, AsJson, Chat, Device, Dtype
from cacheblend.cli.output import console, print_json, status

if TYPE_CHECKING:
    from cacheblend.engines.hf.doctor import Check, Diagnosis

GATE = "Quality gate"

Folder = Annotated[
    Path | None, typer.Option("--model", "-m", help="Model folder, or nano, which ships.", show_default=False)
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="Random weights of a known shape, e.g. qwen2.5-0.5b.", show_default=False),
]
Quality = Annotated[
    bool,
    typer.Option("--quality", help="Find the cheapest setting that agrees with full recompute.", rich_help_panel=GATE),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help="Questions with passages, as for evaluate; 598 rows or more for the defaults.",
        rich_help_panel=GATE,
        show_default=False,
    ),
]
Format = Annotated[str, typer.Option("--format", help="auto, cacheblend, ctxs or longbench.", rich_help_panel=GATE)]
ChunkTokens = Annotated[
    int, typer.Option("--chunk-tokens", help="Of the passages of a LongBench context.", rich_help_panel=GATE)
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Only the first so many rows.", rich_help_panel=GATE)]
TemplateName = Annotated[str, typer.Option("--template", help="Of the prompts.", rich_help_panel=GATE)]
TemplateFile = Annotated[
    Path | None,
    typer.Option("--templates", help="A TOML file of templates, instead of those that ship.", rich_help_panel=GATE),
]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "--selector",
        help="To try, as for evaluate; several times. Default: hkvd, gradual, query and hybrid.",
        rich_help_panel=GATE,
        show_default=False,
    ),
]
Ratios = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio", "-r", help="To try; several times. Default: 0.05 to 0.5.", rich_help_panel=GATE, show_default=False
    ),
]
Threshold = Annotated[
    float, typer.Option("--threshold", help="Agreement of first tokens with full recompute.", rich_help_panel=GATE)
]
Confidence = Annotated[float, typer.Option("--confidence", help="Of the one-sided bounds.", rich_help_panel=GATE)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Of a greedy answer.", rich_help_panel=GATE)]
Seed = Annotated[int, typer.Option("--seed", help="Of the split of the rows.", rich_help_panel=GATE)]
Store = Annotated[
    str, typer.Option("--store", "-s", help="Where the passages' KV is kept meanwhile.", rich_help_panel=GATE)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Where the profile is written. Default: blend-profile.json in the model's folder.",
        rich_help_panel=GATE,
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write no profile.", rich_help_panel=GATE)]

MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}


def doctor(
    model: Folder = None,
    shape: Shape = None,
    dtype: Dtype = "auto",
    device: Device = None,
    quality: Quality = False,
    data: Data = None,
    form: Format = "auto",
    chunk_tokens: ChunkTokens = 512,
    rows: Rows = None,
    template: TemplateName = "bare",
    templates: TemplateFile = None,
    chat: Chat = None,
    anchor: AnchorRule = "auto",
    selector: Selectors = None,
    ratio: Ratios = None,
    threshold: Threshold = 0.99,
    confidence: Confidence = 0.95,
    max_tokens: MaxTokens = 16,
    seed: Seed = 0,
    store: Store = "memory",
    profile: ProfileFile = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Check whether a model can be blended, down to a live run of both exactness laws. Exit code 1 means no.

    With --quality, on your own prompts: find the cheapest setting that is shown to agree with full recompute, and
    write it as the model's profile. Exit code 1: none was shown to.
    """
    from cacheblend.cli.models import model_folder
    from cacheblend.core.errors import InvalidInputError

    if (model is None) == (shape is None):
        raise InvalidInputError("name a model folder with --model, or a shape with --shape; one of them")
    folder = None if model is None else model_folder(model)
    if not quality:
        if data is not None:
            raise InvalidInputError("--data is for the quality gate; add --quality")
        _examine(model, shape, dtype, device, json)
        return
    if model is None or folder is None or data is None:
        raise InvalidInputError("--quality needs a model folder (--model) and questions with passages (--data)")

    from cacheblend.cli.quality import GateOptions, run_quality
    from cacheblend.engines.settings import PROFILE_NAME
    from cacheblend.evaluation.gate import Bar

    options = GateOptions(
        model=model,
        data=data,
        form=form,
        chunk_tokens=chunk_tokens,
        limit=rows,
        template=template,
        templates=templates,
        chat=chat,
        anchor=anchor,
        selectors=tuple(selector or ()),
        ratios=tuple(ratio or ()),
        seed=seed,
        store=store,
        profile=None if dry_run else profile or folder / PROFILE_NAME,
        dtype=dtype,
        device=device,
    )
    bar = Bar(threshold=threshold, confidence=confidence, answer_tokens=max_tokens)
    if not run_quality(options, bar, as_json=json):
        raise typer.Exit(1)


def _examine(model: Path | None, shape: str | None, dtype: str, device: str | None, as_json: bool) -> None:
    from cacheblend.cli.models import model_folder

    with status("examining ...", quiet=as_json):
        diagnosis = _diagnose(model, shape, dtype, device)
        if model is not None and diagnosis.blendable:
            diagnosis.checks.append(_profile(model_folder(model)))
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        _show(diagnosis)
    if not diagnosis.blendable:
        raise typer.Exit(1)


def _diagnose(model: Path | None, shape: str | None, dtype: str, device: str | None) -> "Diagnosis":
    from cacheblend.cli.models import checked_device, checked_dtype, model_folder, model_name, quiet_transformers

    quiet_transformers()
    from cacheblend.engines.hf.doctor import diagnose

    if shape is None:
        assert model is not None
        name = model_name(model)
        return diagnose(model_folder(model), name=name, dtype=checked_dtype(dtype), device=checked_device(device))
    import torch

    from cacheblend.bench.shapes import build_shape

    wanted = torch.bfloat16 if dtype == "auto" else checked_dtype(dtype)
    built = build_shape(shape, dtype=wanted, device=device)
    return diagnose(built, name=f"{shape} (random weights)")


def _profile(model: Path) -> "Check":
    """What an engine on this folder blends by; a damaged profile stands in its way."""
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.engines.fingerprint import fingerprint_folder
    from cacheblend.engines.hf.doctor import Check
    from cacheblend.engines.settings import resolve_settings

    try:
        settings = resolve_settings(None, model, fingerprint_folder(model))
    except InvalidInputError as error:
        return Check("profile", False, str(error))
    blends = settings.profile is not None and settings.profile.blend
    return Check("profile", True if blends else None, settings.source)


def _show(diagnosis: "Diagnosis") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=diagnosis.model, title_justify="left", box=None, padding=(0, 1), show_header=False)
    for overflow in ("ellipsis", "ellipsis", "fold"):  # a long path is broken, not cut
        table.add_column(overflow=overflow)
    for check in diagnosis.checks:
        table.add_row(Text(*MARKS[check.ok]), check.name, check.detail)
    out = console()
    out.print(table)
    if diagnosis.blendable:
        out.print(Text.assemble("\n", ("yes", "bold green"), ", this model can be blended"))
    else:
        out.print(Text.assemble("\n", ("no", "bold red"), ": ", diagnosis.reason))
