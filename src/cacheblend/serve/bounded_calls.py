"""Calls of a store that may hang: who needs a result waits a moment only, and starts no call twice meanwhile."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from cacheblend.core.load.threads import DaemonPool

T = TypeVar("T")
KNOWN_S = 30.0  # for which a result that came too late counts for who comes next: a slow store is none that hangs


class BoundedCalls:
    """At most one call of each name at a time, in so many threads of their own."""

    def __init__(self, threads: int) -> None:
        self._pool, self._lock = DaemonPool(threads, "cacheblend-calls"), threading.Lock()
        self._calls: dict[Hashable, Future[Any]] = {}
        self._known: dict[Hashable, tuple[Any, float]] = {}  # the last result of each, and when it came

    def result(self, name: Hashable, call: Callable[[], T], seconds: float) -> T:
        """What the call returns or raises, or of one that takes longer what it returned a while ago; `TimeoutError`:
        there is no such. Who comes meanwhile has the same result."""

        def keep() -> T:
            found = call()
            self._known[name] = found, time.monotonic()
            return found

        with self._lock:
            running = self._calls.get(name)
            if running is None or running.done():
                running = self._calls[name] = self._pool.submit(keep)
        try:
            return cast("T", running.result(seconds))
        except TimeoutError:
            if running.done():  # it came as the wait ended, or raised a timeout of its own
                return cast("T", running.result())
            found, at = self._known.get(name, (None, -KNOWN_S))
            if time.monotonic() - at > KNOWN_S:
                raise
            return cast("T", found)
