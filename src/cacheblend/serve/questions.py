"""Questions to a store that may hang: who asks waits a moment only, and asks nothing twice meanwhile."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from cacheblend.core.load.threads import DaemonPool

T = TypeVar("T")


class Questions:
    """At most one call of each name at a time, in so many threads of their own."""

    def __init__(self, threads: int) -> None:
        self._pool, self._lock = DaemonPool(threads, "cacheblend-questions"), threading.Lock()
        self._calls: dict[Hashable, Future[Any]] = {}

    def ask(self, name: Hashable, call: Callable[[], T], seconds: float) -> T:
        """What the call returns or raises; `TimeoutError`: it takes longer. Who asks meanwhile has the same answer."""
        with self._lock:
            asked = self._calls.get(name)
            if asked is None or asked.done():
                asked = self._calls[name] = self._pool.submit(call)
        try:
            return cast("T", asked.result(seconds))
        finally:
            with self._lock:
                if asked.done() and self._calls.get(name) is asked:
                    del self._calls[name]
