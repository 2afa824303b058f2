"""`python -m lab suite nano`: the suite's rows, tables, figures and bars on the model that ships."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.evaluate import Destination, keep_summary, progress_bars, show_summary
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import MODEL_OPTION, PROMPT, AsJson, DeviceOptions, JsonFile, Limit, Out, Seed
from cacheblend.cli.output import check_folder, check_outputs, console, progress, say, status
from lab.bench import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation
    from cacheblend.evaluation.scorers import Scorer
    from lab.suite.suite import Suite

SUITES = ("nano",)
VERDICTS = {True: ("ok", "green"), False: ("missed", "red"), None: ("unknown", "yellow")}


def suite(
    device: DeviceOptions,
    name: Annotated[
        str, typer.Argument(help="nano: questions of every category on the model that ships, against its bars.")
    ] = "nano",
    suite_seed: list[int] | None = option(
        None, "Only these draws of the suite; several times. Default: 1, 2 and 3.", least=0, panel=PROMPT
    ),
    part: list[str] | None = option(
        None, "Only these parts of the suite: main, sweep or gate; several times. Default: all.", panel=PROMPT
    ),
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
    from cacheblend.cli.models import open_engine
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.evaluation.scorers import make_scorers
    from lab.suite.suite import PARTS, Suite

    if name not in SUITES:
        raise InvalidInputError(f"no suite is called {name!r}; there are {', '.join(SUITES)}")
    plain = Suite()
    chosen = Suite(limit or plain.per_category, tuple(suite_seed or ()) or plain.seeds, tuple(part or ()) or PARTS)
    with open_engine(model, "memory", {}, device, quiet=json) as engine:
        assert engine.runtime.builder is not None  # a model folder is opened with its tokenizer
        results = Results(name, chosen, make_scorers(("em", "f1"), engine.runtime.builder.encode), seed)
        results.run(engine, out, quiet=json)
    report = results.report(Destination(out, json, json_file))
    if not json:
        _show(report, results)
    judged = {key: "gate" if key == "gate_holds" else "main" for key in report["bars"]}
    if not all(bar["ok"] for key, bar in report["bars"].items() if judged[key] in chosen.parts):
        raise typer.Exit(1)


@dataclass
class Results:
    """Results of the parts; `seed` is of the intervals."""

    name: str
    suite: "Suite"
    scorers: "list[Scorer]"
    seed: int
    found: "dict[str, Evaluation]" = field(default_factory=dict)
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    gate: dict[str, Any] | None = None

    def run(self, engine: "BlendEngine", out: Path, *, quiet: bool) -> None:
        """Runs the parts, or reads them if all their rows are there already."""
        from lab.suite.figures import at_equal_compute
        from lab.suite.suite import check_gate, plan_main, run_main, run_sweep

        if "main" in self.suite.parts:
            with status("looking for random rows that cost as much as the blend ...", quiet=quiet):
                plan = plan_main(engine, self.suite)
            with progress_bars(quiet=quiet) as advance:
                self._add("main", run_main(engine, self.suite, plan, out, advance))
        if "sweep" in self.suite.parts:
            with progress_bars(quiet=quiet) as advance:
                self._add("sweep", run_sweep(engine, self.suite, out, advance))
            self.summaries["sweep"]["at_equal_compute"] = at_equal_compute(self.summaries["sweep"])
        if "gate" in self.suite.parts:
            with progress("checking the gate's setting", "rows", quiet=quiet) as step:
                self.gate = check_gate(engine, self.suite, out, step)

    def _add(self, part: str, found: "Evaluation") -> None:
        from cacheblend.evaluation import summarise

        if found.resumed:
            say(f"{part}: {found.resumed} of {len(found.rows)} rows were there already")
        if found.torn:
            say(f"{part}: an incomplete row of an interrupted run has been evaluated again")
        self.found[part], self.summaries[part] = found, summarise(found, self.scorers, seed=self.seed)

    def report(self, to: Destination) -> dict[str, Any]:
        """Everything, kept in the parts' folders; the cells only in the JSON that was asked for."""
        from cacheblend.evaluation import with_cells
        from lab.suite.figures import figures

        main = self.found.get("main")
        facts = {
            "name": self.name,
            "parts": self.suite.parts,
            "per_category": self.suite.per_category,
            "seeds": main.config["seeds"] if main else [],
            "resumed": {part: found.resumed for part, found in self.found.items()},
            "torn": {part: found.torn for part, found in self.found.items()},
        }
        sweep = self._keep("sweep", self.summaries["sweep"]) if "sweep" in self.found else None
        report = self.summaries.get("main", {}) | {"suite": facts, "gate": self.gate}
        report |= figures(main.rows if main else [], self.gate, seed=self.seed)
        report = (report if main is None else self._keep("main", report)) | {"sweep": sweep}
        if to.wants_json:
            whole = report if main is None else with_cells(report, main, self.scorers)
            if sweep is not None:
                whole = whole | {"sweep": with_cells(sweep, self.found["sweep"], self.scorers)}
            to.write(whole)
        return report

    def _keep(self, part: str, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes figures and plots to the part's folder; returns the summary as `keep_summary` does."""
        folder = self.found[part].folder
        assert folder is not None
        kept, _ = keep_summary(summary, f"the suite {self.name}, {part}", folder)
        say(f"{part}: figures, and plots where they can be drawn, are in {folder}")
        return kept


# ---- what is shown ------------------------------------------------------------------------------------------


def _show(report: dict[str, Any], results: Results) -> None:
    for summary in results.summaries.values():
        show_summary(summary)
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
    columns = ("value", "95 %", "rows", "bar", "")
    table = plain_table(f"Figures, seeds: {seeds}; points of exact match, % of compute", ("key",), columns)
    for key, value in report["figures"].items():
        entry = report["bars"].get(key)
        if entry is None:
            table.add_row(key, _number(value))
            continue
        interval = "" if entry["low"] is None else f"{entry['low']:.1f} to {entry['high']:.1f}"
        bar = "yes" if entry["bar"] is True else f"at {entry['at']} {entry['bar']}"
        verdict, style = VERDICTS[entry["ok"]]
        table.add_row(key, _number(value), interval, str(entry["n"]), bar, verdict, style=style)
    return table


def _number(value: float | bool | None, digits: int = 2) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.{digits}f}"
