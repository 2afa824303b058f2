"""The demo in one picture: every answer of every method a dot, times beside them. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend.evaluation.demo_results import Standing
from cacheblend.evaluation.inspection.figure_style import STYLE, new_figure

# Okabe and Ito's, for all eyes.
COLOURS = {"full": "#3b3b3b", "prefix": "#8c8c8c", "reuse": "#d55e00", "blend": "#0072b2", "hkvd": "#56b4e9"}
HEADINGS = {
    "direct": "stated",
    "local": "same\npassage",
    "cross": "earlier\npassage",
    "cross-hard": "earlier,\nharder",
    "chain": "chain",
    "comparison": "compare",
    "unanswerable": "told\nnowhere",
}
ROW = 0.62  # inches of a method's row
MOST_IN_A_LINE = 4  # dots of a category side by side; more make a second line
WRONG, QUIET = "#bdbdbd", "#666666"
ACROSS = ("cross", "cross-hard", "chain", "comparison")
TOTALS = 6.95  # where the sums stand, in columns
HEADING_AT = 1.16  # of an axes' height


def draw_story_plot(standings: Sequence[Standing], file: Path, *, title: str, remark: str) -> None:
    """Writes the picture; its ending says the format.

    Args:
        standings: a method a row, full recompute first.
        file: its folder is there.
        title, remark: above and below it.
    """
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = new_figure(12, 2.4 + ROW * len(standings))
        answers, times = figure.subplots(1, 2, sharey=True, width_ratios=(2.5, 1))
        _draw_answers(answers, standings)
        _draw_times(times, standings)
        for axes, heading in ((answers, "Right answers (filled)"), (times, "Time to first token (median)")):
            axes.set_title(heading, y=HEADING_AT, pad=0, fontsize=11.5, color=QUIET)
        figure.suptitle(title, x=0.006, ha="left", fontsize=14, fontweight="bold")
        figure.supxlabel(remark, x=0.006, ha="left", fontsize=9, color=QUIET)
        figure.savefig(file)


def _draw_answers(axes: Any, standings: Sequence[Standing]) -> None:
    """A column a category, a dot a question: filled if the answer is right."""
    categories = list(standings[0].right)
    for y, standing in enumerate(standings):
        for x, category in enumerate(categories):
            answers = standing.right[category]
            colour = COLOURS[standing.kind]
            for is_right, (dx, dy) in zip(answers, _places(len(answers)), strict=True):
                axes.plot(
                    x + dx,
                    y + dy,
                    marker="o",
                    markersize=8,
                    markeredgewidth=1.3,
                    color=colour if is_right else "none",
                    markeredgecolor=colour if is_right else WRONG,
                    clip_on=False,
                )
        right, questions = standing.score
        axes.text(TOTALS, y, f"{right}", ha="right", va="center", fontsize=13, fontweight="bold")
        axes.text(TOTALS + 0.06, y, f"/ {questions}", ha="left", va="center", color=QUIET)
    last = len(categories) - 0.5
    axes.set(xlim=(-0.5, last + 0.95), ylim=(len(standings) - 0.5, -0.5))
    axes.set_yticks(range(len(standings)), [standing.title for standing in standings])
    for label, standing in zip(axes.get_yticklabels(), standings, strict=True):
        label.set_fontweight("bold" if standing.kind == "blend" else "normal")
    axes.set_xticks(range(len(categories)), [HEADINGS[category] for category in categories])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    across = [x for x, category in enumerate(categories) if category in ACROSS]
    axes.axvspan(across[0] - 0.5, across[-1] + 0.5, color="#fbf3e4", linewidth=0, zorder=-1)
    middle = (across[0] + across[-1]) / 2
    axes.text(middle, len(standings) - 0.52, "the answer needs another passage", ha="center", fontsize=9, color=QUIET)
    for side in axes.spines.values():
        side.set_visible(False)


def _places(count: int) -> list[tuple[float, float]]:
    """Where the dots of a cell stand, around its centre."""
    lines = -(-count // MOST_IN_A_LINE)
    width = min(count, MOST_IN_A_LINE)
    return [(0.2 * (i % width - (width - 1) / 2), 0.24 * (i // width - (lines - 1) / 2)) for i in range(count)]


def _draw_times(axes: Any, standings: Sequence[Standing]) -> None:
    """Bars of the median time to the first token; how many times faster, and what was computed."""
    longest = max(standing.ttft_s for standing in standings)
    for y, standing in enumerate(standings):
        axes.barh(y, standing.ttft_s, height=0.46, color=COLOURS[standing.kind])
        axes.annotate(
            f"{1e3 * standing.ttft_s:.0f} ms",
            (standing.ttft_s, y),
            xytext=(5, 0 if standing.kind == "full" else 7),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
        if standing.kind != "full":
            axes.annotate(
                f"{standing.speedup:.1f} x faster, {100 * standing.compute:.0f} % computed",
                (standing.ttft_s, y),
                xytext=(5, -8),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=QUIET,
            )
    axes.set(xlim=(0, 1.85 * longest), xticks=[])
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#cccccc")
