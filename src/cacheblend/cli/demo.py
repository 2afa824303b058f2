"""`cacheblend demo`: runs the demo on the model that ships. `evaluation.demo` does the work, `demo_report` shows it."""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import BLENDING, OUTPUT, AsJson
from cacheblend.cli.output import check_outputs, console, print_json, stages

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation.demo import Demo, DemoResult

Ratio = Annotated[
    float,
    typer.Option(
        "--ratio", "-r", help="Share of loaded tokens that the blend by HKVD recomputes.", rich_help_panel=BLENDING
    ),
]
Questions = Annotated[
    int,
    typer.Option("--questions", "-n", min=1, max=12, help="Questions of each category.", rich_help_panel=OUTPUT),
]
Plot = Annotated[Path, typer.Option("--plot", help="File of the picture: .png, .svg or .pdf.", rich_help_panel=OUTPUT)]
Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep", help="Keep model, passages, questions and store in this new folder.", rich_help_panel=OUTPUT
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of passages, orders and questions.", rich_help_panel=OUTPUT)]

PICTURES = (".png", ".svg", ".pdf")
INSTALL = "pip install 'cacheblend[plot]'"
STAGES = {"warming": "warming, passages", "answering": "answering with every method, questions"}
DTYPE = "float32"  # the weights are bf16, in which many CPUs compute slowly


def demo(
    ratio: Ratio = 0.15,
    questions: Questions = 4,
    seed: Seed = 0,
    plot: Plot = Path("cacheblend-demo.png"),
    keep: Keep = None,
    json: AsJson = False,
) -> None:
    """Store eight passages once, ask questions over them in many orders, and compare answers and times.

    Runs on the small model that ships, so nothing is downloaded; takes about half a minute on two CPU cores.
    """
    _check(ratio, plot)
    if keep is not None:
        _make(keep)

    from cacheblend.cli import demo_report
    from cacheblend.cli.models import open_engine
    from cacheblend.evaluation.demo import draw_demo, run_demo

    drawn = draw_demo(seed, questions)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-demo-")))
        model, store = _write(keep, drawn), str(folder / "store")
        engine = stack.enter_context(open_engine(model, store, {"capture": False}, dtype=DTYPE, quiet=json))
        with stages(STAGES, quiet=json) as advance:
            result = run_demo(engine, drawn, ratio, advance)
        picture = _draw(engine, result, plot)
        if json:
            print_json(_facts(engine, seed, result, picture))
            return
        demo_report.show(engine, result, picture)
    if keep is not None:
        demo_report.show_kept(keep, drawn)


def _check(ratio: float, plot: Path) -> None:
    """Refuses invalid options before any work is done."""
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.core.select.selectors import check_ratio

    check_ratio(ratio)
    if plot.suffix not in PICTURES:
        raise InvalidInputError(f"--plot draws {', '.join(PICTURES)}, not {plot.name!r}")
    check_outputs(plot)


def _make(folder: Path) -> None:
    """Makes the folder of --keep, before any work is done."""
    from cacheblend.core.errors import InvalidInputError

    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InvalidInputError(f"{folder} exists already; --keep makes a new folder") from error
    except OSError as error:
        raise InvalidInputError(f"--keep {folder}: the folder cannot be made: {error.strerror}") from error


def _write(keep: Path | None, drawn: "Demo") -> Path:
    """Folder of the model; with --keep, a copy of it next to files of passages and questions."""
    import shutil

    from cacheblend.nano import model_path
    from cacheblend.nano.questions import lines

    if keep is None:
        return model_path()
    shutil.copytree(model_path(), keep / "model")
    passages = (json.dumps({"title": passage.title, "text": passage.text}) for passage in drawn.passages())
    for name, written in (("passages", passages), ("questions", lines(drawn.rows()))):
        (keep / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
    return keep / "model"


def _draw(engine: "BlendEngine", result: "DemoResult", plot: Path) -> Path | None:
    """Draws the picture; None without matplotlib."""
    from importlib.util import find_spec

    from cacheblend.cli.demo_report import model_text

    if find_spec("matplotlib") is None:
        console(stderr=True).print(f"no picture is drawn, that needs matplotlib: {INSTALL}", soft_wrap=True)
        return None
    from cacheblend.evaluation.demo_plot import draw_demo_plot

    passages, questions = len(result.demo.scene.passages), len(result.demo.questions)
    title = f"{passages} passages stored once; {questions} questions, each over the passages in another order"
    draw_demo_plot(result.methods, plot, title=title, remark=f"The small model that ships: {model_text(engine)}")
    return plot


def _facts(engine: "BlendEngine", seed: int, result: "DemoResult", plot: Path | None) -> dict[str, Any]:
    """Everything, for JSON."""
    from cacheblend.core.profile import quality_settings
    from cacheblend.evaluation import with_cells
    from cacheblend.evaluation.scorers import ExactMatch

    settings, warmed, drawn = engine.settings, result.warmed, result.demo
    return {
        "seed": seed,
        "settings": {"source": settings.source, **quality_settings(settings.config)},
        "warm": {"passages": warmed.stored, "tokens": warmed.tokens, "seconds": warmed.seconds},
        "passages": [{"title": passage.title, "text": passage.text} for passage in drawn.passages()],
        "questions": [
            {"order": [index + 1 for index in each.order], "question": row.question, "category": row.category}
            | {"answer": row.answers[0]}
            for each, row in zip(drawn.questions, drawn.rows(), strict=True)
        ],
        "methods": [asdict(method) for method in result.methods],
        "evaluation": with_cells(result.summary, result.found, [ExactMatch()]),
        "invariants": [{"invariant": title, "holds": ok, "detail": detail} for title, ok, detail in result.checks],
        "plot": None if plot is None else str(plot),
    }
