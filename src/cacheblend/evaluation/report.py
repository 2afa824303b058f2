"""A summary for people: tables of quality by scorer, and of cost and agreement. Knows nothing but the summary."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

TITLES = {"em": "Exact match", "f1": "F1 by words", "f1-tokens": "F1 by tokens", "rouge-l": "ROUGE-L"}
Figure = dict[str, Any]


def tables(summary: dict[str, Any]) -> list[Table]:
    """Of each scorer that has something to score, over all rows and by category; then cost and agreement."""
    scored = [name for name in summary["scorers"] if any(arm["scores"][name]["all"] for arm in summary["arms"])]
    out = []
    for name in scored:
        out.append(_quality(summary, name))
        if summary["categories"]:
            out.append(_by_category(summary, name))
    return [*out, _cost(summary)]


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
    for arm in summary["arms"]:
        if arm["skipped"]:
            lines.append(f"{_name(arm)}: {arm['skipped']} rows skipped, a prompt of its own is over the context")
        if arm["with_misses"]:
            lines.append(f"{_name(arm)}: {arm['with_misses']} rows missed passages in the store; give it more room")
    return lines


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
    out = _table(f"Cost, and agreement with full recompute, {summary['model']}, {summary['rows']} rows")
    out.add_column("arm", no_wrap=True)
    for column in ("TTFT, s", "gain", "compute", "1st token", "KL", "answer"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(arm: Figure) -> list[str]:
        cost = [
            _number(arm["ttft_s"]["median"], ".3f"),
            _number(arm["speedup"], ".2f"),
            _number(arm["total_compute"], ".1f", 100),
        ]
        if arm["kind"] == "full":
            return cost
        close = arm["agreement"]
        same = close["same_answer"]["all"]
        answers = "" if same is None else f"{100 * same['mean']:.1f}"
        return [*cost, _interval(close["top_1"]["all"]), _number(close["kl"]["mean"], ".2g"), answers]

    _fill(out, summary, cells)
    out.caption = (
        "TTFT: median; gain: median of full / arm, row by row; compute: total compute, % of a full prefill;\n"
        "1st token, answer: % of rows with the same as full recompute; KL: mean, nats"
    )
    return out


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
