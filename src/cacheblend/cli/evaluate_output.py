"""What `cacheblend evaluate` shows and writes: bars, tables, figures, plots."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend.cli.output import AdvanceStage, console, stages

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation


def write_results(
    engine: "BlendEngine",
    found: "Evaluation",
    summary: dict[str, Any],
    names: tuple[str, ...],
    data: str,
    folder: Path,
    json: Path | None,
) -> None:
    """Tables on stdout, figures and plots in `folder`; or JSON alone, where it goes to stdout.

    Args:
        engine: that answered.
        found: every cell.
        summary: of it.
        names: of the scorers.
        data: what was asked, for people.
        folder: of summary and plots.
        json: file for everything, ``-`` for stdout, or None.
    """
    from json import dumps

    from cacheblend.evaluation import make_scorers, with_cells

    assert engine.builder is not None  # a model folder is opened with its tokenizer
    summary, plots = keep_summary(summary, data, folder)
    if json is not None:
        cells = with_cells(summary, found, make_scorers(names, engine.builder.encode))
        text = dumps(cells, ensure_ascii=False, indent=2)
        if str(json) == "-":
            typer.echo(text)
            return
        json.write_text(text + "\n", encoding="utf-8")
    show_summary(summary)
    say(f"figures{' and plots' if plots else ''} are in {folder}")


def keep_summary(summary: dict[str, Any], data: str, folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Writes figures and plots to `folder`; the summary comes back with machine, versions and commit."""
    from json import dumps

    from cacheblend.engines import provenance
    from cacheblend.evaluation.records import write_whole

    stamp = {"machine": provenance.machine(), "versions": provenance.versions(), "commit": provenance.commit()}
    summary = {"data": data, **summary, **stamp}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "summary.json", dumps(summary, ensure_ascii=False, indent=2) + "\n")
    return summary, _draw(summary, folder, data)


def show_summary(summary: dict[str, Any]) -> None:
    """Its tables on stdout, its notes on stderr."""
    from cacheblend.evaluation.report import notes, tables

    for table in tables(summary):
        console().print(table)
        console().print()
    for line in notes(summary):
        say(f"note: {line}")


def say(line: str) -> None:
    """A line beside the results, on stderr."""
    console(stderr=True).print(line, soft_wrap=True)


def progress_bars(*, quiet: bool) -> AbstractContextManager[AdvanceStage]:
    """A bar of passages stored and one of rows answered, on stderr; none if `quiet`."""
    return stages({"warming": "warming, passages", "answering": "answering, rows"}, quiet=quiet)


def _draw(summary: dict[str, Any], folder: Path, data: str) -> list[Path]:
    from importlib.util import find_spec

    from cacheblend.evaluation.deviation_plot import draw_deviation
    from cacheblend.evaluation.plots import INSTALL, draw

    if find_spec("matplotlib") is None:
        say(f"no plots are drawn, that needs matplotlib: {INSTALL}")
        return []
    return draw(summary, folder, data=data) + draw_deviation(summary, folder, data=data)
