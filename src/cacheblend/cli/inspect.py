"""`cacheblend inspect`: where loaded KV deviates and where attention goes, for one prompt; figures and a heat map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.blending import (
    CheckLayers,
    Measure,
    ProfileFile,
    Ratios,
    SelectorName,
    Threshold,
    blending_settings,
)
from cacheblend.cli.options import (
    MODEL,
    OUTPUT,
    AnchorRule,
    AsJson,
    BlockSize,
    Chat,
    Codec,
    Device,
    Dtype,
    ModelFolder,
    Salt,
    System,
)
from cacheblend.cli.output import console, print_json, progress
from cacheblend.cli.prompts import Data, Passages, Question, RowNumber, build_prompt, read_inputs

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation.inspection import Inspection

Store = Annotated[
    str,
    typer.Option(
        "--store",
        "-s",
        help="A folder, its file:// URL, or memory. The passages are stored in it first.",
        rich_help_panel=MODEL,
    ),
]
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
    typer.Option("--layers", help="Show these only, e.g. 1,4,8-11. Default: all.", rich_help_panel=OUTPUT),
]
Curve = Annotated[
    bool,
    typer.Option(
        "--curve/--no-curve",
        help="Measure attention deviation against the ratio, too: 14 more passes.",
        rich_help_panel=OUTPUT,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", min=1, help="Longest prompt: time grows with its square.", rich_help_panel=OUTPUT),
]

INSTALL = "pip install 'cacheblend[plot]'"
HEAT_MAP, NUMBERS = "heat_map.html", "inspection.json"


def inspect(
    model: ModelFolder,
    store: Store = "memory",
    question: Question = None,
    passage: Passages = None,
    data: Data = None,
    row: RowNumber = 0,
    system: System = None,
    chat: Chat = None,
    ratio: Ratios = None,
    selector: SelectorName = None,
    check_layer: CheckLayers = None,
    measure: Measure = None,
    threshold: Threshold = None,
    profile: ProfileFile = None,
    anchor: AnchorRule = "auto",
    block_size: BlockSize = 256,
    codec: Codec = "raw",
    salt: Salt = "",
    max_tokens: MaxTokens = 4096,
    layers: Layers = None,
    curve: Curve = True,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Show what blending does to a prompt: KV deviation by token and layer, and where attention goes.

    Full recompute, full reuse and blend are held against each other. The passages are stored first.
    """
    texts, asked = read_inputs(question, passage or [], data, row)
    _check_passages(texts)
    _make(out)

    from cacheblend.cli.models import layers_of, open_engine
    from cacheblend.engines.hf import Passage
    from cacheblend.evaluation.inspection import inspect_prompt, ratio_curves

    blending = blending_settings(ratio, selector, check_layer, measure, threshold)
    count = layers_of(model)  # what does not fit is said before the model is opened
    _layers(layers, count)
    _check_settings(blending, count)
    config = blending | {"anchor": anchor, "block_size": block_size, "codec": codec, "salt": salt, "capture": False}
    with open_engine(model, store, config, profile=profile, dtype=dtype, device=device, quiet=json) as engine:
        shown = _layers(layers, len(engine.survey.layout.layers))
        prompt = build_prompt(engine, [Passage(*text) for text in texts], asked, system, chat)
        curves = ratio_curves(engine.config) if curve else None
        with progress("inspecting", "passes", quiet=json) as advance:
            found = inspect_prompt(engine, prompt, curves=curves, max_tokens=max_tokens, progress=advance)
        files = _write(found, out, shown)
        _report(engine, found, shown, files, json)


# ---- what was asked for -----------------------------------------------------------------------------------


def _check_passages(texts: list[tuple[str, str]]) -> None:
    from cacheblend.core.errors import InvalidInputError

    if not texts:
        raise InvalidInputError("there is no passage to inspect: give --passage or --data")


def _check_settings(settings: dict[str, Any], layers: int | None) -> None:
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.fuse.prefill import check_selector

    if settings and layers is not None:
        check_selector(BlendConfig(**settings).make_selector(), layers)


def _layers(text: str | None, count: int | None) -> list[int] | None:
    """``"1,4,8-11"`` as ascending layers, all below `count` if that is known."""
    from cacheblend.core.errors import InvalidInputError

    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise InvalidInputError(f"--layers are numbers and ranges such as 1,4,8-11, not {text!r}")
        last = last or first
        if count is not None and int(last) >= count:
            raise InvalidInputError(f"--layers {text}: the model has layers 0..{count - 1}")
        if count is not None:
            layers |= set(range(int(first), int(last) + 1))
    return sorted(layers)


def _make(out: Path | None) -> None:
    """The folder, said before minutes of measuring, not behind them."""
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

    from cacheblend.evaluation.inspection.facts import numbers
    from cacheblend.evaluation.inspection.heat_map import heat_map

    page, file = out / HEAT_MAP, out / NUMBERS
    page.write_text(heat_map(found, layers), encoding="utf-8")
    file.write_text(json.dumps(numbers(found), ensure_ascii=False, allow_nan=False), encoding="utf-8")
    if find_spec("matplotlib") is None:
        return Written([page, file], without_figures=True)
    from cacheblend.evaluation.inspection.figures import draw_figures

    return Written([page, file, *draw_figures(found, out, layers)])


# ---- what is shown ----------------------------------------------------------------------------------------


def _report(
    engine: "BlendEngine", found: "Inspection", layers: Sequence[int] | None, written: Written, as_json: bool
) -> None:
    from cacheblend.evaluation.inspection.facts import summary

    facts = summary(found, layers) | {"settings": engine.settings.source, "files": [str(f) for f in written.files]}
    if written.without_figures:
        console(stderr=True).print(f"no figures are drawn, that needs matplotlib: {INSTALL}", soft_wrap=True)
    if as_json:
        print_json(facts)
        return
    from cacheblend.cli import inspection_report as report

    out = console()
    out.print(report.table(facts))
    out.print(report.KEY, style="dim")
    for line in report.lines(found, facts):
        out.print(line, soft_wrap=True)
    if written.files:
        out.print(f"\n{len(written.files)} files in {written.files[0].parent}; begin with {HEAT_MAP}", soft_wrap=True)
