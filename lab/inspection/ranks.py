"""Spearman's rank correlation; equal values share the mean of their ranks."""

import numpy as np
import numpy.typing as npt

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


def spearman_matrix(rows: Floats) -> npt.NDArray[np.float64]:
    """`spearman` of every pair of rows: [m, n] -> [m, m]."""
    pairs = [[spearman(first, second) for second in rows] for first in rows]
    return np.array(pairs, dtype=np.float64).reshape(len(rows), len(rows))
