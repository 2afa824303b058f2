"""The figures of an inspection, one file each. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.evaluation.plots import STYLE, new_figure, whole_numbers
from lab.inspection.attention_figures import (
    attention_by_chunk,
    attention_by_layer,
    attention_by_ratio,
)
from lab.inspection.inspection import TOP_SHARE, Inspection
from lab.inspection.labels import COLOURS, label_of

DEVIATION = "KV deviation / norm of fresh KV"


def draw_figures(inspection: Inspection, folder: Path, layers: Sequence[int] | None = None) -> list[Path]:
    """Writes every figure for which this prompt has data.

    Args:
        inspection: the inspection to draw.
        folder: existing folder for the files.
        layers: layers to draw; None draws all.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    shown = list(range(inspection.num_layers)) if layers is None else list(layers)
    drawn: list[tuple[str, Callable[[Inspection, list[int]], Any]]] = [("kv-deviation", _kv_deviation)]
    if any(shown):
        drawn.append(("kv-deviation-distribution", _distribution))
    if inspection.num_layers > 2:
        drawn.append(("rank-correlation", _rank_correlation))
    drawn += [("attention-by-chunk", attention_by_chunk), ("attention-deviation-by-layer", attention_by_layer)]
    if inspection.curves:
        drawn.append(("attention-deviation-by-ratio", attention_by_ratio))
    files = []
    for name, draw in drawn:
        with matplotlib.rc_context(STYLE):
            figure = draw(inspection, shown)
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1])
    return files


def _kv_deviation(of: Inspection, layers: list[int]) -> Any:
    """Deviation by layer and token under full reuse and blend, on one scale; below, the recomputed tokens."""
    height = min(3.2, 0.6 + 0.16 * len(layers))
    figure = new_figure(11, 2.6 + 2 * height)
    upper, lower, strip = figure.subplots(3, 1, sharex=True, height_ratios=(height, height, 0.16))
    reuse, blend = of.relative(of.reuse)[layers], of.relative(of.blend)[layers]
    top = of.scale(layers)
    for axes, values in ((upper, reuse), (lower, blend)):
        image = axes.imshow(values, aspect="auto", cmap="magma", vmin=0, vmax=top, interpolation="nearest")
        _layer_ticks(axes, layers)
        axes.grid(False)
        for border in _chunk_borders(of):
            axes.axvline(border - 0.5, color="white", linewidth=0.9, alpha=0.8)
    share = 100 * len(of.recomputed) / len(of.candidates)
    upper.set_title("Full reuse: deviation of each token's loaded KV from full recompute (black: exact)", pad=22)
    lower.set_title(f"Blend: remaining deviation when {share:.0f} % of the loaded tokens are recomputed (blue, below)")
    _chunk_labels(upper, of)
    strip.vlines(of.recomputed, 0, 1, color=COLOURS["blend"], linewidth=max(0.4, 600 / len(of.tokens)))
    strip.set(ylim=(0, 1), yticks=[], xlabel="token of the prompt")
    strip.grid(False)
    bar = figure.colorbar(image, ax=[upper, lower, strip], extend="max", fraction=0.03, pad=0.01)
    bar.set_label(DEVIATION)
    return figure


def _distribution(of: Inspection, layers: list[int]) -> Any:
    """Cumulative share of tokens by deviation, one line per layer."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    shown = [layer for layer in layers if layer]  # layer 0 deviates by rounding only
    scale = Normalize(min(shown), max(shown) if len(shown) > 1 else min(shown) + 1)
    values = np.sort(of.relative(of.reuse)[:, of.candidates], axis=1)
    shares = np.arange(1, values.shape[1] + 1) / values.shape[1]
    for layer in shown:
        axes.step(values[layer], shares, where="post", color=colormaps["viridis"](scale(layer)), linewidth=1.6)
    axes.axhspan(1 - TOP_SHARE, 1, color=COLOURS["blend"], alpha=0.10, linewidth=0)
    axes.annotate(
        f"the top {100 * TOP_SHARE:.0f} %",
        (0.01, 1 - TOP_SHARE / 2),
        xycoords=("axes fraction", "data"),
        va="center",
        color=COLOURS["blend"],
    )
    axes.set(xlabel=DEVIATION, ylabel="share of loaded tokens at or below", xlim=(0, None), ylim=(0, 1.005))
    held = 100 * of.top_share()[shown]
    of_it = f"{np.nanmin(held):.0f} to {np.nanmax(held):.0f} % of it" if np.isfinite(held).any() else "none of it"
    axes.set_title(
        "Full reuse: distribution of deviation over tokens\n"
        f"the top {100 * TOP_SHARE:.0f} % of a layer's tokens hold {of_it}"
    )
    if len(shown) > 1:
        figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, label="layer", ticks=_whole_ticks(shown))
    return figure


def _rank_correlation(of: Inspection, layers: list[int]) -> Any:
    """Correlation between layers of the tokens' ranks by deviation."""
    figure = new_figure(10.5, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    last = of.num_layers - 1
    neighbours = of.next_correlation()[1:last]
    left.plot(range(1, last), neighbours, "o-", color=COLOURS["blend"])
    lowest = min(0.0, float(np.nanmin(neighbours, initial=0.0)))
    left.set(xlabel="layer", ylabel="Spearman's correlation with the next layer", ylim=(lowest - 0.02, 1.02))
    whole_numbers(left.xaxis)
    left.set_title("Rank correlation of neighbouring layers")
    image = right.imshow(
        of.correlation[1:, 1:], cmap="viridis", vmin=lowest, vmax=1, origin="lower", extent=(0.5, last + 0.5) * 2
    )
    right.grid(False)
    right.set(xlabel="layer", ylabel="layer")
    whole_numbers(right.xaxis)
    whole_numbers(right.yaxis)
    right.set_title("Rank correlation of all layers")
    figure.colorbar(image, ax=right, fraction=0.046, label="Spearman's correlation of KV deviation")
    return figure


def _chunk_borders(of: Inspection) -> list[int]:
    return sorted({edge for part in of.parts if part.is_chunk for run in part.runs for edge in run})


def _chunk_labels(axes: Any, of: Inspection) -> None:
    """Labels above the tokens, shortened to the width of their chunk."""
    for number, part in enumerate((part for part in of.parts if part.is_chunk), start=1):
        start, stop = part.runs[0]
        width = int(130 * (stop - start) / len(of.tokens))  # characters
        fitting = [text for text in (label_of(part.label), f"chunk {number}", str(number)) if len(text) <= width]
        if fitting:
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            axes.text((start + stop) / 2, 1.02, fitting[0], fontsize=9, **place)


def _layer_ticks(axes: Any, layers: list[int]) -> None:
    step = max(1, round(len(layers) / 8))
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel("layer")


def _whole_ticks(values: Sequence[int]) -> list[int]:
    step = max(1, round(len(values) / 8))
    return list(values)[::step]
