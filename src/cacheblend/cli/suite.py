"""`cacheblend evaluate --suite nano`: the suite's rows, tables, figures and bars on the model that ships."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend.cli.evaluate_output import keep_summary, progress_bars, say, show_summary
from cacheblend.cli.models import open_engine
from cacheblend.cli.output import console, progress, status

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation
    from cacheblend.evaluation.scorers import Scorer
    from cacheblend.evaluation.suite import Suite

SUITES = ("nano",)
OPTIONS = frozenset(
    ["--suite", "--suite-seed", "--part", "--model", "--rows", "--seed", "--dtype", "--device", "--out", "--json"]
)
"""Of `evaluate`, those that may stand beside --suite; it brings the rest with it."""


@dataclass(frozen=True)
class SuiteOptions:
    """What a user set.

    Attributes:
        name: of `SUITES`.
        model: folder.
        per_category: rows of each category and seed; None: the suite's own number.
        seeds: of the draws; empty: the suite's own.
        parts: empty: all.
        bootstrap_seed: of the intervals.
        dtype, device: of the model.
        out: folder in which the folders of results are made.
        json: file for everything, or ``-``.
    """

    name: str
    model: Path
    per_category: int | None
    seeds: tuple[int, ...]
    parts: tuple[str, ...]
    bootstrap_seed: int
    dtype: str
    device: str | None
    out: Path
    json: Path | None


@dataclass
class _Results:
    """What the parts have found.

    Attributes:
        scorers: of the tables.
        found: rows of the main part, and of the sweep.
        summaries: of the same.
        gate: what was found of it; None if that part was not run.
    """

    scorers: "list[Scorer]"
    found: "dict[str, Evaluation]" = field(default_factory=dict)
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    gate: dict[str, Any] | None = None


def refuse_options(given: Iterable[str]) -> None:
    """Raises `InvalidInputError` for options that the suite would not heed."""
    from cacheblend.core.errors import InvalidInputError

    refused = sorted(set(given) - OPTIONS)
    if refused:
        raise InvalidInputError(f"--suite brings its own rows, methods and settings; leave {', '.join(refused)} out")


def run_suite_command(options: SuiteOptions) -> bool:
    """Runs the parts, or reports them where all their rows are there; whether the bars of these parts hold.

    Raises:
        InvalidInputError: no such suite or part.
    """
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.evaluation.suite import PARTS, Suite

    if options.name not in SUITES:
        raise InvalidInputError(f"no suite is called {options.name!r}; there are {', '.join(SUITES)}")
    plain = Suite()
    suite = Suite(options.per_category or plain.per_category, options.seeds or plain.seeds, options.parts or PARTS)
    quiet = str(options.json) == "-"
    with open_engine(options.model, "memory", {}, dtype=options.dtype, device=options.device, quiet=quiet) as engine:
        results = _run(engine, suite, options, quiet=quiet)
    report = _report(suite, results, options)
    if not quiet:
        _show(report, results)
    part_of = {key: "gate" if key == "gate_holds" else "main" for key in report["bars"]}
    return all(bar["ok"] for key, bar in report["bars"].items() if part_of[key] in suite.parts)


def _run(engine: "BlendEngine", suite: "Suite", options: SuiteOptions, *, quiet: bool) -> _Results:
    from cacheblend.evaluation.scorers import make_scorers
    from cacheblend.evaluation.suite import plan_main, run_main, run_sweep
    from cacheblend.evaluation.suite_gate import check_gate

    assert engine.builder is not None  # a model folder is opened with its tokenizer
    results = _Results(make_scorers(("em", "f1"), engine.builder.encode))
    if "main" in suite.parts:
        with status("looking for random rows as dear as the blend ...", quiet=quiet):
            plan = plan_main(engine, suite)
        with progress_bars(quiet=quiet) as advance:
            _add(results, "main", run_main(engine, suite, plan, options.out, advance), options)
    if "sweep" in suite.parts:
        with progress_bars(quiet=quiet) as advance:
            _add(results, "sweep", run_sweep(engine, suite, options.out, advance), options)
    if "gate" in suite.parts:
        with progress("checking the gate's setting", "rows", quiet=quiet) as step:
            results.gate = check_gate(engine, suite, options.out, step)
    return results


def _add(results: _Results, part: str, found: "Evaluation", options: SuiteOptions) -> None:
    from cacheblend.evaluation import summarise
    from cacheblend.evaluation.suite_figures import at_equal_compute

    if found.resumed:
        say(f"{part}: {found.resumed} of {len(found.rows)} rows were there already")
    if found.torn:
        say(f"{part}: a half written row of an interrupted run has been evaluated again")
    results.found[part] = found
    results.summaries[part] = summarise(found, results.scorers, seed=options.bootstrap_seed)
    if part == "sweep":
        results.summaries[part]["at_equal_compute"] = at_equal_compute(results.summaries[part])


def _keep(results: _Results, part: str, summary: dict[str, Any], options: SuiteOptions) -> dict[str, Any]:
    """Figures and plots in the part's folder; the summary with what `keep_summary` adds."""
    folder = results.found[part].folder
    assert folder is not None
    kept, _ = keep_summary(summary, f"the suite {options.name}, {part}", folder)
    say(f"{part}: figures, and plots where they can be drawn, are in {folder}")
    return kept


def _report(suite: "Suite", results: _Results, options: SuiteOptions) -> dict[str, Any]:
    """Everything; its cells only in the file that was asked for."""
    from json import dumps

    from cacheblend.evaluation import with_cells
    from cacheblend.evaluation.suite_figures import figures

    main = results.found.get("main")
    facts = {
        "name": options.name,
        "parts": suite.parts,
        "per_category": suite.per_category,
        "seeds": main.config["seeds"] if main else [],
        "resumed": {part: found.resumed for part, found in results.found.items()},
        "torn": {part: found.torn for part, found in results.found.items()},
    }
    sweep = _keep(results, "sweep", results.summaries["sweep"], options) if "sweep" in results.found else None
    report = results.summaries.get("main", {}) | {"suite": facts, "gate": results.gate}
    report |= figures(main.rows if main else [], results.gate, seed=options.bootstrap_seed)
    report = (report if main is None else _keep(results, "main", report, options)) | {"sweep": sweep}
    if options.json is not None:
        whole = report if main is None else with_cells(report, main, results.scorers)
        if sweep is not None:
            whole = whole | {"sweep": with_cells(sweep, results.found["sweep"], results.scorers)}
        text = dumps(whole, ensure_ascii=False, indent=2)
        if str(options.json) == "-":
            typer.echo(text)
        else:
            options.json.write_text(text + "\n", encoding="utf-8")
    return report


def _show(report: dict[str, Any], results: _Results) -> None:
    for summary in results.summaries.values():
        show_summary(summary)
    if "sweep" in results.summaries:
        console().print(_sweep_table(report["sweep"]))
        console().print()
    console().print(_bars_table(report))
    missing = {key: entry["reason"] for key, entry in report["bars"].items() if "reason" in entry}
    for reason in dict.fromkeys(missing.values()):
        say(f"note: {', '.join(key for key in missing if missing[key] == reason)}: {reason}")
    typer.echo(
        "The text is built so that few tokens carry what crosses chunks: this shows the mechanism on this model.\n"
        "cacheblend evaluate --data FILE is there for yours."
    )


def _bars_table(report: dict[str, Any]) -> "Table":
    """A line a figure: its value, its bar, and whether it holds; 80 columns show it whole."""
    seeds = ", ".join(map(str, report["suite"]["seeds"])) or "none"
    table = _plain_table(f"Figures, seeds: {seeds}; points of exact match, % of compute")
    table.add_column("key", no_wrap=True)
    for column in ("value", "95 %", "rows", "bar", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for key, value in report["figures"].items():
        entry = report["bars"].get(key)
        if entry is None:
            table.add_row(key, _number(value))
            continue
        interval = "" if entry["low"] is None else f"{entry['low']:.1f} to {entry['high']:.1f}"
        bar = "yes" if entry["bar"] is True else f"at {entry['at']} {entry['bar']}"
        verdict, style = _VERDICTS[entry["ok"]]
        table.add_row(key, _number(value), interval, str(entry["n"]), bar, verdict, style=style)
    return table


_VERDICTS = {True: ("ok", "green"), False: ("missed", "red"), None: ("unknown", "yellow")}


def _sweep_table(summary: dict[str, Any]) -> "Table":
    from cacheblend.evaluation.suite_figures import EQUAL_SHARES

    table = _plain_table("Exact match at equal total compute, %: all categories, cross")
    table.add_column("selector", no_wrap=True)
    for share in EQUAL_SHARES:
        table.add_column(f"{100 * share:g} %", justify="right", no_wrap=True)
    for line in summary["at_equal_compute"]:
        if all(value is None for value in line["all"]):
            continue
        cross = line["by_category"].get("cross", [None] * len(EQUAL_SHARES))
        both = zip(line["all"], cross, strict=True)
        table.add_row(line["family"], *("" if a is None else f"{_number(a, 1)}, {_number(b, 1)}" for a, b in both))
    return table


def _plain_table(title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _number(value: float | bool | None, digits: int = 2) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.{digits}f}"
