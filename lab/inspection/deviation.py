"""Deviation between two passes over one prompt, by layer: of their KV, and of the question's attention; ranks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.kernels.deviation import kv_deviation
from cacheblend.core.load.loader import LayerKV

Array = npt.NDArray[np.float64]


def kv_deviation_by_layer(fresh: Sequence[LayerKV], other: Sequence[LayerKV]) -> Array:
    """KV deviation per token and layer.

    Args:
        fresh: KV cache of full recompute, for each layer [kv_heads, tokens, head_dim] (`Observation.kv`).
        other: KV cache of another pass, of the same shapes.

    Returns:
        [layers, tokens] squared L2 distance over keys and values.
    """
    pairs = zip(fresh, other, strict=True)
    return np.stack([_numbers(kv_deviation((mine[0], mine[1]), (theirs[0], theirs[1]))) for mine, theirs in pairs])


def kv_norm_by_layer(fresh: Sequence[LayerKV], rows: npt.NDArray[np.int64]) -> Array:
    """[layers] root mean square over these rows of the norm of their keys and values."""
    norms = []
    for keys, values in fresh:
        at = torch.from_numpy(rows).to(keys.device)
        mine = keys[:, at], values[:, at]
        squares = kv_deviation(mine, (torch.zeros_like(mine[0]), torch.zeros_like(mine[1])))
        norms.append(np.sqrt(_numbers(squares).mean()))
    return np.array(norms)


def relative_deviation(deviation: Array, norm: Array) -> Array:
    """Square roots of deviations divided by the norm of their layer: 0 is exact, 1 is as large as the KV itself.

    Args:
        deviation: [layers, tokens] from `kv_deviation_by_layer`.
        norm: [layers] from `kv_norm_by_layer`.

    Returns:
        [layers, tokens].
    """
    relative: Array = np.sqrt(deviation) / np.maximum(norm, 1e-30)[:, None]
    return relative


def attention_deviation_by_layer(full: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> Array:
    """Forward attention deviation: deviation of the question's attention to its context from full recompute.

    Args:
        full: forward attention of full recompute, for each layer [heads, rows, context] (`Observation.forward`).
        other: forward attention of another pass, of the same shapes.

    Returns:
        [layers] norm of the difference over heads, rows and context, divided by the norm in full recompute; NaN if
        full recompute does not attend to the context (a sliding window that begins after it).
    """
    deviation = []
    for mine, theirs in zip(full, other, strict=True):
        norm = float(mine.norm())
        deviation.append(float((theirs - mine).norm()) / norm if norm else float("nan"))
    return np.array(deviation)


def _numbers(values: torch.Tensor) -> Array:
    numbers: Array = values.cpu().double().numpy()
    return numbers


Floats = npt.NDArray[np.floating]


def ranks(values: Floats) -> npt.NDArray[np.float64]:
    """Ranks from 1, equal values sharing the mean of their ranks. [n] -> [n]."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: npt.NDArray[np.float64] = counts.cumsum() - (counts - 1) / 2
    return shared[which]


def spearman(first: Floats, second: Floats) -> float:
    """Correlation of the ranks of two series [n], -1..1; NaN if one of them is constant, or n < 2."""
    if len(first) < 2:
        return float("nan")
    a, b = (ranks(values) - (len(values) + 1) / 2 for values in (first, second))
    scale = np.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / scale) if scale else float("nan")
