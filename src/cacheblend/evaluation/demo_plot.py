"""The picture of the demo: a dot for every answer, and times to first token. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend.evaluation.demo import MethodResult
from cacheblend.evaluation.inspection.figure_style import STYLE, new_figure

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = {"full": "#3b3b3b", "prefix": "#8c8c8c", "reuse": "#d55e00", "blend": "#0072b2", "hkvd": "#56b4e9"}
WRONG, QUIET = "#bdbdbd", "#666666"
HEADINGS = {
    "direct": "stated",
    "local": "same\npassage",
    "cross": "earlier\npassage",
    "cross-hard": "earlier,\nharder",
    "chain": "chain",
    "comparison": "compare",
    "unanswerable": "stated\nnowhere",
}
ACROSS = ("cross", "cross-hard", "chain", "comparison")  # the answer needs another passage
DOTS_PER_LINE = 4
ROW = 0.62  # inches per method


def draw_demo_plot(methods: Sequence[MethodResult], file: Path, *, title: str, remark: str) -> None:
    """Writes the picture, in the format of the file's ending.

    Args:
        methods: one row each, full recompute first.
        file: its folder must exist.
        title, remark: texts above and below.
    """
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = new_figure(12, 2.4 + ROW * len(methods))
        answers, times = figure.subplots(1, 2, sharey=True, width_ratios=(2.5, 1))
        _draw_answers(answers, methods)
        _draw_times(times, methods)
        for axes, heading in ((answers, "Right answers (filled)"), (times, "Time to first token (median)")):
            axes.set_title(heading, y=1.16, pad=0, fontsize=11.5, color=QUIET)
            axes.tick_params(length=0)
        figure.suptitle(title, x=0.006, ha="left", fontsize=14, fontweight="bold")
        figure.supxlabel(remark, x=0.006, ha="left", fontsize=9, color=QUIET)
        figure.savefig(file)


def _draw_answers(axes: Any, methods: Sequence[MethodResult]) -> None:
    """One column per category, one dot per question, filled if the answer is correct."""
    last, rows = len(HEADINGS) - 0.5, len(methods)
    for y, method in enumerate(methods):
        for x, category in enumerate(HEADINGS):
            _draw_dots(axes, x, y, method.right[category], COLOURS[method.kind])
        right, questions = method.score
        axes.text(last + 0.45, y, f"{right}", ha="right", va="center", fontsize=13, fontweight="bold")
        axes.text(last + 0.51, y, f"/ {questions}", ha="left", va="center", color=QUIET)
    axes.set(xlim=(-0.5, last + 0.95), ylim=(rows - 0.5, -0.5))
    axes.set_yticks(range(rows), [method.title for method in methods])
    for label, method in zip(axes.get_yticklabels(), methods, strict=True):
        label.set_fontweight("bold" if method.kind == "blend" else "normal")
    axes.set_xticks(range(len(HEADINGS)), list(HEADINGS.values()))
    axes.tick_params(labeltop=True, labelbottom=False)
    across = [x for x, category in enumerate(HEADINGS) if category in ACROSS]
    axes.axvspan(across[0] - 0.5, across[-1] + 0.5, color="#fbf3e4", linewidth=0, zorder=-1)
    middle = (across[0] + across[-1]) / 2
    axes.text(middle, rows - 0.52, "the answer needs another passage", ha="center", fontsize=9, color=QUIET)
    axes.spines[:].set_visible(False)


def _draw_dots(axes: Any, x: float, y: float, answers: Sequence[bool], colour: str) -> None:
    """The dots of one cell, in lines of `DOTS_PER_LINE` around its centre."""
    lines, width = -(-len(answers) // DOTS_PER_LINE), min(len(answers), DOTS_PER_LINE)
    for i, is_right in enumerate(answers):
        place = x + 0.2 * (i % width - (width - 1) / 2), y + 0.24 * (i // width - (lines - 1) / 2)
        fill, edge = (colour, colour) if is_right else ("none", WRONG)
        axes.plot(
            *place, marker="o", markersize=8, markeredgewidth=1.3, color=fill, markeredgecolor=edge, clip_on=False
        )


def _draw_times(axes: Any, methods: Sequence[MethodResult]) -> None:
    """Bars of the median time to first token, with speedup and compute."""
    for y, method in enumerate(methods):
        axes.barh(y, method.ttft_s, height=0.46, color=COLOURS[method.kind])
        end, at = (method.ttft_s, y), {"textcoords": "offset points", "va": "center"}
        above = 0 if method.kind == "full" else 7
        axes.annotate(f"{1e3 * method.ttft_s:.0f} ms", end, xytext=(5, above), fontweight="bold", **at)
        if method.kind != "full":
            text = f"{method.speedup:.1f} x faster, {100 * method.compute:.0f} % computed"
            axes.annotate(text, end, xytext=(5, -8), fontsize=9, color=QUIET, **at)
    axes.set(xlim=(0, 1.85 * max(method.ttft_s for method in methods)), xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#cccccc")
