"""`python -m lab inspect`: where loaded KV deviates and where attention goes in one prompt; figures and a heat map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import (
    IN_MEMORY,
    MOST_TOKENS,
    OUTPUT,
    AsJson,
    ChunkOptions,
    DeviceOptions,
    ModelOptions,
    PromptOptions,
    SelectionOptions,
    StoreOptions,
)
from cacheblend.cli.output import INSTALL_PLOT, console, print_json, progress

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine
    from lab.inspection import Inspection

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write figures, heat_map.html and inspection.json into this folder. Figures need matplotlib.",
        rich_help_panel=OUTPUT,
    ),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="Show only these, e.g. 1,4,8-11. Default: all.", rich_help_panel=OUTPUT),
]
Curve = Annotated[
    bool,
    typer.Option(
        "--curve/--no-curve",
        help="Also measure attention deviation by ratio: 14 more passes.",
        rich_help_panel=OUTPUT,
    ),
]
MaxPromptTokens = Annotated[
    int,
    typer.Option(
        "--max-prompt-tokens",
        min=1,
        max=MOST_TOKENS,
        help="Longest prompt: time grows with its square.",
        rich_help_panel=OUTPUT,
    ),
]

HEAT_MAP, NUMBERS = "heat_map.html", "inspection.json"


def inspect(
    model: ModelOptions,
    prompt: PromptOptions,
    selection: SelectionOptions,
    stored: ChunkOptions,
    device: DeviceOptions,
    store: StoreOptions = IN_MEMORY,
    max_prompt_tokens: MaxPromptTokens = 4096,
    layers: Layers = None,
    curve: Curve = True,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Show what blending does to a prompt: KV deviation by token and layer, and where attention goes.

    Compares full recompute, full reuse and blend. The passages are stored first.
    """
    texts, question = prompt.read()
    _check_passages(texts)

    from cacheblend.cli.models import PATIENT_S, open_engine
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.fuse.prefill import check_selector
    from cacheblend.engines.folders import model_folder
    from cacheblend.engines.settings import layers_of
    from lab.inspection import inspect_prompt, ratio_curves

    chosen = selection.settings()
    count = layers_of(model_folder(model.model))  # wrong options are reported before the model is opened
    _layers(layers, count)
    if chosen:
        selector = BlendConfig(**chosen).make_selector()
        if count is not None:
            check_selector(selector, count)
    _make(out)
    config = chosen | stored.settings() | {"capture": False, "load_timeout_s": PATIENT_S}
    with open_engine(model.model, store.store, config, device, profile=selection.profile, quiet=json) as engine:
        shown = _layers(layers, engine.survey.num_layers)
        asked = prompt.build(engine, texts, question)
        curves = ratio_curves(engine.config) if curve else None
        with progress("inspecting", "passes", quiet=json) as advance:
            found = inspect_prompt(engine, asked, curves=curves, max_tokens=max_prompt_tokens, progress=advance)
        files = _write(found, out, shown)
        _report(engine, found, shown, files, json)


# ---- checks -----------------------------------------------------------------------------------------------


def _check_passages(texts: list[tuple[str, str]]) -> None:
    from cacheblend.core.errors import InvalidInputError

    if not texts:
        raise InvalidInputError("there is no passage to inspect: give --passage or --data")


def _layers(text: str | None, count: int | None) -> list[int] | None:
    """``"1,4,8-11"`` as ascending layers, all below `count` if that is known."""
    from cacheblend.core.errors import InvalidInputError

    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise InvalidInputError(f"--layers takes numbers and ranges such as 1,4,8-11, not {text!r}")
        last = last or first
        if count is not None and int(last) >= count:
            raise InvalidInputError(f"--layers {text}: the model has layers 0..{count - 1}")
        if count is not None:
            layers |= set(range(int(first), int(last) + 1))
    return sorted(layers)


def _make(out: Path | None) -> None:
    """Makes the folder before minutes of measuring, not after them."""
    from cacheblend.core.errors import InvalidInputError

    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"--out {out}: the folder cannot be made: {error.strerror}") from error


# ---- what is written --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """Files that were written, and whether figures were left out because matplotlib is missing."""

    files: list[Path]
    without_figures: bool = False


def _write(found: "Inspection", out: Path | None, layers: Sequence[int] | None) -> Written:
    if out is None:
        return Written([])
    import json
    from importlib.util import find_spec

    from lab.inspection.facts import numbers
    from lab.inspection.heat_map import heat_map

    page, file = out / HEAT_MAP, out / NUMBERS
    page.write_text(heat_map(found, layers), encoding="utf-8")
    file.write_text(json.dumps(numbers(found), ensure_ascii=False, allow_nan=False), encoding="utf-8")
    if find_spec("matplotlib") is None:
        return Written([page, file], without_figures=True)
    from lab.inspection.figures import draw_figures

    return Written([page, file, *draw_figures(found, out, layers)])


# ---- what is shown ----------------------------------------------------------------------------------------


def _report(
    engine: "BlendEngine", found: "Inspection", layers: Sequence[int] | None, written: Written, as_json: bool
) -> None:
    from lab.inspection.facts import summary

    facts = summary(found, layers) | {"settings": engine.settings.source, "files": [str(f) for f in written.files]}
    if written.without_figures:
        console(stderr=True).print(f"no figures are drawn, that needs matplotlib: {INSTALL_PLOT}", soft_wrap=True)
    if as_json:
        print_json(facts)
        return
    from lab.cli import inspection_report as report

    out = console()
    out.print(report.table(facts))
    out.print(report.KEY, style="dim")
    for line in report.lines(found, facts):
        out.print(line, soft_wrap=True)
    if written.files:
        out.print(f"\n{len(written.files)} files in {written.files[0].parent}; begin with {HEAT_MAP}", soft_wrap=True)
