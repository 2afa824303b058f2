"""`cacheblend evaluate`: parses options; what is evaluated, and how, is in `cacheblend.evaluation`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend.cli.evaluate_options import (
    DeviationRows,
    MethodOptions,
    OptionalModel,
    Out,
    Paper,
    Scorers,
    SuiteChoice,
    TopK,
)
from cacheblend.cli.evaluate_output import Destination, progress_bars, say, write_results
from cacheblend.cli.options import IN_MEMORY, Anchor, AsJson, DeviceOptions, JsonFile, Seed, StoreOptions
from cacheblend.cli.output import check_folder, check_outputs, progress
from cacheblend.cli.prompt_options import MaxTokens, QuestionOptions
from cacheblend.cli.question_files import given_options, needed_model, settings_of, split_rows

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation, Method, Settings


def evaluate(
    ctx: typer.Context,
    questions: QuestionOptions,
    suite: SuiteChoice,
    method: MethodOptions,
    device: DeviceOptions,
    paper: Paper = False,
    model: OptionalModel = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = 32,
    scorer: Scorers = None,
    deviation_rows: DeviationRows = 0,
    seed: Seed = 0,
    store: StoreOptions = IN_MEMORY,
    anchor: Anchor = "auto",
    out: Out = Path("evaluations"),
    json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Quality of blending on your data: answers of all methods scored, with intervals, time and compute.

    An interrupted run continues where it stopped when the same command is given again.
    """
    check_outputs(json_file)
    check_folder("--out", out)
    to = Destination(out, json, json_file)
    if paper:
        _run_paper(ctx, model, questions, method.ratio, top_k, max_tokens, scorer, anchor, device, to)
        return
    if suite.suite is not None:
        if not _run_suite(ctx, model, questions, suite, device, seed, to):
            raise typer.Exit(1)
        return
    _check_without_suite(suite)
    rows, bad = _questions(questions)
    folder = needed_model(model)

    from cacheblend.cli.models import PATIENT_S, model_folder, open_engine
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.settings import layers_of
    from cacheblend.evaluation import make_scorers, summarise
    from cacheblend.evaluation.choices import make_methods
    from cacheblend.evaluation.scorers import check_scorers

    scorers = tuple(scorer or ("em", "f1"))
    check_scorers(scorers)
    choose = partial(make_methods, **method.choices())
    # a wrong choice is reported before the model is opened
    _check_methods(choose(profile=BlendConfig()), layers_of(model_folder(folder)), deviation=deviation_rows > 0)
    settings = settings_of(questions, top_k, max_tokens)
    with open_engine(
        folder,
        store.store,
        {"anchor": anchor, "load_timeout_s": PATIENT_S},
        dtype=device.dtype,
        device=device.device,
        quiet=json,
    ) as engine:
        methods = choose(profile=engine.settings.config)
        split = split_rows(engine, rows, questions, settings, bad)
        name = questions.file.stem if questions.file else ""
        found = _run(engine, split, methods, settings, out, name, quiet=json)
        made = make_scorers(scorers, engine.builder.encode) if engine.builder else []
        summary = summarise(found, made, seed=seed) | {"bad_rows": bad}
        if deviation_rows:
            summary = _deviations(engine, split, methods, settings, deviation_rows, found, summary, quiet=json)
        assert found.folder is not None and questions.file is not None
        write_results(engine, found, summary, scorers, questions.file.name, replace(to, folder=found.folder))


def _run_paper(
    ctx: typer.Context,
    model: Path | None,
    questions: QuestionOptions,
    ratios: list[str] | None,
    top_k: list[int] | None,
    max_tokens: int,
    scorers: list[str] | None,
    anchor: str,
    device: DeviceOptions,
    to: Destination,
) -> None:
    from cacheblend.cli.paper import PaperOptions, refuse_options, run_paper_command

    refuse_options(given_options(ctx))
    run_paper_command(
        PaperOptions(
            model=needed_model(model),
            questions=questions,
            ratios=ratios or (),
            chunk_numbers=top_k or (),
            max_tokens=max_tokens,
            scorers=scorers or ("f1", "em"),
            anchor=anchor,
            device=device,
            to=to,
        )
    )


def _run_suite(
    ctx: typer.Context,
    model: Path | None,
    questions: QuestionOptions,
    suite: SuiteChoice,
    device: DeviceOptions,
    seed: int,
    to: Destination,
) -> bool:
    """Whether the suite's bars hold."""
    from cacheblend.cli.suite import SuiteOptions, refuse_options, run_suite_command
    from cacheblend.engines.folders import SHIPPED

    refuse_options(given_options(ctx))
    assert suite.suite is not None
    options = SuiteOptions(
        name=suite.suite,
        model=model or Path(SHIPPED),
        per_category=questions.limit,
        seeds=tuple(suite.suite_seed or ()),
        parts=tuple(suite.part or ()),
        bootstrap_seed=seed,
        device=device,
        to=to,
    )
    return run_suite_command(options)


def _check_without_suite(suite: SuiteChoice) -> None:
    from cacheblend.core.errors import InvalidInputError

    for option, value in (("--suite-seed", suite.suite_seed), ("--part", suite.part)):
        if value:
            raise InvalidInputError(f"{option} belongs to the suite; add --suite nano, or leave it out")


def _questions(options: QuestionOptions) -> "tuple[list[QuestionRow], list[str]]":
    """The rows, and why others are left out; read before the model is opened, which takes longer."""
    from cacheblend.core.errors import InvalidInputError

    if options.file is None:
        raise InvalidInputError("there is nothing to ask: give --data FILE, or --suite nano")
    return options.read(options.file)


def _check_methods(methods: "list[Method]", layers: int | None, *, deviation: bool) -> None:
    """Checks the check layers (except a profile's, which is not read yet), and that a method can deviate."""
    from cacheblend.evaluation.choices import PROFILE

    if deviation:
        from cacheblend.evaluation.deviations import fused_methods

        fused_methods(methods)
    for method in methods:
        if layers is not None and method.label.family != PROFILE:
            method.check(layers)


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
        say("the last row of an interrupted run was incomplete and has been evaluated again")
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
    """The summary with deviations."""
    from cacheblend.evaluation.deviations import measure_deviations, with_deviations

    with progress("measuring deviation", "prompts", quiet=quiet) as advance:
        measured = measure_deviations(
            engine, rows, methods, count, settings=settings, folder=found.folder, progress=advance
        )
    return with_deviations(summary, measured)
