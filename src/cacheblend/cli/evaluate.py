"""`cacheblend evaluate`: parses options; what is evaluated, and how, is in `cacheblend.evaluation`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend.cli.evaluate_options import MethodOptions, OptionalModel, Out, Scorers, TopK
from cacheblend.cli.evaluate_output import Destination, Further, progress_bars, say, write_results
from cacheblend.cli.options import IN_MEMORY, Anchor, AsJson, DeviceOptions, JsonFile, Seed, StoreOptions
from cacheblend.cli.output import check_folder, check_outputs
from cacheblend.cli.prompt_options import MaxTokens, QuestionOptions
from cacheblend.cli.question_files import needed_model, settings_of, split_rows

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation, Method, Settings


def evaluate(
    questions: QuestionOptions,
    method: MethodOptions,
    device: DeviceOptions,
    model: OptionalModel = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = 32,
    scorer: Scorers = None,
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
    to = Destination(out, json, json_file)
    run_evaluation(questions, method, device, model, top_k, max_tokens, scorer, seed, store, anchor, to)


def run_evaluation(
    questions: QuestionOptions,
    method: MethodOptions,
    device: DeviceOptions,
    model: Path | None,
    top_k: list[int] | None,
    max_tokens: int,
    scorer: list[str] | None,
    seed: int,
    store: StoreOptions,
    anchor: str,
    to: Destination,
    further: Further | None = None,
) -> None:
    """What `evaluate` does.

    Args:
        questions, method, device, model, top_k, max_tokens, scorer, seed, store, anchor: see the options.
        to: where results go; the folder of results is made in its folder.
        further: what is measured beside the answers.
    """
    check_outputs(to.json_file)
    check_folder("--out", to.folder)
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
    planned = choose(profile=BlendConfig())
    if further is not None:
        further.check(planned)
    _check_layers(planned, layers_of(model_folder(folder)))  # a wrong choice is reported before the model is opened
    settings = settings_of(questions, top_k, max_tokens)
    with open_engine(
        folder,
        store.store,
        {"anchor": anchor, "load_timeout_s": PATIENT_S},
        dtype=device.dtype,
        device=device.device,
        quiet=to.json,
    ) as engine:
        methods = choose(profile=engine.settings.config)
        split = split_rows(engine, rows, questions, settings, bad)
        name = questions.file.stem if questions.file else ""
        found = _run(engine, split, methods, settings, to.folder, name, quiet=to.json)
        made = make_scorers(scorers, engine.builder.encode) if engine.builder else []
        summary = summarise(found, made, seed=seed) | {"bad_rows": bad}
        if further is not None:
            summary = further.measure(engine, split, methods, settings, found, summary)
        assert found.folder is not None and questions.file is not None
        to = replace(to, folder=found.folder)
        write_results(engine, found, summary, scorers, questions.file.name, to, further)


def _questions(options: QuestionOptions) -> "tuple[list[QuestionRow], list[str]]":
    """The rows, and why others are left out; read before the model is opened, which takes longer."""
    from cacheblend.core.errors import InvalidInputError

    if options.file is None:
        raise InvalidInputError("there is nothing to ask: give --data FILE")
    return options.read(options.file)


def _check_layers(methods: "list[Method]", layers: int | None) -> None:
    """Checks the check layers, except a profile's, which is not read yet."""
    from cacheblend.evaluation.choices import PROFILE

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
