"""Holds agreement to a floor by steps of the recompute ratio.

    step    0       1        2         ...   last
    ratio   r       1.5 r    2.25 r          full recompute

The lower bound of a window of W comparisons has to reach the floor, which allows it e disagreements. The ratio is
raised as soon as the window has more than e, also before it is full: however the rest turned out, it could not reach
the floor. It is lowered a step after a full window that reaches it. The window begins anew with each change, since
comparisons with another ratio do not tell of this one. Where a lowered ratio fails, the next attempt waits for twice as
many windows.

Knows counts. Does not know who compares, or what a ratio is applied to.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.engines.bounds import allowed_errors, lower_bound
from cacheblend.engines.shadow.settings import ShadowSettings

STEP = 1.5
LEAST = 0.01
"""A ratio from which so many steps lead to full recompute that answers would be wrong for long; 0 has none at all."""

FULL_ABOVE = 2 / 3
"""Ratios above it are full recompute: loading, and choosing rows, would cost more than the rows left."""

MOST_WINDOWS = 16
"""Windows that a step is kept at most before the next lower one is tried again."""


def factors_from(ratio: float | None) -> tuple[float, ...]:
    """By step what a ratio is multiplied with, infinite for full recompute; a ratio of 1 has no further step.

    Args:
        ratio: the configured one; None, or below `LEAST`: it cannot be raised in steps.
    """
    factors = [1.0]
    if ratio is not None and ratio >= 1:
        return (1.0,)
    if ratio is not None and ratio >= LEAST:
        while ratio * factors[-1] * STEP <= FULL_ABOVE:
            factors.append(factors[-1] * STEP)
    return (*factors, math.inf)


@dataclass(frozen=True)
class Change:
    """A step.

    Attributes:
        raised: else lowered.
        agreement, bound, rows: of the window that decided.
        step: the new one.
    """

    raised: bool
    agreement: float
    bound: float
    rows: int
    step: int


class Floor:
    """The floor of one model; the caller sees to it that one thread calls it at a time.

    Args:
        settings: its floor may be None: then no step is made.
        steps: how many there are.

    Attributes:
        step: in force.
        raised, lowered: how often so far.
    """

    def __init__(self, settings: ShadowSettings, steps: int) -> None:
        self._settings, self._steps, rows = settings, steps, settings.rows
        self._allowed = None if settings.floor is None else allowed_errors(rows, settings.floor, settings.confidence)
        self._windows: tuple[deque[bool], ...] = (deque(maxlen=rows), deque(maxlen=rows))
        self._since = 0  # comparisons since the last change
        self._wait, self._is_trial = 1, False
        self.step = self.raised = self.lowered = 0

    def worst(self) -> tuple[float, float, int]:
        """(agreement, its lower bound, comparisons) of the window with the lower agreement; 1, 0, 0 of empty ones."""
        return min(rated(window, self._settings.confidence) for window in self._windows)

    def add(self, first: bool, token: bool) -> Change | None:
        """Takes a comparison made with the step in force; the change that follows from it, if any.

        Args:
            first: whether the first tokens agree.
            token: whether a token of the answer, drawn at random, agrees.
        """
        for window, agreed in zip(self._windows, (first, token), strict=True):
            window.append(agreed)
        self._since += 1
        if self._allowed is None:
            return None
        if any(len(window) - sum(window) > self._allowed for window in self._windows):
            return self._raise() if self.step < self._steps - 1 else None
        if self._is_trial and self._since >= self._settings.rows:
            self._is_trial, self._wait = False, 1
        if self.step and self._since >= self._settings.rows * self._wait:
            return self._lower()
        return None

    def begin_anew(self) -> None:
        """Forgets the comparisons, not the step: the model is another one."""
        self._since = 0
        for window in self._windows:
            window.clear()

    def _raise(self) -> Change:
        self._wait = min(2 * self._wait, MOST_WINDOWS) if self._is_trial else 1
        self._is_trial = False
        self.raised += 1
        return self._change(self.step + 1, raised=True)

    def _lower(self) -> Change:
        self._is_trial = True
        self.lowered += 1
        return self._change(self.step - 1, raised=False)

    def _change(self, step: int, *, raised: bool) -> Change:
        change = Change(raised, *self.worst(), step)
        self.step = step
        self.begin_anew()
        return change


def rated(window: Sequence[bool] | deque[bool], confidence: float) -> tuple[float, float, int]:
    """(share, its exact lower bound, count) of a window; 1, 0, 0 of an empty one."""
    count, agreed = len(window), sum(window)
    return (agreed / count, lower_bound(agreed, count, confidence), count) if count else (1.0, 0.0, 0)
