"""The picture of the demo: a dot for every answer, and times to first token. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend.evaluation.demo import CATEGORIES
from cacheblend.evaluation.figure_style import STYLE, new_figure

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = {"full": "#3b3b3b", "prefix": "#8c8c8c", "reuse": "#d55e00", "blend": "#0072b2"}
COLOURS |= {"gradual": "#56b4e9", "one check": "#009e73"}
WRONG, QUIET = "#bdbdbd", "#666666"
ACROSS, NOTE = ("cross", "cross-hard", "chain", "comparison"), "the answer needs another passage"
DOTS_PER_LINE = 4


def draw_demo_plot(methods: Sequence[dict[str, Any]], file: Path, *, title: str, remark: str) -> None:
    """Writes the picture, in the format of the file's ending.

    Args:
        methods: see `method_figures`; one row each, full recompute first.
        file: its folder must exist.
        title, remark: texts above and below.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = new_figure(12, 2.4 + 0.62 * len(methods))
        answers, times = figure.subplots(1, 2, sharey=True, width_ratios=(2.5, 1))
        for y, method in enumerate(methods):
            _draw_answers(answers, y, method)
            _draw_time(times, y, method)
        _label_answers(answers, methods)
        times.set(xlim=(0, 1.85 * max(method["ttft_s"] for method in methods)), xticks=[])
        times.spines[["top", "right", "bottom"]].set_visible(False)
        times.spines["left"].set_color("#cccccc")
        for axes, heading in ((answers, "Right answers (filled)"), (times, "Time to first token (median)")):
            axes.set_title(heading, y=1.16, pad=0, fontsize=11.5, color=QUIET)
            axes.tick_params(length=0)
        figure.suptitle(title, x=0.006, ha="left", fontsize=14, fontweight="bold")
        figure.supxlabel(remark, x=0.006, ha="left", fontsize=9, color=QUIET)
        figure.savefig(file)


def _draw_answers(axes: Any, y: float, method: dict[str, Any]) -> None:
    """One dot per question, filled if the answer is correct; in each column, lines of `DOTS_PER_LINE` around `y`."""
    for x, category in enumerate(CATEGORIES):
        answers, colour = method["right"][category], COLOURS[method["kind"]]
        lines, width = -(-len(answers) // DOTS_PER_LINE), min(len(answers), DOTS_PER_LINE)
        for i, right in enumerate(answers):
            place = x + 0.2 * (i % width - (width - 1) / 2), y + 0.24 * (i // width - (lines - 1) / 2)
            colours = {"color": colour if right else "none", "markeredgecolor": colour if right else WRONG}
            axes.plot(*place, marker="o", markersize=8, markeredgewidth=1.3, clip_on=False, **colours)
    right, questions = method["score"]
    axes.text(len(CATEGORIES) - 0.05, y, f"{right}", ha="right", va="center", fontsize=13, fontweight="bold")
    axes.text(len(CATEGORIES) + 0.01, y, f"/ {questions}", va="center", color=QUIET)


def _label_answers(axes: Any, methods: Sequence[dict[str, Any]]) -> None:
    """Names of methods and categories; those across passages stand on a coloured ground."""
    axes.set(xlim=(-0.5, len(CATEGORIES) + 0.45), ylim=(len(methods) - 0.5, -0.5))
    axes.set_yticks(range(len(methods)), [method["title"] for method in methods])
    for label, method in zip(axes.get_yticklabels(), methods, strict=True):
        label.set_fontweight("bold" if method["kind"] == "blend" else "normal")
    axes.set_xticks(range(len(CATEGORIES)), [heading for _, heading in CATEGORIES.values()])
    axes.tick_params(labeltop=True, labelbottom=False)
    across = [x for x, category in enumerate(CATEGORIES) if category in ACROSS]
    axes.axvspan(across[0] - 0.5, across[-1] + 0.5, color="#fbf3e4", linewidth=0, zorder=-1)
    axes.text(sum(across) / len(across), len(methods) - 0.52, NOTE, ha="center", fontsize=9, color=QUIET)
    axes.spines[:].set_visible(False)


def _draw_time(axes: Any, y: float, method: dict[str, Any]) -> None:
    """A bar of the median time to first token, with speedup and compute."""
    seconds, is_full = method["ttft_s"], method["kind"] == "full"
    axes.barh(y, seconds, height=0.46, color=COLOURS[method["kind"]])
    at = {"xy": (seconds, y), "textcoords": "offset points", "va": "center"}
    axes.annotate(f"{1e3 * seconds:.0f} ms", xytext=(5, 0 if is_full else 7), fontweight="bold", **at)
    if not is_full:
        text = f"{method['speedup']:.1f} x faster, {100 * method['compute']:.0f} % computed"
        axes.annotate(text, xytext=(5, -8), fontsize=9, color=QUIET, **at)
