"""A summary as tables: quality by scorer, cost, agreement. They fit 80 columns. Knows only the summary."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

TITLES = {"em": "Exact match", "contains": "Contained", "rouge-l": "ROUGE-L"}
TITLES |= {"f1": "F1 by words", "f1-tokens": "F1 by tokens"}
PLAIN: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
"""The look of tables that fit 80 columns."""
Figure = dict[str, Any]
Columns = Mapping[str, Callable[[Figure], str]]  # the cell of a method by the heading of its column


def tables(summary: dict[str, Any]) -> list[Table]:
    """Quality tables of every scorer with scores, over all rows and by category; then cost, agreement."""
    out = []
    for name in summary["scorers"]:
        if any(method["scores"][name]["all"] for method in summary["methods"]):
            out += _quality(summary, name)
    cost: Columns = {
        "TTFT, s": lambda method: number_text(method["ttft_s"]["median"], ".3f"),
        "gain": lambda method: number_text(method["speedup"], ".2f"),
        "compute, %": lambda method: number_text(method["total_compute"], ".1f", 100),
    }
    caption = "TTFT: median; gain: median over rows of full / method; compute: % of a full prefill"
    out.append(method_table(f"Cost, {summary['model']}, {summary['rows']} rows", summary, cost, caption))
    others = summary | {"methods": [method for method in summary["methods"] if method["kind"] != "full"]}
    if any(method["agreement"]["same_answer"]["all"] for method in others["methods"]):
        close: Columns = {
            "1st token": lambda method: _interval(method["agreement"]["top_1"]["all"]),
            "KL": lambda method: number_text(method["agreement"]["kl"]["mean"], ".2g"),
            "tokens": lambda method: _mean(method["agreement"]["equal_tokens"]["all"]),
            "answer": lambda method: _mean(method["agreement"]["same_answer"]["all"]),
        }
        title = f"Agreement with full recompute, %, {summary['rows']} rows"
        caption = (
            "1st token, answer: % of rows where it is the same; tokens: % of a greedy answer before "
            "the first difference; KL: of the first token, mean, nats"
        )
        out.append(method_table(title, others, close, caption))
    if any(method["agreement"]["own_kl"]["all"] for method in others["methods"]):
        own: Columns = {
            "KL a token": lambda method: _interval(method["agreement"]["own_kl"]["all"], factor=1, digits=3),
            "tokens, %": lambda method: _interval(method["agreement"]["own_top_1"]["all"]),
        }
        title = f"Over the model's own answers, {summary['rows']} rows"
        caption = (
            "Each token of full recompute's answer, given those in front of it. KL: to full recompute, "
            "mean, nats; tokens: % that are the likeliest"
        )
        out.append(method_table(title, others, own, caption))
    return out


def notes(summary: dict[str, Any]) -> list[str]:
    """What the tables do not show: what was skipped, and why; and where rows that are all alike give no interval."""
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
            lines.append(
                f"{_name(method)}: {method['skipped']} rows skipped: a prompt of its own exceeds the context, or the "
                "model overflowed"
            )
        if method["with_misses"]:
            lines.append(
                f"{_name(method)}: {method['with_misses']} rows missed passages in the store; enlarge the store"
            )
    figures = [each for method in summary["methods"] for each in _with_difference(method)]
    if any(each["low"] is None for each in figures):
        lines.append("a figure without an interval has the same value in all rows, which says little of other rows")
    return lines


def _with_difference(method: Figure) -> list[dict[str, Any]]:
    """A method's scores over all rows, and their differences from full recompute."""
    scores = [score["all"] for score in method["scores"].values() if score["all"] is not None]
    return scores + [score["difference"] for score in scores if method["kind"] != "full" and score["difference"]]


def _quality(summary: dict[str, Any], scorer: str) -> list[Table]:
    def difference(method: Figure) -> str:
        figure = method["scores"][scorer]["all"]
        return _interval(None if method["kind"] == "full" or figure is None else figure["difference"], sign="+")

    title, level = TITLES.get(scorer, scorer), summary["bootstrap"]["level"]
    columns: Columns = {
        "rows": lambda method: str((method["scores"][scorer]["all"] or {"n": 0})["n"]),
        "mean": lambda method: _interval(method["scores"][scorer]["all"]),
        "minus full": difference,
    }
    out = [method_table(f"{title}, %, {summary['model']}; intervals: {level:.0%}", summary, columns)]
    if summary["categories"]:
        by: Columns = {
            name: lambda method, name=name: _mean(method["scores"][scorer]["by_category"].get(name))  # type: ignore[misc]
            for name in summary["categories"]
        }
        out.append(method_table(f"{title} by category, %", summary, by, folds=True))
    return out


def method_table(
    title: str, summary: dict[str, Any], columns: Columns, caption: str | None = None, *, folds: bool = False
) -> Table:
    """A line for each method; a section for each number of passages. `folds`: long headings take several lines."""
    left: Any = {"title_justify": "left", "caption_justify": "left", **PLAIN}
    out = Table(title=Text(title, "table.title"), caption=caption, **left)
    out.add_column("method", overflow="fold")  # figures are never cut
    for name in columns:
        form: dict[str, Any] = {"overflow": "fold", "min_width": 5} if folds else {"no_wrap": True}
        out.add_column(Text(name), justify="right", **form)
    several = len({method["top_k"] for method in summary["methods"]}) > 1
    last: Any = object()
    for method in summary["methods"]:
        if several and method["top_k"] != last:
            out.add_section()
            out.add_row(Text("all passages" if method["top_k"] is None else f"{method['top_k']} passages", "dim"))
        last = method["top_k"]
        cells = [cell(method) for cell in columns.values()]
        out.add_row(Text(method["method"]), *cells, style="bold" if method["kind"] == "full" else "")
    return out


def _name(method: dict[str, Any]) -> str:
    return method["method"] if method["top_k"] is None else f"{method['method']}, {method['top_k']} passages"


def _interval(figure: Figure | None, sign: str = "", factor: float = 100, digits: int = 1) -> str:
    if figure is None:
        return ""
    mean, low, high = (number_text(figure[name], f"{sign}.{digits}f", factor) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if low else mean


def _mean(figure: Figure | None) -> str:
    return "" if figure is None else f"{100 * figure['mean']:.1f}"


def number_text(value: float | None, form: str, factor: float = 1) -> str:
    """A number in a format, times a factor; None is empty."""
    return "" if value is None else f"{factor * value:{form}}"
