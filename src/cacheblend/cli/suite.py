"""`cacheblend evaluate --suite nano`: the suite's rows, tables and figures on the model that ships."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from cacheblend.cli.evaluate_output import progress_bars, say, write_results
from cacheblend.cli.models import open_engine
from cacheblend.cli.output import console

SUITES = ("nano",)


@dataclass(frozen=True)
class SuiteOptions:
    """What a user set.

    Attributes:
        name: of `SUITES`.
        model: folder.
        data: must be None.
        per_category: rows of each category and seed; None: the suite's own number.
        seeds: of the draws; empty: the suite's own.
        dtype, device: of the model.
        out: folder in which the folders of results are made.
        json: file for everything, or ``-``.
    """

    name: str
    model: Path
    data: Path | None
    per_category: int | None
    seeds: tuple[int, ...]
    dtype: str
    device: str | None
    out: Path
    json: Path | None


def run_suite_command(options: SuiteOptions) -> None:
    """Runs the suite, or reports it where all its rows are there.

    Raises:
        InvalidInputError: no such suite, or data beside it.
    """
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.evaluation.suite import Suite, run_suite, suite_summary

    if options.name not in SUITES:
        raise InvalidInputError(f"no suite is called {options.name!r}; there are {', '.join(SUITES)}")
    if options.data is not None:
        raise InvalidInputError("--suite brings its own rows; leave --data out")
    plain = Suite()
    suite = Suite(options.per_category or plain.per_category, options.seeds or plain.seeds)
    quiet = str(options.json) == "-"
    with open_engine(options.model, "memory", {}, dtype=options.dtype, device=options.device, quiet=quiet) as engine:
        with progress_bars(quiet=quiet) as advance:
            found = run_suite(engine, suite, options.out, advance)
        if found.resumed:
            say(f"{found.resumed} of {len(found.rows)} rows were there already")
        summary = suite_summary(engine, suite, found)
        write_results(engine, found, summary, ("em", "f1"), "the suite nano", options.out / "suite-nano", options.json)
    if not quiet:
        _show(summary)


def _show(summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="Figures: points of exact match, % of compute")
    table.add_column("key")
    table.add_column("value", justify="right")
    for key, value in summary["figures"].items():
        if isinstance(value, bool | int | float):
            table.add_row(key, str(value) if isinstance(value, bool) else f"{value:.2f}")
    console().print(table)
    typer.echo(
        "The text is built so that few tokens carry what crosses chunks: this shows the mechanism on this model.\n"
        "cacheblend evaluate --data FILE is there for yours."
    )
