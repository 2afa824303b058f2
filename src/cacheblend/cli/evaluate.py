"""`cacheblend evaluate`: parses options; what is evaluated, and how, is in `cacheblend.evaluation`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import MODEL, OUTPUT, PROMPT, AnchorRule, Chat, Device, Dtype, ModelFolder
from cacheblend.cli.output import check_outputs, console

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Arm, Evaluation, Settings

ARMS_PANEL, SCORES = "Arms", "Scores"

Data = Annotated[
    Path,
    typer.Option(
        "--data",
        "-d",
        help="Questions with passages: JSON or JSONL, formats as for --format.",
        rich_help_panel=PROMPT,
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="auto, cacheblend, ctxs (the CacheBlend authors') or longbench; auto goes by the first row's fields.",
        rich_help_panel=PROMPT,
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Only the first so many rows.", rich_help_panel=PROMPT)]
ChunkTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens",
        help="Of LongBench's context: tokens of a passage at most, cut at sentence ends.",
        rich_help_panel=PROMPT,
    ),
]
TopK = Annotated[
    list[int] | None,
    typer.Option(
        "--top-k",
        help="Only the first so many passages of a row; several times: every arm at each. Default: all.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
Templates = Annotated[
    Path | None,
    typer.Option(
        "--templates", help="TOML file of prompt templates. Default: the shipped ones.", rich_help_panel=PROMPT
    ),
]
TemplateName = Annotated[
    str, typer.Option("--template", help="Which one; shipped are bare, qa and summary.", rich_help_panel=PROMPT)
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        "-a",
        help="full, prefix, reuse, blend, map-reduce or map-rerank; several times. Default: the first four.",
        rich_help_panel=ARMS_PANEL,
        show_default=False,
    ),
]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "--selector",
        help="Of blend, as for ask; profile: the model's own settings. Others' settings stand behind a colon: "
        "hkvd:measure=v. Several times. Default: hkvd.",
        rich_help_panel=ARMS_PANEL,
        show_default=False,
    ),
]
Ratios = Annotated[
    list[str] | None,
    typer.Option(
        "--ratio",
        "-r",
        help="Of blend, 0..1; several times. Falling ones for as many check layers with commas. Default: 0.15.",
        rich_help_panel=ARMS_PANEL,
        show_default=False,
    ),
]
CheckLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--check-layers",
        help="Of blend: 1, or 1,2,3 for gradual filtering; several times. Default: 1.",
        rich_help_panel=ARMS_PANEL,
        show_default=False,
    ),
]
Scorers = Annotated[
    list[str] | None,
    typer.Option(
        "--scorer",
        help="em, f1, f1-tokens or rouge-l; several times. Default: em and f1.",
        rich_help_panel=SCORES,
        show_default=False,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Of an answer.", rich_help_panel=PROMPT)]
Seed = Annotated[int, typer.Option("--seed", help="Of the bootstrap's draws.", rich_help_panel=SCORES)]
Store = Annotated[
    str, typer.Option("--store", "-s", help="memory, a folder, or its file:// URL.", rich_help_panel=MODEL)
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder in which the folder of results is made.", rich_help_panel=OUTPUT)
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything here, every cell with it; - for stdout.", rich_help_panel=OUTPUT),
]


def evaluate(
    model: ModelFolder,
    data: Data,
    form: Format = "auto",
    rows: Rows = None,
    chunk_tokens: ChunkTokens = 512,
    top_k: TopK = None,
    templates: Templates = None,
    template: TemplateName = "bare",
    chat: Chat = None,
    max_tokens: MaxTokens = 32,
    arm: Arms = None,
    selector: Selectors = None,
    ratio: Ratios = None,
    check_layers: CheckLayers = None,
    scorer: Scorers = None,
    seed: Seed = 0,
    store: Store = "memory",
    dtype: Dtype = "auto",
    device: Device = None,
    anchor: AnchorRule = "auto",
    out: Out = Path("evaluations"),
    json: JsonFile = None,
) -> None:
    """Quality of blending on your data: answers of all arms scored, with intervals, beside their time and compute.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    check_outputs(json)
    questions = _questions(data, form, rows)

    from cacheblend.cli.models import open_engine
    from cacheblend.core.config import BlendConfig
    from cacheblend.evaluation.choices import make_arms
    from cacheblend.evaluation.scorers import check_scorers

    names = tuple(scorer or ("em", "f1"))
    check_scorers(names)
    choose = partial(
        make_arms,
        tuple(arm or ("full", "prefix", "reuse", "blend")),
        selectors=tuple(selector or ("hkvd",)),
        ratios=[_numbers("--ratio", text, float) for text in ratio or ("0.15",)],
        check_layers=[_numbers("--check-layers", text, int) for text in check_layers or ("1",)],
    )
    choose(profile=BlendConfig())  # a wrong choice is said before the model is opened
    settings = _settings(template, templates, chat, top_k, max_tokens)
    quiet = str(json) == "-"
    with open_engine(model, store, {"anchor": anchor}, dtype=dtype, device=device, quiet=quiet) as engine:
        arms = choose(profile=engine.settings.config)
        found = _run(engine, questions, arms, settings, out, data.stem, chunk_tokens, quiet=quiet)
        _report(engine, found, names, data, seed, json)


def _questions(data: Path, form: str, rows: int | None) -> "list[QuestionRow]":
    """The rows; read before the model is opened, which takes longer."""
    from cacheblend.data import read_questions

    return read_questions(data, form)[:rows]


def _settings(
    template: str, templates: Path | None, chat: bool | None, top_k: list[int] | None, tokens: int
) -> "Settings":
    from dataclasses import replace

    from cacheblend.evaluation import Settings, read_template

    chosen = read_template(template, templates)
    if chat is not None:
        chosen = replace(chosen, chat=chat)
    return Settings(chosen, tuple(dict.fromkeys(top_k)) if top_k else (None,), tokens)


def _numbers(option: str, text: str, of: Callable[[str], Any]) -> tuple[Any, ...]:
    from cacheblend.core.errors import InvalidInputError

    try:
        return tuple(of(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(f"{option} {text}: expected a number, or several with commas") from error


def _run(
    engine: "BlendEngine",
    questions: "list[QuestionRow]",
    arms: "list[Arm]",
    settings: "Settings",
    out: Path,
    data: str,
    chunk_tokens: int,
    *,
    quiet: bool,
) -> "Evaluation":
    from cacheblend.data.split import split_contexts
    from cacheblend.evaluation import evaluate

    builder = engine.builder
    assert builder is not None  # a model folder is opened with its tokenizer
    if settings.template.chat is None and not settings.template.layout.is_chat(engine):
        _say(f"{engine.name} has no chat template: plain prompts")
    rows = split_contexts(questions, lambda text: len(builder.encode(text)), chunk_tokens)
    with _progress(quiet=quiet) as advance:
        found = evaluate(engine, rows, arms, settings=settings, out=out, name=f"{engine.name}-{data}", progress=advance)
    if found.resumed:
        _say(f"{found.resumed} of {len(found.rows)} rows were there already")
    if found.torn:
        _say("the last row of an interrupted run was half written, and has been evaluated again")
    return found


def _report(
    engine: "BlendEngine", found: "Evaluation", names: tuple[str, ...], data: Path, seed: int, json: Path | None
) -> None:
    """Tables on stdout, figures and plots in the folder; or JSON alone, where it goes to stdout."""
    from json import dumps

    from cacheblend.bench import environment
    from cacheblend.evaluation import make_scorers, summarise, with_cells
    from cacheblend.evaluation.records import write_whole
    from cacheblend.evaluation.report import notes, tables

    assert engine.builder is not None and found.folder is not None
    scorers = make_scorers(names, engine.builder.encode)
    stamp = {"machine": environment.machine(), "versions": environment.versions(), "commit": environment.commit()}
    summary = {"data": data.name, **summarise(found, scorers, seed=seed), **stamp}
    write_whole(found.folder / "summary.json", dumps(summary, ensure_ascii=False, indent=2) + "\n")
    plots = _draw(summary, found.folder, data)
    if json is not None:
        text = dumps(with_cells(summary, found, scorers), ensure_ascii=False, indent=2)
        if str(json) == "-":
            typer.echo(text)
            return
        json.write_text(text + "\n", encoding="utf-8")
    for table in tables(summary):
        console().print(table)
        console().print()
    for line in notes(summary):
        _say(f"note: {line}")
    _say(f"figures{' and plots' if plots else ''} are in {found.folder}")


def _draw(summary: dict[str, Any], folder: Path, data: Path) -> list[Path]:
    from importlib.util import find_spec

    from cacheblend.evaluation.plots import INSTALL, draw

    if find_spec("matplotlib") is None:
        _say(f"no plots are drawn, that needs matplotlib: {INSTALL}")
        return []
    return draw(summary, folder, data=data.name)


def _say(line: str) -> None:
    console(stderr=True).print(line, soft_wrap=True)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar of passages stored and one of rows answered, on stderr; none if `quiet`."""
    if quiet:
        yield lambda stage, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True)) as bars:
        tasks = {
            "warming": bars.add_task("warming, passages", total=None),
            "answering": bars.add_task("answering, rows", total=None),
        }
        yield lambda stage, done, total: bars.update(tasks[stage], completed=done, total=total)
