"""Exact bounds of proportions that were measured on few rows (Clopper-Pearson)."""

import math
from bisect import bisect_left
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError

MOST_ROWS = 1_000_000  # that anybody will ask; to look for the number takes memory and time in proportion to it


@lru_cache(4096)
def lower_bound(successes: int, trials: int, confidence: float) -> float:
    """One-sided lower bound of a proportion (Clopper-Pearson), valid for any number of trials: the proportion at which
    `successes` or more have the probability 1 - `confidence`. Raises `InvalidInputError`."""
    check_share("confidence", confidence)
    if trials < 1 or not 0 <= successes <= trials:
        raise InvalidInputError(
            f"{successes} of {trials} is not a proportion: at least 1 trial and 0..trials successes are needed"
        )
    error = 1 - confidence
    if successes == 0:
        return 0.0
    if successes == trials:
        return float(error ** (1 / trials))
    logs = _log_coefficients(successes, trials)
    low, high = 0.0, successes / trials
    for _ in range(60):
        middle = (low + high) / 2
        if _tail(logs, successes, trials, middle) < error:
            low = middle
        else:
            high = middle
    return low


def share_interval(successes: int, trials: int, level: float) -> tuple[float, float]:
    """The two-sided interval of a proportion, [.54, 1] for 6 of 6 at 95 %. Raises as `lower_bound`."""
    confidence = (1 + level) / 2
    return lower_bound(successes, trials, confidence), 1 - lower_bound(trials - successes, trials, confidence)


def reaches(successes: int, trials: int, threshold: float, confidence: float) -> bool:
    """Whether the lower bound is at or above the threshold; faster than to compute it."""
    check_share("confidence", confidence)
    check_share("threshold", threshold)
    if successes == 0:
        return False
    return _tail(_log_coefficients(successes, trials), successes, trials, threshold) <= 1 - confidence


@lru_cache(64)
def needed_rows(threshold: float, confidence: float, errors: int = 0) -> int:
    """Fewest rows whose lower bound reaches the threshold with `errors` failures: 299 for 99 % at 95 %. Raises
    `InvalidInputError`."""
    check_share("threshold", threshold)
    check_share("confidence", confidence)

    def suffices(rows: int) -> bool:
        return reaches(rows - errors, rows, threshold, confidence)

    least = math.floor(math.log(1 - confidence) / math.log(threshold))  # of rows without a failure
    if least > MOST_ROWS:
        given = f"{threshold} at the confidence {confidence}"
        raise InvalidInputError(f"{given} needs {least} rows, more than {MOST_ROWS}: lower one of the two")
    low = high = max(least, errors + 1)
    while not suffices(high):
        low, high = high + 1, 2 * high
    return low + bisect_left(range(low, high), x=True, key=suffices)


def allowed_errors(rows: int, threshold: float, confidence: float) -> int:
    """Most failures with which the lower bound of `rows` rows reaches the threshold; -1 if none suffices."""
    errors = -1
    while errors + 1 < rows and reaches(rows - errors - 1, rows, threshold, confidence):
        errors += 1
    return errors


def check_share(name: str, value: float) -> None:
    """Raises `InvalidInputError` unless 0 < value < 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InvalidInputError(f"{name} must be between 0 and 1, both excluded, got {value!r}")


def _log_coefficients(successes: int, trials: int) -> npt.NDArray[np.float64]:
    logs = _log_factorials(1 << trials.bit_length())
    found: npt.NDArray[np.float64] = logs[trials] - logs[successes : trials + 1] - logs[: trials - successes + 1][::-1]
    return found


@cache
def _log_factorials(count: int) -> npt.NDArray[np.float64]:
    return np.array([math.lgamma(k + 1) for k in range(count + 1)])


def _tail(logs: npt.NDArray[np.float64], successes: int, trials: int, proportion: float) -> float:
    """Probability of at least `successes`, 0 < proportion < 1; summed in logarithms."""
    counts = np.arange(successes, trials + 1)
    logs = logs + counts * math.log(proportion) + (trials - counts) * math.log1p(-proportion)
    largest = float(logs.max())
    return math.exp(largest) * float(np.exp(logs - largest).sum())
