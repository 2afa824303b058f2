"""Runs the parts one after the other and writes the report after each, so that an interrupted run shows what it has.

The report is ``report.md`` with pictures and tables, and ``report.json`` with all points.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheblend.cli.output import can_draw
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import failed_since, failures, in_words
from cacheblend.engines import provenance
from cacheblend.engines.files import write_whole
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.provenance import stamp
from cacheblend.engines.settings import describe as in_short
from cacheblend.evaluation import Settings
from cacheblend.evaluation.records import folder_name
from cacheblend.evaluation.report import TITLES
from cacheblend.evaluation.runner import describe
from cacheblend.evaluation.scorers import INSTALL, Scorer
from lab.bench import AdvanceStage, markdown_table, silent
from lab.paper import device, quality, side_by_side
from lab.paper.context import AGREEMENT, Context, DataSet, LeftOutError, Part, Sweeps

PARTS = (
    *(quality.QUALITY, quality.RATIO, quality.NUMBER, quality.LENGTH),
    *(side_by_side.BATCH, side_by_side.RATE, device.PART),
)
FILE, DATA = "report.md", "report.json"


def run_paper(
    engine: BlendEngine,
    data: Sequence[DataSet],
    scorers: Sequence[Scorer],
    *,
    settings: Settings,
    sweeps: Sweeps,
    out: Path,
    progress: AdvanceStage = silent,
) -> dict[str, Any]:
    """Measures what is not there yet, draws all figures, writes the report.

    Args:
        engine: on a store in memory; it must not capture missed chunks. Nothing else may run on it.
        data: with contexts already split; names are unique.
        scorers: the first one is drawn; rows without gold answers are compared with full recompute's first token.
        settings: layout of the prompts, most tokens of an answer; all passages of a row are used.
        sweeps: see `Sweeps`.
        out: parent of the folder of results, whose name has the hash of model, data and settings. Parts are kept in
            folders of their own, so other sweeps measure only what they change.
        progress: called with (name of the part, done, in all).

    Returns:
        What ``report.json`` in the folder has: ``parts`` by name, each with ``points`` and ``notes``, or with
        ``left_out``, the reason; ``data``, ``model``, ``folder``, ``pictures`` by part, and where it was measured.
    """
    names = [of.name for of in data]
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"data sets with different names are needed, got {', '.join(names) or 'none'}")
    rows = [row for of in data for row in of.rows]
    identity = describe(engine, rows, [], settings, []) | {"sets": [(of.name, len(of.rows)) for of in data]}
    folder = out / folder_name(f"paper-{engine.name}", identity)
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(engine, data, settings, scorers, sweeps, folder, progress)
    results, pictures = dict[str, dict[str, Any]](), dict[str, str]()
    for number, part in enumerate(PARTS, start=1):
        found = results[part.name] = _run(part, context)
        if found["points"] and can_draw():
            pictures[part.name] = f"{number}-{part.name}.png"
            title = f"{part.title}: {engine.name}, {', '.join(names)}"
            part.draw(found, title, folder / pictures[part.name])
        whole = _write(context, results, pictures)
    return whole


def _run(part: Part, context: Context) -> dict[str, Any]:
    before = failures()
    try:
        found = part.measure(context)
        if failed := failed_since(before):
            raise LeftOutError(f"{in_words(failed)} failed while it was measured, and was computed in full")
        return found
    except LeftOutError as reason:
        return {"points": [], "notes": [], "machines": [], "resumed": 0, "left_out": str(reason)}


def _write(context: Context, results: Mapping[str, dict[str, Any]], pictures: Mapping[str, str]) -> dict[str, Any]:
    """Writes both files; returns what is in the JSON."""
    settings = context.engine.runtime.settings  # without the folder of a profile, which says nothing elsewhere
    blend = f"the model's profile ({in_short(settings.profile.settings)})" if settings.profile else settings.source
    whole = {
        "model": context.engine.name,
        "settings_of_blend": blend,
        "machine_line": provenance.machine_line(),
        "max_tokens": context.settings.max_tokens,
        "scorers": [scorer.name for scorer in context.scorers],
        "sweeps": vars(context.sweeps),
        "data": [{"name": of.name, "rows": len(of.rows), "bad_rows": list(of.bad)} for of in context.data],
        "folder": str(context.folder),
        "figures": {"paper_report": len(pictures)},
        "pictures": dict(pictures),
        "parts": {part.name: {"title": part.title} | results[part.name] for part in PARTS if part.name in results},
        **stamp(),
    }
    write_whole(context.folder / DATA, json.dumps(whole, ensure_ascii=False, indent=2) + "\n")
    write_whole(context.folder / FILE, "\n".join(_lines(whole)) + "\n")
    return whole


def _lines(whole: dict[str, Any]) -> Iterator[str]:
    yield f"# The paper's evaluation: {whole['model']}"
    yield ""
    yield (
        f"{whole['machine_line']}. blend: {whole['settings_of_blend']}. Answers are greedy, of at most "
        f"{whole['max_tokens']} tokens."
    )
    rows = [(of["name"], of["rows"], len(of["bad_rows"])) for of in whole["data"]]
    yield from ("", markdown_table(("data",), ("rows", "left out"), rows))
    for of in whole["data"]:
        if of["bad_rows"]:
            yield from ("", f"{of['name']}: {len(of['bad_rows'])} rows cannot be used; the first: {of['bad_rows'][0]}.")
    if not whole["pictures"]:
        yield from ("", f"No figures are drawn: that needs matplotlib ({INSTALL}); then give the same command again.")
    for number, part in enumerate(PARTS, start=1):
        yield from ("", f"## {number}. {part.title}", "")
        yield from _part(part, whole)


def _part(part: Part, whole: dict[str, Any]) -> Iterator[str]:
    result = whole["parts"].get(part.name)
    if result is None:
        yield "Not measured yet."
        return
    if result.get("left_out"):
        yield f"Left out: {result['left_out']}."
        return
    if part.name in whole["pictures"]:
        yield from (f"![{part.title}]({whole['pictures'][part.name]})", "")
    yield from (f"- {note}." for note in result["notes"])
    if len(result["machines"]) > 1:
        yield f"- Times come from different machines or numbers of threads: {'; '.join(result['machines'])}."
    yield from ("", _table(part, result["points"]))


def _table(part: Part, points: Sequence[dict[str, Any]]) -> str:
    measures = list(dict.fromkeys(name for point in points for name in point.get("quality", {})))
    titles = TITLES | {AGREEMENT: "first token as full recompute's"}
    has_compute = any(point.get("compute") is not None for point in points)
    numbers = ["rows", *(f"{titles.get(name, name)}, %" for name in measures), "TTFT, ms"]
    numbers += ["compute, %"] if has_compute else []
    rows = []
    for point in points:
        cells = [*(column(point) for column in part.columns.values()), point["method"], str(point["rows"])]
        cells += [_interval(point["quality"].get(name)) for name in measures]
        cells.append("{:.1f} [{:.1f}, {:.1f}]".format(*(1e3 * point["ttft_s"][at] for at in ("median", "low", "high"))))
        if has_compute:
            cells.append("" if point["compute"] is None else f"{100 * point['compute']:.1f}")
        rows.append(cells)
    return markdown_table([*part.columns, "method"], numbers, rows)


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{100 * found['mean']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
