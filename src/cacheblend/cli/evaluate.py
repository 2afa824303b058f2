"""`cacheblend evaluate`: parses options; what is evaluated, and how, is in `cacheblend.evaluation`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend.cli.evaluate_options import (
    CheckLayers,
    ChunkTokens,
    Data,
    DeviationRows,
    Format,
    JsonFile,
    MaxTokens,
    Methods,
    Model,
    Out,
    Ratios,
    Rows,
    Scorers,
    Seed,
    Selectors,
    Store,
    SuiteName,
    SuiteParts,
    SuiteSeeds,
    TemplateName,
    Templates,
    TopK,
)
from cacheblend.cli.evaluate_output import progress_bars, say, write_results
from cacheblend.cli.options import AnchorRule, Chat, Device, Dtype
from cacheblend.cli.output import check_folder, check_outputs, progress

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation, Method, Settings


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
    method: Methods = None,
    selector: Selectors = None,
    ratio: Ratios = None,
    check_layers: CheckLayers = None,
    scorer: Scorers = None,
    deviation_rows: DeviationRows = 0,
    seed: Seed = 0,
    store: Store = "memory",
    dtype: Dtype = "auto",
    device: Device = None,
    anchor: AnchorRule = "auto",
    out: Out = Path("evaluations"),
    json: JsonFile = None,
) -> None:
    """Quality of blending on your data: answers of all methods scored, with intervals, beside their time and compute.

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
    from cacheblend.evaluation.choices import make_methods
    from cacheblend.evaluation.scorers import check_scorers

    names = tuple(scorer or ("em", "f1"))
    check_scorers(names)
    choose = partial(
        make_methods,
        tuple(method or ("full", "prefix", "reuse", "blend")),
        selectors=tuple(selector or ("hkvd",)),
        ratios=[_numbers("--ratio", text, float) for text in ratio or ("0.15",)],
        check_layers=[_numbers("--check-layers", text, int) for text in check_layers or ("1",)],
    )
    # a wrong choice is said before the model is opened
    _check_methods(choose(profile=BlendConfig()), layers_of(model), deviation=deviation_rows > 0)
    settings = _settings(template, templates, chat, top_k, max_tokens)
    quiet = str(json) == "-"
    with open_engine(model, store, {"anchor": anchor}, dtype=dtype, device=device, quiet=quiet) as engine:
        methods = choose(profile=engine.settings.config)
        split = _split(engine, questions, chunk_tokens)
        found = _run(engine, split, methods, settings, out, data.stem if data else "", quiet=quiet)
        scorers = make_scorers(names, engine.builder.encode) if engine.builder else []
        summary = summarise(found, scorers, seed=seed)
        if deviation_rows:
            summary = _deviations(engine, split, methods, settings, deviation_rows, found, summary, quiet=quiet)
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


def _check_methods(methods: "list[Method]", layers: int | None, *, deviation: bool) -> None:
    """Check layers, those of a model's profile are not known yet; and whether there is a method that can deviate."""
    from cacheblend.evaluation.choices import PROFILE

    if deviation:
        from cacheblend.evaluation.deviations import fused_methods

        fused_methods(methods)
    for method in methods:
        if layers is not None and method.label.family != PROFILE:
            method.check(layers)


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


def _split(engine: "BlendEngine", questions: "list[QuestionRow]", chunk_tokens: int) -> "list[QuestionRow]":
    """LongBench's contexts, cut into passages."""
    from cacheblend.data.split import split_contexts

    builder = engine.builder
    assert builder is not None  # a model folder is opened with its tokenizer
    return split_contexts(questions, lambda text: len(builder.encode(text)), chunk_tokens)


def _run(
    engine: "BlendEngine",
    rows: "list[QuestionRow]",
    methods: "list[Method]",
    settings: "Settings",
    out: Path,
    data: str,
    *,
    quiet: bool,
) -> "Evaluation":
    from cacheblend.evaluation import evaluate

    if settings.template.chat is None and not settings.template.layout.is_chat(engine):
        say(f"{engine.name} has no chat template: plain prompts")
    with progress_bars(quiet=quiet) as advance:
        found = evaluate(
            engine, rows, methods, settings=settings, out=out, name=f"{engine.name}-{data}", progress=advance
        )
    if found.resumed:
        say(f"{found.resumed} of {len(found.rows)} rows were there already")
    if found.torn:
        say("the last row of an interrupted run was half written, and has been evaluated again")
    return found


def _deviations(
    engine: "BlendEngine",
    rows: "list[QuestionRow]",
    methods: "list[Method]",
    settings: "Settings",
    count: int,
    found: "Evaluation",
    summary: dict[str, Any],
    *,
    quiet: bool,
) -> dict[str, Any]:
    """The summary, and deviations in it."""
    from cacheblend.evaluation.deviations import measure_deviations, with_deviations

    with progress("measuring deviation", "prompts", quiet=quiet) as advance:
        measured = measure_deviations(
            engine, rows, methods, count, settings=settings, folder=found.folder, progress=advance
        )
    return with_deviations(summary, measured)
