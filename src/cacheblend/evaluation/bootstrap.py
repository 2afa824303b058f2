"""Bootstrap intervals of means: rows are drawn with replacement, the same rows for all columns. Numpy only."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
BLOCK = 1 << 22  # row weights held at once


@dataclass(frozen=True)
class Means:
    """Of each column.

    Attributes:
        mean: [columns]; NaN where a column has no value.
        low, high: [columns], ends of the percentile interval.
        count: [columns], values that the mean is of.
    """

    mean: Values
    low: Values
    high: Values
    count: npt.NDArray[np.int64]


def bootstrap_means(values: Values, *, resamples: int = 2000, level: float = 0.95, seed: int = 0) -> Means:
    """Means of columns and their percentile intervals; one draw of rows serves all columns.

    So a column of differences of two others has the paired interval.

    Args:
        values: [rows, columns], NaN where a row has none.
        resamples: draws.
        level: of the interval, two-sided.
        seed: of the draws.
    """
    there = ~np.isnan(values)
    filled = np.where(there, values, 0.0)
    count = there.sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean = filled.sum(axis=0) / count
        drawn = np.concatenate(
            [(weights @ filled) / (weights @ there) for weights in _draws(len(values), resamples, seed)]
        )
    ends = np.full((2, values.shape[1]), np.nan)
    known = count > 0
    ends[:, known] = np.nanpercentile(drawn[:, known], [50 - 50 * level, 50 + 50 * level], axis=0)
    return Means(mean, ends[0], ends[1], count)


def _draws(rows: int, resamples: int, seed: int) -> Iterator[Values]:
    """How often each row is drawn, [some of the resamples, rows]."""
    generator = np.random.default_rng(seed)
    size = max(1, BLOCK // rows)
    for start in range(0, resamples, size):
        draws = min(size, resamples - start)
        cells = generator.integers(rows, size=(draws, rows)) + np.arange(draws)[:, None] * rows
        yield np.bincount(cells.ravel(), minlength=draws * rows).reshape(draws, rows).astype(np.float64)
