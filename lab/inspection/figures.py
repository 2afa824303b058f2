"""The figures of an inspection, one file each. Needs matplotlib."""

from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.evaluation.plots import STYLE, new_figure
from lab.inspection.deviation import Array
from lab.inspection.inspection import Inspection, MethodView

DEVIATION = "KV deviation / norm of fresh KV"
COLOURS = {"full recompute": "#444444", "full reuse": "#d55e00", "blend": "#0072b2"}  # Okabe and Ito's palette
LONGEST_LABEL = 26
MANY_PARTS = 24  # with more parts, names are small and frames thin
MOST_NUMBERS = 10  # largest number of parts for which cells show their values


def whole_numbers(axis: Any) -> None:
    """Restricts ticks to integers, e.g. for layers."""
    axis.get_major_locator().set_params(integer=True)


def draw_figures(inspection: Inspection, folder: Path) -> list[Path]:
    """Writes every figure for which this prompt has data; the files."""
    import matplotlib

    drawn = {"kv-deviation": kv_deviation, "attention-by-chunk": attention_by_chunk}
    if inspection.curves:
        drawn["attention-deviation-by-ratio"] = attention_by_ratio
    files = [folder / f"{name}.png" for name in drawn]
    for file, draw in zip(files, drawn.values(), strict=True):
        with matplotlib.rc_context(STYLE):
            draw(inspection).savefig(file)
    return files


def kv_deviation(of: Inspection) -> Any:
    """Deviation by layer and token under full reuse and blend, on one scale; below, the recomputed tokens."""
    height = min(3.2, 0.6 + 0.16 * of.num_layers)
    figure = new_figure(11, 2.6 + 2 * height)
    upper, lower, strip = figure.subplots(3, 1, sharex=True, height_ratios=(height, height, 0.16))
    for axes, method in ((upper, of.reuse), (lower, of.blend)):
        values, top = of.relative(method), of.scale()
        image = axes.imshow(values, aspect="auto", cmap="magma", vmin=0, vmax=top, interpolation="nearest")
        axes.set_yticks(range(0, of.num_layers, max(1, round(of.num_layers / 8))))
        axes.set_ylabel("layer")
        axes.grid(False)
        for border in {edge for part in of.parts if part.is_chunk for run in part.runs for edge in run}:
            axes.axvline(border - 0.5, color="white", linewidth=0.9, alpha=0.8)
    share = 100 * len(of.recomputed) / len(of.candidates)
    upper.set_title("Full reuse: deviation of each token's loaded KV from full recompute (black: exact)", pad=22)
    lower.set_title(f"Blend: remaining deviation when {share:.0f} % of the loaded tokens are recomputed (blue, below)")
    for number, part in enumerate((part for part in of.parts if part.is_chunk), start=1):
        start, stop = part.runs[0]
        width = int(130 * (stop - start) / len(of.sources))  # characters that fit above the chunk's tokens
        fitting = [text for text in (label_of(part.label), f"chunk {number}", str(number)) if len(text) <= width]
        if fitting:
            place = {"transform": upper.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            upper.text((start + stop) / 2, 1.02, fitting[0], fontsize=9, **place)
    strip.vlines(of.recomputed, 0, 1, color=COLOURS["blend"], linewidth=max(0.4, 600 / len(of.sources)))
    strip.set(ylim=(0, 1), yticks=[], xlabel="token of the prompt")
    strip.grid(False)
    bar = figure.colorbar(image, ax=[upper, lower, strip], extend="max", fraction=0.03, pad=0.01)
    bar.set_label(DEVIATION)
    return figure


def methods_of(of: Inspection) -> dict[str, MethodView]:
    """The methods by their names in figures."""
    return {"full recompute": of.full, "full reuse": of.reuse, "blend": of.blend}


def label_of(text: str) -> str:
    """A shortened name, escaped so that matplotlib does not read it as mathematics."""
    short = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"
    return short.replace("$", r"\$")


def attention_by_chunk(of: Inspection) -> Any:
    """Attention matrices over parts for the three methods, and the cross-chunk share by layer."""
    from matplotlib.colors import PowerNorm

    side = max(2.6, min(4.4, 0.42 * len(of.parts)))
    figure = new_figure(3 * side + 3.2, side + 5.2)
    upper, lower = figure.subfigures(2, 1, height_ratios=(side + 2.0, 3.2))
    matrices = {name: 100 * method.attention.mean(axis=0) for name, method in methods_of(of).items()}
    scale = PowerNorm(0.5, 0, max(matrix.max() for matrix in matrices.values()))
    axes = upper.subplots(1, 3, sharey=True)
    for one, (name, matrix) in zip(axes, matrices.items(), strict=True):
        cross = 100 * float(of.cross_chunk(methods_of(of)[name]).mean())
        image = one.imshow(matrix, cmap="viridis", norm=scale)
        one.set_title(f"{name}" + (f": {cross:.1f} % to other chunks" if np.isfinite(cross) else ""))
        one.set_xlabel("attended to")
        _name_parts(one, of)
        _mark_cells(one, of, matrix, scale)
    axes[0].set_ylabel("attending tokens")
    upper.colorbar(image, ax=list(axes), fraction=0.02, pad=0.01, label="share of attention, %")
    upper.suptitle("Attention between parts (mean over heads, tokens and layers); framed: from chunk to chunk")
    below = lower.subplots()
    for name, method in methods_of(of).items():
        below.plot(100 * of.cross_chunk(method), "o-", color=COLOURS[name], label=name)
    below.set(xlabel="layer", ylabel="attention to other chunks, %", ylim=(0, None))
    whole_numbers(below.xaxis)
    below.set_title("Attention from chunks to other chunks: full reuse has none")
    below.legend()
    return figure


def attention_by_ratio(of: Inspection) -> Any:
    """Attention deviation over recompute ratio, one line per selector."""
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    for place, (name, points) in enumerate(of.curves.items()):
        colour, line = (COLOURS["blend"], "o-") if place == 0 else ("#777777", "s--")
        means = [_mean(point.attention_deviation) for point in points]
        axes.plot([100 * point.ratio for point in points], means, line, color=colour, label=name)
    reuse = _mean(of.reuse.attention_deviation)
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


def _mark_cells(axes: Any, of: Inspection, matrix: Array, scale: Any) -> None:
    """Frames every cell in which a chunk attends to a preceding chunk; values in all cells, where they are few."""
    from matplotlib.patches import Rectangle

    width = 0.25 if len(of.parts) > MANY_PARTS else 0.8
    for (row, column), value in np.ndenumerate(matrix):
        if column < row and of.parts[row].is_chunk and of.parts[column].is_chunk:
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="white", linewidth=width))
        if value >= 0.05 and len(of.parts) <= MOST_NUMBERS:
            colour = "black" if scale(value) > 0.6 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
