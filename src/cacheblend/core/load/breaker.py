"""A circuit breaker: a place that did not answer, or answered too late, is not asked again for some seconds.

So requests wait for it once, not for every block or one after the other. Knows time and errors; does not know what is
asked.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator

from cacheblend.core.errors import StoreUnreachableError

PAUSE_S = 5.0
"""Seconds for which a place that did not answer is not asked."""

_FOR_S, _MOST = 0.5, 60.0  # a tier that was given up pauses for `PAUSE_S` for each half second, so many times at most

logger = logging.getLogger("cacheblend.store")


class CircuitBreaker:
    """State of the connection to one place; safe to call from several threads.

    Args:
        place: its name in messages.
        clock: seconds of any origin; None: `time.monotonic`.
    """

    def __init__(self, place: str, clock: Callable[[], float] | None = None) -> None:
        self._place, self._clock = place, clock
        self._resume_at = -math.inf

    @property
    def left_s(self) -> float:
        """Seconds for which the place is not asked yet; 0: it may be asked."""
        return max(0.0, self._resume_at - self._now())

    @property
    def is_paused(self) -> bool:
        """Whether the place is not asked now."""
        return self.left_s > 0

    def pause(self, seconds: float) -> None:
        """The place is not asked for so long, or longer if it was paused for longer."""
        self._resume_at = max(self._resume_at, self._now() + seconds)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """The context of every call to the place; begins a pause if the call raises `StoreUnreachableError`.

        Raises:
            StoreUnreachableError: the place does not answer, or is paused: then the call is not made.
        """
        left = self.left_s
        if left > 0:
            raise StoreUnreachableError(f"{self._place} did not answer; asked again in {left:.0f} s")
        try:
            yield
        except StoreUnreachableError as error:
            self.pause(PAUSE_S)
            logger.warning("%s; requests are computed without it, and it is asked again in %.0f s", error, PAUSE_S)
            raise

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else self._clock()


class LateTiers:
    """The tiers of one store that a request has given up: for a while no other one waits for them.

    A tier is passed over for ten times as long as it was waited for, but `PAUSE_S` at least: so the requests that try
    it again spend a tenth of their time on that, however long they wait. Safe to call from several threads.

    Args:
        clock: seconds of any origin; None: `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._breakers: dict[str, CircuitBreaker] = {}
        self._silent: set[str] = set()  # have not answered since they were given up

    @property
    def silent(self) -> set[str]:
        """Tiers that have not answered in time since they were given up; ``""`` is the store as a whole."""
        return set(self._silent)

    def left_s(self, tier: str) -> float:
        """Seconds for which a tier is passed over yet; 0: it is asked."""
        breaker = self._breakers.get(tier)
        return 0.0 if breaker is None else breaker.left_s

    def give_up(self, tier: str, waited_s: float) -> None:
        """A request has waited so long for a tier, in vain. Said once, until the tier answers again."""
        seconds = PAUSE_S * min(_MOST, max(1.0, waited_s / _FOR_S))
        self._breakers.setdefault(tier, CircuitBreaker(tier, self._clock)).pause(seconds)
        if tier not in self._silent:
            self._silent.add(tier)
            logger.warning(
                "%s kept a request waiting for %.2f s, longer than allowed (load_timeout_s); requests are computed "
                "without it, and it is asked again in %.0f s",
                tier or "the store",
                waited_s,
                seconds,
            )

    def answered(self, tiers: Iterable[str]) -> None:
        """These tiers gave a request what it asked for in time."""
        for tier in self._silent.intersection(tiers):
            self._silent.discard(tier)
            logger.info("%s answers in time again", tier or "the store")
