"""Bootstrap intervals of means: rows are drawn with replacement, the same rows for all columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.bounds import check_share, share_interval

Values = npt.NDArray[np.float64]
BLOCK = 1 << 22  # row weights in memory at once
RESAMPLES = 10_000  # of a bound


@dataclass(frozen=True)
class Means:
    """Means of columns with percentile intervals, each [columns]; a column without a value has NaN."""

    mean: Values
    low: Values
    high: Values
    count: npt.NDArray[np.int64]  # of values

    def make_exact(self, at: int, values: Values, level: float = 0.95) -> None:
        """Replaces the interval of column `at` by the exact one of a share if its values, NaN where there is none, are
        all 0 or 1: 6 of 6 is not [100, 100] %."""
        known = values[~np.isnan(values)]
        if known.size and np.isin(known, (0, 1)).all():
            self.low[at], self.high[at] = share_interval(int(known.sum()), known.size, level)


def bootstrap_means(values: Values, *, resamples: int = 2000, level: float = 0.95, seed: int = 0) -> Means:
    """Means of columns with percentile intervals; every draw of rows applies to all columns. So a column that holds the
    difference of two others has the paired interval. `values`: [rows, columns]; NaN where a row has no value."""
    there = ~np.isnan(values)
    filled = np.where(there, values, 0.0)
    count = there.sum(axis=0)
    generator, rows, parts = np.random.default_rng(seed), len(values), list[Values]()
    size = max(1, BLOCK // rows)
    with np.errstate(invalid="ignore"):
        mean = filled.sum(axis=0) / count
        for start in range(0, resamples, size):
            draws = min(size, resamples - start)
            cells = generator.integers(rows, size=(draws, rows)) + np.arange(draws)[:, None] * rows
            weights = np.bincount(cells.ravel(), minlength=draws * rows).reshape(draws, rows).astype(np.float64)
            parts.append((weights @ filled) / (weights @ there))  # by draw, how often each row is drawn
        drawn = np.concatenate(parts)
    ends = np.full((2, values.shape[1]), np.nan)
    known = count > 0
    ends[:, known] = np.nanpercentile(drawn[:, known], [50 - 50 * level, 50 + 50 * level], axis=0)
    return Means(mean, ends[0], ends[1], count)


def mean_lower_bound(values: Sequence[float] | npt.NDArray[np.float64], confidence: float, seed: int = 0) -> float:
    """One-sided lower bound of a mean, or of rows' differences (percentile bootstrap). `InvalidInputError` for none."""
    check_share("confidence", confidence)
    found = np.asarray(values, dtype=np.float64)
    if found.size == 0:
        raise InvalidInputError("a mean needs at least one value")
    means = bootstrap_means(found[:, None], resamples=RESAMPLES, level=2 * confidence - 1, seed=seed)
    return float(means.low[0])
