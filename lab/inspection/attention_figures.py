"""Figures of attention. Needs matplotlib."""

from typing import Any

import numpy as np

from cacheblend.evaluation.plots import new_figure, whole_numbers
from lab.inspection.deviation import Array
from lab.inspection.inspection import Inspection
from lab.inspection.labels import COLOURS, MANY_PARTS, label_of, methods_of

MOST_NUMBERS = 10  # largest number of parts for which cells show their values


def attention_by_chunk(of: Inspection, layers: list[int]) -> Any:
    """Attention matrices over parts for the three methods, and the cross-chunk share by layer."""
    from matplotlib.colors import PowerNorm

    side = max(2.6, min(4.4, 0.42 * len(of.parts)))
    figure = new_figure(3 * side + 3.2, side + 5.2)
    upper, lower = figure.subfigures(2, 1, height_ratios=(side + 2.0, 3.2))
    matrices = {name: 100 * method.attention[layers].mean(axis=0) for name, method in methods_of(of).items()}
    scale = PowerNorm(0.5, 0, max(matrix.max() for matrix in matrices.values()))
    axes = upper.subplots(1, 3, sharey=True)
    for one, (name, matrix) in zip(axes, matrices.items(), strict=True):
        cross = 100 * float(of.cross_chunk(methods_of(of)[name])[layers].mean())
        image = one.imshow(matrix, cmap="viridis", norm=scale)
        one.set_title(f"{name}" + (f": {cross:.1f} % to other chunks" if np.isfinite(cross) else ""))
        one.set_xlabel("attended to")
        _name_parts(one, of)
        _frame_cross_chunk(one, of)
        if len(of.parts) <= MOST_NUMBERS:
            _numbers(one, matrix, scale)
    axes[0].set_ylabel("attending tokens")
    upper.colorbar(image, ax=list(axes), fraction=0.02, pad=0.01, label="share of attention, %")
    upper.suptitle("Attention between parts (mean over heads, tokens and layers); framed: from chunk to chunk")
    _cross_chunk_by_layer(lower.subplots(), of, layers)
    return figure


def _cross_chunk_by_layer(axes: Any, of: Inspection, layers: list[int]) -> None:
    for name, method in methods_of(of).items():
        axes.plot(layers, 100 * of.cross_chunk(method)[layers], "o-", color=COLOURS[name], label=name)
    axes.set(xlabel="layer", ylabel="attention to other chunks, %", ylim=(0, None))
    whole_numbers(axes.xaxis)
    axes.set_title("Attention from chunks to other chunks: full reuse has none")
    axes.legend()


def attention_by_layer(of: Inspection, layers: list[int]) -> Any:
    """Forward attention deviation, one line per ratio."""
    from matplotlib import colormaps

    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    name, points = next(iter(of.curves.items()), ("", []))
    drawn = of.reuse.attention_deviation, of.blend.attention_deviation
    inner = [p for p in points if p.ratio < 1 and not any(_same(p.attention_deviation, values) for values in drawn)]
    _plot_method(axes, of, layers, "full reuse")
    for place, point in enumerate(inner):
        colour = colormaps["viridis"](0.15 + 0.75 * place / max(1, len(inner) - 1))
        label = f"{name}, r = {point.ratio:g}"
        axes.plot(layers, point.attention_deviation[layers], "-", color=colour, linewidth=1.4, label=label)
    _plot_method(axes, of, layers, "blend")
    axes.set(xlabel="layer", ylabel="attention deviation / norm in full recompute", ylim=(0, None))
    whole_numbers(axes.xaxis)
    axes.set_title("Deviation of the question's attention to the context from full recompute")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _same(first: Array, second: Array) -> bool:
    return bool(np.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True))


def _plot_method(axes: Any, of: Inspection, layers: list[int], name: str) -> None:
    values = methods_of(of)[name].attention_deviation[layers]
    axes.plot(layers, values, "o-", color=COLOURS[name], linewidth=2.2, label=name)


def attention_by_ratio(of: Inspection, layers: list[int]) -> Any:
    """Attention deviation over recompute ratio, one line per selector."""
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    for place, (name, points) in enumerate(of.curves.items()):
        colour, line = (COLOURS["blend"], "o-") if place == 0 else ("#777777", "s--")
        means = [_mean(point.attention_deviation[layers]) for point in points]
        axes.plot([100 * point.ratio for point in points], means, line, color=colour, label=name)
    reuse = _mean(of.reuse.attention_deviation[layers])
    axes.axhline(reuse, color=COLOURS["full reuse"], linewidth=1.2, linestyle=":", label="full reuse")
    axes.set(xlabel="loaded tokens recomputed, %", ylabel="attention deviation, mean over layers")
    axes.set(xlim=(-2, 102), ylim=(0, None))
    axes.set_title("Deviation of the question's attention by recompute ratio")
    axes.legend()
    return figure


def _mean(values: Array) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _name_parts(axes: Any, of: Inspection) -> None:
    """Full names at the rows, short names under the columns."""
    number, short = 0, []
    for part in of.parts:
        number += part.is_chunk
        short.append(str(number) if part.is_chunk else part.label)
    many = len(of.parts) > MANY_PARTS
    axes.set_xticks(range(len(short)), short, rotation=90, fontsize=6 if many else 9)
    axes.set_yticks(range(len(short)), [label_of(part.label) for part in of.parts], fontsize=6 if many else 9)
    axes.grid(False)


def _frame_cross_chunk(axes: Any, of: Inspection) -> None:
    """Frames every cell in which a chunk attends to a preceding chunk."""
    from matplotlib.patches import Rectangle

    chunks = [index for index, part in enumerate(of.parts) if part.is_chunk]
    width = 0.25 if len(of.parts) > MANY_PARTS else 0.8
    for row in chunks:
        for column in chunks:
            if column < row:
                corner = (column - 0.5, row - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="white", linewidth=width))


def _numbers(axes: Any, matrix: Array, scale: Any) -> None:
    for (row, column), value in np.ndenumerate(matrix):
        if value >= 0.05:
            colour = "black" if scale(value) > 0.6 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
