"""Questions to a store that may hang: who asks waits a moment only, and asks nothing twice meanwhile."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from cacheblend.core.load.threads import DaemonPool

T = TypeVar("T")
KNOWN_S = 30.0  # for which an answer that came too late counts for who asks next: a slow store is none that hangs


class Questions:
    """At most one call of each name at a time, in so many threads of their own."""

    def __init__(self, threads: int) -> None:
        self._pool, self._lock = DaemonPool(threads, "cacheblend-questions"), threading.Lock()
        self._calls: dict[Hashable, Future[Any]] = {}
        self._known: dict[Hashable, tuple[Any, float]] = {}  # the last answer of each, and when it came

    def ask(self, name: Hashable, call: Callable[[], T], seconds: float) -> T:
        """What the call returns or raises, or of one that takes longer what it returned a while ago; `TimeoutError`:
        there is no such. Who asks meanwhile has the same answer."""

        def answer() -> T:
            found = call()
            self._known[name] = found, time.monotonic()
            return found

        with self._lock:
            asked = self._calls.get(name)
            if asked is None or asked.done():
                asked = self._calls[name] = self._pool.submit(answer)
        try:
            return cast("T", asked.result(seconds))
        except TimeoutError:
            found, at = self._known.get(name, (None, -KNOWN_S))
            if asked.done() or time.monotonic() - at > KNOWN_S:
                raise
            return cast("T", found)
