"""`python -m lab suite nano`: the suite's rows, tables, figures and bars on the model that ships."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.evaluate import Destination, keep_summary, progress_bars, show_summary
from cacheblend.cli.options import MODEL_OPTION, PROMPT, AsJson, DeviceOptions, JsonFile, Limit, Out, Seed
from cacheblend.cli.output import check_folder, check_outputs, console, progress, say, status

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation
    from cacheblend.evaluation.scorers import Scorer
    from lab.suite.suite import Suite

SUITES = ("nano",)

Name = Annotated[
    str, typer.Argument(help="nano: questions of every category on the model that ships, against its bars.")
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(
        "--suite-seed",
        min=0,
        help="Only these draws of the suite; several times. Default: 1, 2 and 3.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Only these parts of the suite: main, sweep or gate; several times. Default: all.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class SuiteOptions:
    """What a user set.

    Attributes:
        name: one of `SUITES`.
        model: folder.
        per_category: rows of each category and seed; None: the suite's own number.
        seeds: of the draws; empty: the suite's own.
        parts: empty: all.
        bootstrap_seed: of the intervals.
        device: of the model.
        to: where results go; folders of results are made in its folder.
    """

    name: str
    model: Path
    per_category: int | None
    seeds: tuple[int, ...]
    parts: tuple[str, ...]
    bootstrap_seed: int
    device: DeviceOptions
    to: Destination


@dataclass
class _Results:
    """Results of the parts.

    Attributes:
        scorers: of the tables.
        found: rows of the main part and of the sweep, by part.
        summaries: by part.
        gate: result of the gate's check; None if that part was not run.
    """

    scorers: "list[Scorer]"
    found: "dict[str, Evaluation]" = field(default_factory=dict)
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    gate: dict[str, Any] | None = None


def suite(
    device: DeviceOptions,
    name: Name = "nano",
    suite_seed: Seeds = None,
    part: Parts = None,
    model: Annotated[Path, MODEL_OPTION] = Path("nano"),
    limit: Limit = None,
    seed: Seed = 0,
    out: Out = Path("evaluations"),
    json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """The suite of the model that ships: exact match by category, a sweep at equal compute, its gate; and their bars.

    An interrupted run continues where it stopped when the same command is given again. Exit code 1: a bar is missed.
    """
    check_outputs(json_file)
    check_folder("--out", out)
    options = SuiteOptions(
        name=name,
        model=model,
        per_category=limit,
        seeds=tuple(suite_seed or ()),
        parts=tuple(part or ()),
        bootstrap_seed=seed,
        device=device,
        to=Destination(out, json, json_file),
    )
    if not run_suite_command(options):
        raise typer.Exit(1)


def run_suite_command(options: SuiteOptions) -> bool:
    """Runs the parts, or reports them if all their rows are there already; returns whether their bars hold.

    Raises:
        InvalidInputError: no such suite or part.
    """
    from cacheblend.cli.models import open_engine
    from cacheblend.core.errors import InvalidInputError
    from lab.suite.suite import PARTS, Suite

    if options.name not in SUITES:
        raise InvalidInputError(f"no suite is called {options.name!r}; there are {', '.join(SUITES)}")
    plain = Suite()
    suite = Suite(options.per_category or plain.per_category, options.seeds or plain.seeds, options.parts or PARTS)
    quiet, device = options.to.json, options.device
    with open_engine(options.model, "memory", {}, device, quiet=quiet) as engine:
        results = _run(engine, suite, options, quiet=quiet)
    report = _report(suite, results, options)
    if not quiet:
        _show(report, results)
    part_of = {key: "gate" if key == "gate_holds" else "main" for key in report["bars"]}
    return all(bar["ok"] for key, bar in report["bars"].items() if part_of[key] in suite.parts)


def _run(engine: "BlendEngine", suite: "Suite", options: SuiteOptions, *, quiet: bool) -> _Results:
    from cacheblend.evaluation.scorers import make_scorers
    from lab.suite.gate import check_gate
    from lab.suite.suite import plan_main, run_main, run_sweep

    assert engine.builder is not None  # a model folder is opened with its tokenizer
    results = _Results(make_scorers(("em", "f1"), engine.builder.encode))
    if "main" in suite.parts:
        with status("looking for random rows that cost as much as the blend ...", quiet=quiet):
            plan = plan_main(engine, suite)
        with progress_bars(quiet=quiet) as advance:
            _add(results, "main", run_main(engine, suite, plan, options.to.folder, advance), options)
    if "sweep" in suite.parts:
        with progress_bars(quiet=quiet) as advance:
            _add(results, "sweep", run_sweep(engine, suite, options.to.folder, advance), options)
    if "gate" in suite.parts:
        with progress("checking the gate's setting", "rows", quiet=quiet) as step:
            results.gate = check_gate(engine, suite, options.to.folder, step)
    return results


def _add(results: _Results, part: str, found: "Evaluation", options: SuiteOptions) -> None:
    from cacheblend.evaluation import summarise
    from lab.suite.figures import at_equal_compute

    if found.resumed:
        say(f"{part}: {found.resumed} of {len(found.rows)} rows were there already")
    if found.torn:
        say(f"{part}: an incomplete row of an interrupted run has been evaluated again")
    results.found[part] = found
    results.summaries[part] = summarise(found, results.scorers, seed=options.bootstrap_seed)
    if part == "sweep":
        results.summaries[part]["at_equal_compute"] = at_equal_compute(results.summaries[part])


def _keep(results: _Results, part: str, summary: dict[str, Any], options: SuiteOptions) -> dict[str, Any]:
    """Writes figures and plots to the part's folder; returns the summary as `keep_summary` does."""
    folder = results.found[part].folder
    assert folder is not None
    kept, _ = keep_summary(summary, f"the suite {options.name}, {part}", folder)
    say(f"{part}: figures, and plots where they can be drawn, are in {folder}")
    return kept


def _report(suite: "Suite", results: _Results, options: SuiteOptions) -> dict[str, Any]:
    """Everything; the cells only in the JSON that was asked for."""
    from cacheblend.evaluation import with_cells
    from lab.suite.figures import figures

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
    if options.to.wants_json:
        whole = report if main is None else with_cells(report, main, results.scorers)
        if sweep is not None:
            whole = whole | {"sweep": with_cells(sweep, results.found["sweep"], results.scorers)}
        options.to.write(whole)
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
        "The text is built so that few tokens depend on other chunks: this shows the mechanism on this model.\n"
        "cacheblend evaluate --data FILE evaluates your own data."
    )


def _bars_table(report: dict[str, Any]) -> "Table":
    """A line for each figure: its value, its bar, and whether it holds; at most 80 columns."""
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
    from lab.suite.figures import EQUAL_SHARES

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
