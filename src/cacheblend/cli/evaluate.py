"""`cacheblend evaluate`: parses options; what is evaluated, and how, is in `cacheblend.evaluation`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.evaluate_output import progress_bars, say, write_results
from cacheblend.cli.options import MODEL, OUTPUT, PROMPT, AnchorRule, Chat, Device, Dtype
from cacheblend.cli.output import check_folder, check_outputs

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Arm, Evaluation, Settings

ARMS_PANEL, SCORES = "Arms", "Scores"

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        help="Model folder: config.json, weights, tokenizer; or nano, which ships. --suite nano needs none.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help="Questions with passages: JSON or JSONL, formats as for --format.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
SuiteName = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="In place of --data: nano, questions of every category on the model that ships, against its bars.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
SuiteSeeds = Annotated[
    list[int] | None,
    typer.Option(
        "--suite-seed",
        min=0,
        help="Of the suite, only these draws; several times. Default: 1, 2 and 3.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
SuiteParts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Of the suite, only main, sweep or gate; several times. Default: all.",
        rich_help_panel=PROMPT,
        show_default=False,
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
    ctx: typer.Context,
    model: Model = None,
    data: Data = None,
    suite: SuiteName = None,
    suite_seed: SuiteSeeds = None,
    part: SuiteParts = None,
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
    check_folder("--out", out)
    if suite is not None:
        from cacheblend.cli.models import SHIPPED
        from cacheblend.cli.suite import SuiteOptions, refuse_options, run_suite_command

        refuse_options(_given(ctx))
        chosen = (rows, tuple(suite_seed or ()), tuple(part or ()), seed)
        if not run_suite_command(SuiteOptions(suite, model or Path(SHIPPED), *chosen, dtype, device, out, json)):
            raise typer.Exit(1)
        return
    _check_without_suite(suite_seed, part)
    questions = _questions(data, form, rows)
    model = _model(model)

    from cacheblend.cli.models import layers_of, open_engine
    from cacheblend.core.config import BlendConfig
    from cacheblend.evaluation import make_scorers, summarise
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
    _check_arms(choose(profile=BlendConfig()), layers_of(model))  # a wrong choice is said before the model is opened
    settings = _settings(template, templates, chat, top_k, max_tokens)
    quiet = str(json) == "-"
    with open_engine(model, store, {"anchor": anchor}, dtype=dtype, device=device, quiet=quiet) as engine:
        arms = choose(profile=engine.settings.config)
        found = _run(engine, questions, arms, settings, out, data.stem if data else "", chunk_tokens, quiet=quiet)
        scorers = make_scorers(names, engine.builder.encode) if engine.builder else []
        summary = summarise(found, scorers, seed=seed)
        assert found.folder is not None and data is not None
        write_results(engine, found, summary, names, data.name, found.folder, json)


def _given(ctx: typer.Context) -> list[str]:
    """Options that were set on the command line, by their first name."""
    sources = [(option.opts[0], ctx.get_parameter_source(option.name or "")) for option in ctx.command.params]
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def _check_without_suite(seeds: list[int] | None, parts: list[str] | None) -> None:
    from cacheblend.core.errors import InvalidInputError

    for option, value in (("--suite-seed", seeds), ("--part", parts)):
        if value:
            raise InvalidInputError(f"{option} is of the suite; add --suite nano, or leave it out")


def _questions(data: Path | None, form: str, rows: int | None) -> "list[QuestionRow]":
    """The rows; read before the model is opened, which takes longer."""
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.data import read_questions

    if data is None:
        raise InvalidInputError("there is nothing to ask: give --data FILE, or --suite nano")
    return read_questions(data, form)[:rows]


def _model(model: Path | None) -> Path:
    from cacheblend.core.errors import InvalidInputError

    if model is None:
        raise InvalidInputError("--data needs a model: give --model FOLDER, or --model nano for the one that ships")
    return model


def _check_arms(arms: "list[Arm]", layers: int | None) -> None:
    """Check layers; those of a model's profile are not known yet."""
    from cacheblend.evaluation.choices import PROFILE

    for arm in arms:
        if layers is not None and arm.label.family != PROFILE:
            arm.check(layers)


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
        say(f"{engine.name} has no chat template: plain prompts")
    rows = split_contexts(questions, lambda text: len(builder.encode(text)), chunk_tokens)
    with progress_bars(quiet=quiet) as advance:
        found = evaluate(engine, rows, arms, settings=settings, out=out, name=f"{engine.name}-{data}", progress=advance)
    if found.resumed:
        say(f"{found.resumed} of {len(found.rows)} rows were there already")
    if found.torn:
        say("the last row of an interrupted run was half written, and has been evaluated again")
    return found
