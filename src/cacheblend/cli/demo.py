"""`cacheblend demo`: the main job, with answers, on the small model that ships. Runs it; `demo_report` shows it."""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import BLENDING, OUTPUT, AsJson
from cacheblend.cli.output import check_outputs, console, print_json, progress, status

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine, WarmReport
    from cacheblend.engines.hf.live_check import Outcome
    from cacheblend.evaluation import Evaluation
    from cacheblend.evaluation.demo import Demo
    from cacheblend.evaluation.demo_results import Standing

Ratio = Annotated[
    float,
    typer.Option(
        "--ratio", "-r", help="Of the blend by HKVD: share of loaded tokens to recompute.", rich_help_panel=BLENDING
    ),
]
Questions = Annotated[
    int,
    typer.Option("--questions", "-n", min=1, max=12, help="Of each of the seven categories.", rich_help_panel=OUTPUT),
]
Plot = Annotated[Path, typer.Option("--plot", help="File of the picture: .png, .svg or .pdf.", rich_help_panel=OUTPUT)]
Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep", help="Keep model, passages, questions and store in this new folder.", rich_help_panel=OUTPUT
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of passages, orders and questions.", rich_help_panel=OUTPUT)]

MAX_TOKENS = 8  # of an answer; the longest right one has six
PICTURES = (".png", ".svg", ".pdf")
INSTALL = "pip install 'cacheblend[plot]'"
# bf16, as the weights are, is slow on a CPU that does not compute in it.
DTYPE = "float32"


@dataclass(frozen=True)
class DemoResult:
    """The whole demo, with its end.

    Attributes:
        seed: it was drawn from.
        demo: passages and questions.
        warmed: storing the passages.
        found: all answers.
        summary: of them, see `summarise`.
        standings: the same for people, a method each.
        laws: of exactness.
        plot: the picture; None where matplotlib is missing.
    """

    seed: int
    demo: "Demo"
    warmed: "WarmReport"
    found: "Evaluation"
    summary: dict[str, Any]
    standings: "list[Standing]"
    laws: "list[Outcome]"
    plot: Path | None


def demo(
    ratio: Ratio = 0.15,
    questions: Questions = 4,
    seed: Seed = 0,
    plot: Plot = Path("cacheblend-demo.png"),
    keep: Keep = None,
    json: AsJson = False,
) -> None:
    """Store eight passages once, ask questions over them in many orders, and compare answers and times.

    Runs on the small model that ships, so nothing has to be downloaded; about half a minute on two CPU cores.
    """
    _check(ratio, plot)
    if keep is not None:
        _make(keep)

    from cacheblend.cli.demo_report import show, show_kept
    from cacheblend.evaluation.demo import draw_story

    demo = draw_story(seed, questions)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-demo-")))
        model = _model(keep, demo)
        engine = stack.enter_context(_open(model, folder / "store", quiet=json))
        told = _tell(engine, demo, seed, ratio, plot, quiet=json)
        if json:
            print_json(_facts(engine, told))
            return
        show(engine, told)
    if keep is not None:
        show_kept(keep, demo)


# ---- before the work --------------------------------------------------------------------------------------


def _check(ratio: float, plot: Path) -> None:
    """What would fail in the end is said at once."""
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.core.select.selectors import check_ratio

    check_ratio(ratio)
    if plot.suffix not in PICTURES:
        raise InvalidInputError(f"--plot draws {', '.join(PICTURES)}, not {plot.name!r}")
    check_outputs(plot)


def _make(folder: Path) -> None:
    """The folder that is kept; said before the work, not behind it."""
    from cacheblend.core.errors import InvalidInputError

    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InvalidInputError(f"{folder} exists already; --keep makes a new folder") from error
    except OSError as error:
        raise InvalidInputError(f"--keep {folder}: the folder cannot be made: {error.strerror}") from error


def _model(keep: Path | None, demo: "Demo") -> Path:
    """The model's folder; where the rest is kept, a copy of it beside passages and questions."""
    import json
    import shutil

    from cacheblend.nano import model_path
    from cacheblend.nano.questions import lines

    if keep is None:
        return model_path()
    shutil.copytree(model_path(), keep / "model")
    passages = (json.dumps({"title": passage.title, "text": passage.text}) for passage in demo.passages())
    for name, written in (("passages", passages), ("questions", lines(demo.rows()))):
        (keep / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
    return keep / "model"


# ---- the work ---------------------------------------------------------------------------------------------


def _open(model: Path, store: Path, *, quiet: bool) -> "BlendEngine":
    from cacheblend.cli.models import open_engine

    return open_engine(model, str(store), {"capture": False}, dtype=DTYPE, quiet=quiet)


def _tell(engine: "BlendEngine", demo: "Demo", seed: int, ratio: float, plot: Path, *, quiet: bool) -> DemoResult:
    """Warms, asks, checks, draws."""
    from cacheblend.engines.hf.live_check import LiveCheck
    from cacheblend.evaluation import summarise
    from cacheblend.evaluation.demo_results import standings
    from cacheblend.evaluation.scorers import ExactMatch

    warmed = _warm(engine, demo, quiet=quiet)
    found = _ask(engine, demo, ratio, quiet=quiet)
    summary = summarise(found, [ExactMatch()])
    with status("checking the exactness laws ...", quiet=quiet):
        laws = list(LiveCheck(engine.model, engine.survey).run())
    methods = standings(found, summary)
    picture = _draw(engine, methods, len(demo.told.passages), plot)
    return DemoResult(seed, demo, warmed, found, summary, methods, laws, picture)


def _warm(engine: "BlendEngine", demo: "Demo", *, quiet: bool) -> "WarmReport":
    from cacheblend.engines.hf import Passage

    with progress("warming", "passages", quiet=quiet) as advance:
        return engine.warm([Passage(text.text, text.title) for text in demo.passages()], progress=advance)


def _ask(engine: "BlendEngine", demo: "Demo", ratio: float, *, quiet: bool) -> "Evaluation":
    """All questions by all methods, next to each other."""
    from cacheblend.evaluation import Settings, evaluate
    from cacheblend.evaluation.demo_results import demo_methods

    methods = demo_methods(engine.settings.config, ratio)
    with progress("asking, each way", "questions", quiet=quiet) as advance:

        def answered(stage: str, done: int, total: int) -> None:
            if stage == "answering":
                advance(done, total)

        return evaluate(engine, demo.rows(), methods, settings=Settings(max_tokens=MAX_TOKENS), progress=answered)


def _draw(engine: "BlendEngine", methods: "list[Standing]", passages: int, plot: Path) -> Path | None:
    from importlib.util import find_spec

    from cacheblend.cli.demo_report import model_text

    if find_spec("matplotlib") is None:
        console(stderr=True).print(f"no picture is drawn, that needs matplotlib: {INSTALL}", soft_wrap=True)
        return None
    from cacheblend.evaluation.demo_plot import draw_story_plot

    title = f"{passages} passages stored once; {methods[0].score[1]} questions, each over the passages in another order"
    draw_story_plot(methods, plot, title=title, remark=f"The small model that ships: {model_text(engine)}")
    return plot


def _facts(engine: "BlendEngine", told: DemoResult) -> dict[str, Any]:
    """Everything, for JSON."""
    from cacheblend.core.profile import quality_settings
    from cacheblend.evaluation import with_cells
    from cacheblend.evaluation.scorers import ExactMatch

    settings = engine.settings
    return {
        "seed": told.seed,
        "settings": {"source": settings.source, **quality_settings(settings.config)},
        "warm": {"passages": told.warmed.stored, "tokens": told.warmed.tokens, "seconds": told.warmed.seconds},
        "passages": [{"title": passage.title, "text": passage.text} for passage in told.demo.passages()],
        "questions": [
            {"order": [index + 1 for index in asked.order], "question": row.question, "category": row.category}
            | {"answer": row.answers[0]}
            for asked, row in zip(told.demo.asked, told.demo.rows(), strict=True)
        ],
        "methods": [asdict(method) for method in told.standings],
        "evaluation": with_cells(told.summary, told.found, [ExactMatch()]),
        "laws": [{"law": title, "holds": ok, "detail": detail} for title, ok, detail in told.laws],
        "plot": None if told.plot is None else str(told.plot),
    }
