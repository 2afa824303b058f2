"""The report: ``report.md`` with pictures and tables, ``report.json`` with all points. Knows no measuring."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from cacheblend.bench.stamp import stamp
from cacheblend.engines import provenance
from cacheblend.engines.settings import describe
from cacheblend.evaluation.records import write_whole
from cacheblend.evaluation.report import TITLES
from lab.paper.answered import AGREEMENT
from lab.paper.context import Context, Part, write_json

FILE, DATA = "report.md", "report.json"
INSTALL = "pip install 'cacheblend[evaluate]'"


def write(context: Context, parts: Sequence[Part], results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Draws the parts that have results, and writes both files; returns what is in the JSON."""
    pictures = _draw(context, parts, results)
    whole = {
        "model": context.engine.name,
        "settings_of_blend": _settings(context),
        "machine_line": provenance.machine_line(),
        "max_tokens": context.settings.max_tokens,
        "scorers": [scorer.name for scorer in context.scorers],
        "sweeps": vars(context.sweeps),
        "data": [{"name": of.name, "rows": len(of.rows), "bad_rows": list(of.bad)} for of in context.data],
        "folder": str(context.folder),
        "figures": {"paper_report": len(pictures)},
        "pictures": pictures,
        "parts": {part.name: {"title": part.title} | results[part.name] for part in parts if part.name in results},
        **stamp(),
    }
    write_json(context.folder / DATA, whole)
    write_whole(context.folder / FILE, "\n".join(_lines(whole, parts)) + "\n")
    return whole


def _settings(context: Context) -> str:
    """Of blend; without the folder of a profile, which says nothing elsewhere."""
    settings = context.engine.settings
    return f"the model's profile ({describe(settings.profile.settings)})" if settings.profile else settings.source


def _draw(context: Context, parts: Sequence[Part], results: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """File names of the pictures by part; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return {}
    pictures = {}
    for number, part in enumerate(parts, start=1):
        if results.get(part.name, {}).get("points"):
            pictures[part.name] = f"{number}-{part.name}.png"
            title = f"{part.title}: {context.engine.name}, {', '.join(of.name for of in context.data)}"
            part.draw(results[part.name], title, context.folder / pictures[part.name])
    return pictures


def _lines(whole: dict[str, Any], parts: Sequence[Part]) -> Iterator[str]:
    yield f"# The paper's evaluation: {whole['model']}"
    yield ""
    yield (
        f"{whole['machine_line']}. blend: {whole['settings_of_blend']}. Answers are greedy, of at most "
        f"{whole['max_tokens']} tokens."
    )
    yield from ("", "| data | rows | left out |", "|---|---:|---:|")
    yield from (f"| {_cell(of['name'])} | {of['rows']} | {len(of['bad_rows'])} |" for of in whole["data"])
    for of in whole["data"]:
        if of["bad_rows"]:
            yield from ("", f"{of['name']}: {len(of['bad_rows'])} rows cannot be used; the first: {of['bad_rows'][0]}.")
    if not whole["pictures"]:
        yield from ("", f"No figures are drawn: that needs matplotlib ({INSTALL}); then give the same command again.")
    for number, part in enumerate(parts, start=1):
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
    yield ""
    yield from _table(part, result["points"])


def _table(part: Part, points: Sequence[dict[str, Any]]) -> Iterator[str]:
    measures = list(dict.fromkeys(name for point in points for name in point.get("quality", {})))
    has_compute = any(point.get("compute") is not None for point in points)
    headings = [*part.columns, "method", "rows", *(f"{_title(name)}, %" for name in measures), "TTFT, ms"]
    headings += ["compute, %"] if has_compute else []
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * (len(part.columns) + 1)}{'---:|' * (len(headings) - len(part.columns) - 1)}"
    for point in points:
        cells = [*(column(point) for column in part.columns.values()), point["method"], str(point["rows"])]
        cells += [_interval(point["quality"].get(name)) for name in measures]
        cells.append("{:.1f} [{:.1f}, {:.1f}]".format(*(1e3 * point["ttft_s"][at] for at in ("median", "low", "high"))))
        cells += [_percent(point["compute"])] if has_compute else []
        yield f"| {' | '.join(map(_cell, cells))} |"


def _title(measure: str) -> str:
    return "first token as full recompute's" if measure == AGREEMENT else TITLES.get(measure, measure)


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{100 * found['mean']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _cell(text: str) -> str:
    """A text that ends no cell of a table."""
    return text.replace("|", r"\|").replace("\n", " ")
