"""A circuit breaker: a place that did not answer is not asked again for some seconds.

So a request waits for a timeout once, not for every block. Knows time and errors; does not know what is asked.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from cacheblend.core.errors import StoreUnreachableError
from cacheblend.store.base import LOGGER_NAME

PAUSE_S = 5.0
"""Seconds for which a place that did not answer is not asked."""

logger = logging.getLogger(LOGGER_NAME)


class CircuitBreaker:
    """State of the connection to one place; safe to call from several threads.

    Args:
        place: its name in messages.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._resume_at = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether the place did not answer within the last `PAUSE_S` seconds."""
        return time.monotonic() < self._resume_at

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """The context of every call to the place; begins a pause if the call raises `StoreUnreachableError`.

        Raises:
            StoreUnreachableError: the place does not answer, or is paused: then the call is not made.
        """
        left = self._resume_at - time.monotonic()
        if left > 0:
            raise StoreUnreachableError(f"{self._place} did not answer; asked again in {left:.0f} s")
        try:
            yield
        except StoreUnreachableError as error:
            self._resume_at = time.monotonic() + PAUSE_S
            logger.warning("%s; requests are computed without it, and it is asked again in %.0f s", error, PAUSE_S)
            raise
