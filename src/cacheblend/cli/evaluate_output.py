"""What `cacheblend evaluate` shows and writes: bars, tables, figures, plots."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cacheblend.cli.output import AdvanceStage, console, print_json, stages, write_json

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation, Method, Settings


@dataclass(frozen=True)
class Destination:
    """Where results go.

    Attributes:
        folder: for figures and plots.
        json: one JSON object on stdout instead of tables.
        json_file: for everything, each cell included; None for none.
    """

    folder: Path
    json: bool = False
    json_file: Path | None = None

    def write(self, result: dict[str, Any]) -> None:
        """Writes the result as JSON to each place that was asked for."""
        if self.json_file is not None:
            write_json(self.json_file, result)
        if self.json:
            print_json(result)

    @property
    def wants_json(self) -> bool:
        """Whether JSON is wanted at all."""
        return self.json or self.json_file is not None


class Further(Protocol):
    """What is measured beside the answers of an evaluation."""

    def check(self, methods: "list[Method]") -> None:
        """Raises `InvalidInputError` for methods of which it measures nothing; before the model is opened."""

    def measure(
        self,
        engine: "BlendEngine",
        rows: "list[QuestionRow]",
        methods: "list[Method]",
        settings: "Settings",
        found: "Evaluation",
        summary: dict[str, Any],
    ) -> dict[str, Any]:
        """The summary with what it measured."""

    def draw(self, summary: dict[str, Any], folder: Path, data: str) -> list[Path]:
        """Draws it into the folder; the pictures."""

    def show(self, summary: dict[str, Any]) -> None:
        """Prints its tables on stdout and its notes on stderr, behind those of the answers."""


def write_results(
    engine: "BlendEngine",
    found: "Evaluation",
    summary: dict[str, Any],
    names: tuple[str, ...],
    data: str,
    to: Destination,
    further: Further | None = None,
) -> None:
    """Tables on stdout, figures and plots in the folder; or JSON alone where it goes to stdout.

    Args:
        engine: that answered.
        found: every cell.
        summary: of `found`.
        names: of the scorers.
        data: what was asked, for people.
        to: where results go.
        further: what was measured beside the answers, if anything was.
    """
    from cacheblend.evaluation import make_scorers, with_cells

    assert engine.builder is not None  # a model folder is opened with its tokenizer
    summary, plots = keep_summary(summary, data, to.folder)
    if further is not None:
        plots += further.draw(summary, to.folder, data)
    if to.wants_json:
        to.write(with_cells(summary, found, make_scorers(names, engine.builder.encode)))
    if to.json:
        return
    show_summary(summary)
    if further is not None:
        further.show(summary)
    say(f"figures{' and plots' if plots else ''} are in {to.folder}")


def keep_summary(summary: dict[str, Any], data: str, folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Writes figures and plots to `folder`; returns the summary with machine, versions and commit, and the plots."""
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

    from cacheblend.evaluation.plots import INSTALL, draw

    if find_spec("matplotlib") is None:
        say(f"no plots are drawn, that needs matplotlib: {INSTALL}")
        return []
    return draw(summary, folder, data=data)
