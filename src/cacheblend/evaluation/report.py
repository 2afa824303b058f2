"""A summary as tables: quality by scorer, cost, agreement. They fit 80 columns. Knows only the summary."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

TITLES = {"em": "Exact match", "f1": "F1 by words", "f1-tokens": "F1 by tokens", "rouge-l": "ROUGE-L"}
Figure = dict[str, Any]


def tables(summary: dict[str, Any]) -> list[Table]:
    """Quality tables of every scorer with scores, over all rows and by category; then cost, agreement."""
    scored = [
        name for name in summary["scorers"] if any(method["scores"][name]["all"] for method in summary["methods"])
    ]
    out = []
    for name in scored:
        out.append(_quality(summary, name))
        if summary["categories"]:
            out.append(_by_category(summary, name))
    compared = any(method["agreement"]["same_answer"]["all"] for method in _others(summary))
    return [*out, _cost(summary), *([_agreement(summary)] if compared else [])]


def notes(summary: dict[str, Any]) -> list[str]:
    """What the tables do not show: what was skipped, and why."""
    rows, missing, bad = summary["rows"], summary["answers_missing"], summary.get("bad_rows", [])
    lines = [f"{len(bad)} rows cannot be used and were left out; the first: {bad[0]}"] if bad else []
    if missing == rows and summary["scorers"]:
        lines.append("no row has gold answers, so there are no scores; agreement with full recompute needs none")
    elif missing and summary["scorers"]:
        lines.append(f"{missing} of {rows} rows have no gold answers and are not scored")
    for at in summary["too_long"]:
        if at["rows"]:
            of = "" if at["top_k"] is None else f" with {at['top_k']} passages"
            lines.append(f"{at['rows']} of {rows} prompts{of} exceed the model's context and were skipped")
    if len(summary["machines"]) > 1:
        where = "; ".join(f"{machine}: {count} rows" for machine, count in summary["machines"].items())
        lines.append(f"times come from different machines or numbers of threads ({where}); quality is not affected")
    for method in summary["methods"]:
        if method["skipped"]:
            lines.append(f"{_name(method)}: {method['skipped']} rows skipped: a prompt of its own exceeds the context")
        if method["with_misses"]:
            lines.append(
                f"{_name(method)}: {method['with_misses']} rows missed passages in the store; enlarge the store"
            )
    return lines


def _quality(summary: dict[str, Any], scorer: str) -> Table:
    level = summary["bootstrap"]["level"]
    out = empty_table(f"{TITLES.get(scorer, scorer)}, %, {summary['model']}; intervals: {level:.0%}")
    out.add_column("method", no_wrap=True)
    for column in ("rows", "mean", "minus full"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(method: Figure) -> list[str]:
        figure = method["scores"][scorer]["all"]
        if figure is None:
            return ["0"]
        difference = "" if method["kind"] == "full" else _interval(figure["difference"], sign="+")
        return [str(figure["n"]), _interval(figure), difference]

    fill_table(out, summary, cells)
    return out


def _by_category(summary: dict[str, Any], scorer: str) -> Table:
    out = empty_table(f"{TITLES.get(scorer, scorer)} by category, %")
    out.add_column("method", no_wrap=True)
    for name in summary["categories"]:
        out.add_column(Text(name), justify="right", overflow="fold", min_width=5)

    def cells(method: Figure) -> list[str]:
        figures = (method["scores"][scorer]["by_category"].get(name) for name in summary["categories"])
        return ["" if figure is None else f"{100 * figure['mean']:.1f}" for figure in figures]

    fill_table(out, summary, cells)
    return out


def _cost(summary: dict[str, Any]) -> Table:
    out = empty_table(f"Cost, {summary['model']}, {summary['rows']} rows")
    out.add_column("method", no_wrap=True)
    for column in ("TTFT, s", "gain", "compute, %"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(method: Figure) -> list[str]:
        return [
            number_text(method["ttft_s"]["median"], ".3f"),
            number_text(method["speedup"], ".2f"),
            number_text(method["total_compute"], ".1f", 100),
        ]

    fill_table(out, summary, cells)
    out.caption = "TTFT: median; gain: median over rows of full / method; compute: % of a full prefill"
    return out


def _agreement(summary: dict[str, Any]) -> Table:
    out = empty_table(f"Agreement with full recompute, %, {summary['rows']} rows")
    out.add_column("method", no_wrap=True)
    for column in ("1st token", "KL", "tokens", "answer"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(method: Figure) -> list[str]:
        close = method["agreement"]
        shares = [close[name]["all"] for name in ("equal_tokens", "same_answer")]
        means = ["" if share is None else f"{100 * share['mean']:.1f}" for share in shares]
        return [_interval(close["top_1"]["all"]), number_text(close["kl"]["mean"], ".2g"), *means]

    fill_table(out, summary | {"methods": _others(summary)}, cells)
    out.caption = (
        "1st token, answer: % of rows where it is the same; tokens: % of a greedy answer before "
        "the first difference; KL: of the first token, mean, nats"
    )
    return out


def _others(summary: dict[str, Any]) -> list[Figure]:
    return [method for method in summary["methods"] if method["kind"] != "full"]


def fill_table(out: Table, summary: dict[str, Any], cells: Callable[[Figure], list[str]]) -> None:
    """Adds one line per method; a section for each number of passages."""
    several = len({method["top_k"] for method in summary["methods"]}) > 1
    last: Any = object()
    for method in summary["methods"]:
        if several and method["top_k"] != last:
            out.add_section()
            out.add_row(Text("all passages" if method["top_k"] is None else f"{method['top_k']} passages", "dim"))
        last = method["top_k"]
        out.add_row(Text(method["method"]), *cells(method), style="bold" if method["kind"] == "full" else "")


def empty_table(title: str) -> Table:
    """A table in the form of a report's."""
    return Table(
        title=Text(title, "table.title"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def _name(method: dict[str, Any]) -> str:
    return method["method"] if method["top_k"] is None else f"{method['method']}, {method['top_k']} passages"


def _interval(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return ""
    return f"{100 * figure['mean']:{sign}.1f} [{100 * figure['low']:{sign}.1f}, {100 * figure['high']:{sign}.1f}]"


def number_text(value: float | None, form: str, factor: float = 1) -> str:
    """A number in a format, times a factor; None is empty."""
    return "" if value is None else f"{factor * value:{form}}"
