"""A circuit breaker: a place that did not answer, or answered too late, is not asked again for some seconds. So
requests wait for it once, not for every block or one after the other. Knows time and errors; does not know what is
asked."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator

from cacheblend.core.errors import StoreUnreachableError

PAUSE_S = 5.0  # seconds for which a place that did not answer is not asked
logger = logging.getLogger("cacheblend.store")


class CircuitBreaker:
    """State of the connection to one place, by its name in messages; safe to call from several threads."""

    def __init__(self, place: str) -> None:
        self._place, self._resume_at = place, -math.inf

    @property
    def is_paused(self) -> bool:  # whether the place is not asked now
        return self._resume_at > time.monotonic()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """The context of every call to the place; begins a pause if the call raises `StoreUnreachableError`. Raises
        `StoreUnreachableError`: the place does not answer, or is paused: then the call is not made."""
        left = self._resume_at - time.monotonic()
        if left > 0:
            raise StoreUnreachableError(f"{self._place} did not answer; asked again in {left:.0f} s")
        try:
            yield
        except StoreUnreachableError as error:
            self._resume_at = max(self._resume_at, time.monotonic() + PAUSE_S)
            logger.warning("%s; requests are computed without it, and it is asked again in %.0f s", error, PAUSE_S)
            raise
