"""`cacheblend evaluate`: parses options, shows and writes results; what is evaluated is in `cacheblend.evaluation`."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from cacheblend.cli import options, output
from cacheblend.cli.models import PATIENT_S, needed_model, open_engine
from cacheblend.core.errors import InvalidInputError


@dataclass(frozen=True)
class EvaluateOptions(options.PassageOptions):
    """What is asked, of which model, and how answers are scored."""

    panel: ClassVar = options.SCORES
    model: options.OptionalModel = None
    top_k: options.TopK = None
    max_tokens: options.MaxTokens = 32
    answers: options.Answers = "gold"
    scorer: options.Scorers = None
    seed: options.Seed = 0


@dataclass(frozen=True)
class Destination:
    """Where results go: figures and plots into a folder that is made in `folder`; everything, each cell included, as
    JSON to stdout instead of tables, and to a file."""

    folder: options.Out = Path("evaluations")
    json: options.AsJson = False
    json_file: options.JsonFile = None

    def write(self, result: dict[str, Any]) -> None:
        """Writes the result as JSON to each place that was asked for."""
        if self.json_file is not None:
            output.write_json(self.json_file, result)
        if self.json:
            output.print_json(result)

    @property
    def wants_json(self) -> bool:
        """Whether JSON is wanted at all."""
        return self.json or self.json_file is not None


def evaluate(
    questions: options.QuestionOptions,
    method: options.MethodOptions,
    device: options.DeviceOptions,
    what: EvaluateOptions,
    to: Destination,
    store: options.StoreOptions = options.IN_MEMORY,
) -> None:
    """Quality of blending on your data: answers of all methods scored, with intervals, time and compute.

    An interrupted run continues where it stopped when the same command is given again.
    """
    output.check_outputs(to.json_file)
    output.check_folder("--out", to.folder)
    file = questions.file
    if file is None:
        raise InvalidInputError("there is nothing to ask: give --data FILE")
    rows, bad, _ = questions.read(file)  # before the model is opened, which takes longer
    folder = needed_model(what.model)

    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.settings import layers_of
    from cacheblend.evaluation import evaluate, make_methods, make_scorers, summarise, with_cells
    from cacheblend.evaluation.methods import PROFILE
    from cacheblend.evaluation.scorers import check_scorers

    names = tuple(what.scorer or ("em", "f1"))
    check_scorers(names)
    choose = partial(make_methods, **method.choices())
    planned, layers = choose(profile=BlendConfig()), layers_of(folder)
    for each in planned:
        if layers is not None and each.label.family != PROFILE:  # a profile is not read yet
            each.check(layers)
    settings = replace(questions.settings(what.top_k, what.max_tokens), answers=what.answers)
    config = what.settings() | {"load_timeout_s": PATIENT_S}
    with open_engine(folder, store.store, config, device, quiet=to.json) as engine:
        assert engine.runtime.builder is not None  # a model folder is opened with its tokenizer
        methods = choose(profile=engine.runtime.settings.config)
        cases = questions.cases(engine, rows, settings, bad)
        if settings.template.chat is None and not settings.template.is_chat(engine):
            output.say(f"{engine.name} has no chat template: plain prompts")
        name = f"{engine.name}-{file.stem}"
        with progress_bars(quiet=to.json) as advance:
            found = evaluate(engine, cases, methods, settings=settings, out=to.folder, name=name, progress=advance)
        output.say(f"blend: {engine.runtime.settings.source}")
        if found.resumed:
            output.say(f"{found.resumed} of {len(found.rows)} rows were there already")
        if found.torn:
            output.say("the last row of an interrupted run was incomplete and has been evaluated again")
        scorers = make_scorers(names, engine.runtime.builder.encode)
        summary = summarise(found, scorers, seed=what.seed) | {"bad_rows": bad}
        assert found.folder is not None  # rows are written where `out` is given
        summary, plots = keep_summary(summary, file.name, found.folder)
        if to.wants_json:
            to.write(with_cells(summary, found, scorers))
    if to.json:
        return
    show_summary(summary)
    output.say(f"figures{' and plots' if plots else ''} are in {found.folder}")


def keep_summary(summary: dict[str, Any], data: str, folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Writes figures and plots to `folder`; returns the summary with machine, versions and commit, and the plots."""
    from cacheblend.engines.provenance import stamp
    from cacheblend.evaluation.plots import draw
    from cacheblend.evaluation.scorers import INSTALL

    summary = {"data": data, **summary, **stamp()}
    folder.mkdir(parents=True, exist_ok=True)
    output.write_json(folder / "summary.json", summary)
    if output.can_draw():
        return summary, draw(summary, folder, data=data)
    output.say(f"no plots are drawn, that needs matplotlib: {INSTALL}")
    return summary, []


def show_summary(summary: dict[str, Any]) -> None:
    """Its tables on stdout, its notes on stderr."""
    from cacheblend.evaluation.report import notes, tables

    for table in tables(summary):
        output.console().print(table)
        output.console().print()
    for line in notes(summary):
        output.say(f"note: {line}")


def progress_bars(*, quiet: bool) -> AbstractContextManager[output.AdvanceStage]:
    """A bar of passages stored and one of rows answered, on stderr; none if `quiet`."""
    return output.stages({"warming": "warming, passages", "answering": "answering, rows"}, quiet=quiet)
