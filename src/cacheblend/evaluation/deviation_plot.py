"""The plot of deviation by layer: KV on the left, the question's attention on the right, a line an arm.

Needs matplotlib.
"""

from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from textwrap import fill
from typing import Any

from cacheblend.evaluation.inspection.figure_style import STYLE, new_figure, whole_numbers

FILE = "deviation.png"
MOST_ARMS = 8
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "navy", "goldenrod")
REUSE = "tab:red"
PANELS = {
    "kv": ("KV of the loaded tokens", "KV deviation / norm of full recompute's"),
    "attention": ("What the question attends to in front of it", "attention deviation / norm of full recompute's"),
}


def draw_deviation(summary: dict[str, Any], folder: Path, *, data: str = "") -> list[Path]:
    """Draws `FILE`, of the largest `top_k`; of more than `MOST_ARMS` arms the first ones. No file of nothing.

    Args:
        summary: of `with_deviations`.
        folder: where the file goes; it is there.
        data: name of the data, for the title.
    """
    measured = [arm for arm in summary["arms"] if arm.get("deviation")]
    if not measured:
        return []
    import matplotlib

    matplotlib.use("Agg")
    widest = max((arm["top_k"] for arm in measured), key=lambda k: inf if k is None else k)
    arms = [arm for arm in measured if arm["top_k"] == widest]
    with matplotlib.rc_context(STYLE):
        figure = new_figure(11, 5.4)
        for axes, measure in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _panel(axes, measure, arms[:MOST_ARMS])
        figure.suptitle(_title(summary, arms, data), x=0.01, ha="left", fontsize=12, parse_math=False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=9)
        file = folder / FILE
        figure.savefig(file)
    return [file]


def _panel(axes: Any, measure: str, arms: Sequence[dict[str, Any]]) -> None:
    colours = iter(COLOURS)
    for arm in arms:
        colour = REUSE if arm["kind"] == "reuse" else next(colours)
        of = {key: [nan if v is None else v for v in arm["deviation"][measure][key]] for key in ("mean", "low", "high")}
        layers = range(len(of["mean"]))
        order = 3 if arm["kind"] == "reuse" else 2  # random rows lie on it, and it is what the others are held against
        axes.plot(layers, of["mean"], "o-", markersize=3, linewidth=1.6, color=colour, zorder=order, label=arm["arm"])
        axes.fill_between(layers, of["low"], of["high"], color=colour, alpha=0.12, linewidth=0)
    title, label = PANELS[measure]
    axes.set(xlabel="layer", ylabel=label, ylim=(0, None))
    axes.set_title(title)
    whole_numbers(axes.xaxis)


def _title(summary: dict[str, Any], arms: Sequence[dict[str, Any]], data: str) -> str:
    k = arms[0]["top_k"]
    parts = [
        f"How far loaded KV takes {summary['model']} from full recompute",
        data,
        f"{arms[0]['deviation']['rows']} rows",
        "" if k is None else f"{k} passages",
        f"{summary['bootstrap']['level']:.0%} intervals (bootstrap)",
        "" if len(arms) <= MOST_ARMS else f"{MOST_ARMS} of {len(arms)} arms",
    ]
    return fill(", ".join(filter(None, parts)), 110)
