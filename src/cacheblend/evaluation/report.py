"""A summary for people: tables of quality by scorer, of cost, of agreement; 80 columns show them whole.

Knows nothing but the summary.
"""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

TITLES = {"em": "Exact match", "f1": "F1 by words", "f1-tokens": "F1 by tokens", "rouge-l": "ROUGE-L"}
Figure = dict[str, Any]


def tables(summary: dict[str, Any]) -> list[Table]:
    """Of each scorer that has something to score, over all rows and by category; then cost, agreement, deviation."""
    scored = [name for name in summary["scorers"] if any(arm["scores"][name]["all"] for arm in summary["arms"])]
    out = []
    for name in scored:
        out.append(_quality(summary, name))
        if summary["categories"]:
            out.append(_by_category(summary, name))
    compared = any(arm["agreement"]["same_answer"]["all"] for arm in _others(summary))
    measured = any(arm.get("deviation") for arm in summary["arms"])
    return [
        *out,
        _cost(summary),
        *([_agreement(summary)] if compared else []),
        *([_deviation(summary)] if measured else []),
    ]


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know beside the tables: what was left out, and why."""
    rows, missing = summary["rows"], summary["answers_missing"]
    lines = []
    if missing == rows and summary["scorers"]:
        lines.append("no row has gold answers, so nothing is scored; agreement with full recompute needs none")
    elif missing and summary["scorers"]:
        lines.append(f"{missing} of {rows} rows have no gold answer and count for no scorer")
    for at in summary["too_long"]:
        if at["rows"]:
            of = "" if at["top_k"] is None else f" with {at['top_k']} passages"
            lines.append(f"{at['rows']} of {rows} prompts{of} are over the model's context and were skipped")
    if len(summary["machines"]) > 1:
        where = "; ".join(f"{machine}: {count} rows" for machine, count in summary["machines"].items())
        lines.append(f"times are mixed, from different machines or threads ({where}); quality is not affected")
    for arm in summary["arms"]:
        if arm["skipped"]:
            lines.append(f"{_name(arm)}: {arm['skipped']} rows skipped, a prompt of its own is over the context")
        if arm["with_misses"]:
            lines.append(f"{_name(arm)}: {arm['with_misses']} rows missed passages in the store; give it more room")
    return lines + _deviation_notes(summary)


def _quality(summary: dict[str, Any], scorer: str) -> Table:
    level = summary["bootstrap"]["level"]
    out = _table(f"{TITLES.get(scorer, scorer)}, %, {summary['model']}; intervals: {level:.0%}")
    out.add_column("arm", no_wrap=True)
    for column in ("rows", "mean", "minus full"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(arm: Figure) -> list[str]:
        figure = arm["scores"][scorer]["all"]
        if figure is None:
            return ["0"]
        difference = "" if arm["kind"] == "full" else _interval(figure["difference"], sign="+")
        return [str(figure["n"]), _interval(figure), difference]

    _fill(out, summary, cells)
    return out


def _by_category(summary: dict[str, Any], scorer: str) -> Table:
    out = _table(f"{TITLES.get(scorer, scorer)} by category, %")
    out.add_column("arm", no_wrap=True)
    for name in summary["categories"]:
        out.add_column(Text(name), justify="right", overflow="fold", min_width=5)

    def cells(arm: Figure) -> list[str]:
        figures = (arm["scores"][scorer]["by_category"].get(name) for name in summary["categories"])
        return ["" if figure is None else f"{100 * figure['mean']:.1f}" for figure in figures]

    _fill(out, summary, cells)
    return out


def _cost(summary: dict[str, Any]) -> Table:
    out = _table(f"Cost, {summary['model']}, {summary['rows']} rows")
    out.add_column("arm", no_wrap=True)
    for column in ("TTFT, s", "gain", "compute, %"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(arm: Figure) -> list[str]:
        return [
            _number(arm["ttft_s"]["median"], ".3f"),
            _number(arm["speedup"], ".2f"),
            _number(arm["total_compute"], ".1f", 100),
        ]

    _fill(out, summary, cells)
    out.caption = "TTFT: median; gain: median of full / arm, row by row; compute: % of a full prefill"
    return out


def _agreement(summary: dict[str, Any]) -> Table:
    out = _table(f"Agreement with full recompute, %, {summary['rows']} rows")
    out.add_column("arm", no_wrap=True)
    for column in ("1st token", "KL", "tokens", "answer"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(arm: Figure) -> list[str]:
        close = arm["agreement"]
        shares = [close[name]["all"] for name in ("equal_tokens", "same_answer")]
        means = ["" if share is None else f"{100 * share['mean']:.1f}" for share in shares]
        return [_interval(close["top_1"]["all"]), _number(close["kl"]["mean"], ".2g"), *means]

    _fill(out, summary | {"arms": _others(summary)}, cells)
    out.caption = (
        "1st token, answer: % of rows with the same; tokens: % of a greedy answer in front "
        "of the first difference; KL: of the first token, mean, nats"
    )
    return out


def _deviation(summary: dict[str, Any]) -> Table:
    counts = sorted({arm["deviation"]["rows"] for arm in summary["arms"] if arm.get("deviation")})
    out = _table(f"Deviation from full recompute, {' or '.join(map(str, counts))} rows")
    out.add_column("arm", no_wrap=True)
    for column in ("KV", "at most", "attention", "at most"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(arm: Figure) -> list[str]:
        figures = [arm["deviation"][measure] for measure in ("kv", "attention")]
        return [text for of in figures for text in (_number(of["over_layers"]["mean"], ".3f"), _largest(of["mean"]))]

    _fill(out, summary | {"arms": [arm for arm in summary["arms"] if arm.get("deviation")]}, cells)
    out.caption = (
        "KV of the loaded tokens; the question's attention to its context; both relative to full recompute's, "
        "mean over layers, and the layer where it is largest; 0 is exact"
    )
    return out


def _largest(layers: list[float | None]) -> str:
    """The largest of a list by layer, and which layer it is."""
    known = [(value, layer) for layer, value in enumerate(layers) if value is not None]
    if not known:
        return ""
    value, layer = max(known, key=lambda at: at[0])
    return f"{value:.3f}, {layer:>2}"


def _deviation_notes(summary: dict[str, Any]) -> list[str]:
    lines = []
    for at in summary.get("deviation", {"prompts": []})["prompts"]:
        of = "" if at["top_k"] is None else f" with {at['top_k']} passages"
        taken = at["rows"] + at["nothing_loaded"]
        if taken < summary["deviation"]["asked"]:
            lines.append(f"deviation: {summary['deviation']['asked']} rows were to be measured, {taken}{of} are there")
        if at["nothing_loaded"]:
            lines.append(
                f"deviation: of {at['nothing_loaded']} of {taken} rows{of} nothing is loaded at a new position, so "
                "there is nothing to measure"
            )
    return lines


def _others(summary: dict[str, Any]) -> list[Figure]:
    return [arm for arm in summary["arms"] if arm["kind"] != "full"]


def _fill(out: Table, summary: dict[str, Any], cells: Callable[[Figure], list[str]]) -> None:
    """A line an arm; numbers of passages apart from each other."""
    several = len({arm["top_k"] for arm in summary["arms"]}) > 1
    last: Any = object()
    for arm in summary["arms"]:
        if several and arm["top_k"] != last:
            out.add_section()
            out.add_row(Text("all passages" if arm["top_k"] is None else f"{arm['top_k']} passages", "dim"))
        last = arm["top_k"]
        out.add_row(Text(arm["arm"]), *cells(arm), style="bold" if arm["kind"] == "full" else "")


def _table(title: str) -> Table:
    return Table(
        title=Text(title, "table.title"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def _name(arm: dict[str, Any]) -> str:
    return arm["arm"] if arm["top_k"] is None else f"{arm['arm']}, {arm['top_k']} passages"


def _interval(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return ""
    return f"{100 * figure['mean']:{sign}.1f} [{100 * figure['low']:{sign}.1f}, {100 * figure['high']:{sign}.1f}]"


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "" if value is None else f"{factor * value:{form}}"
