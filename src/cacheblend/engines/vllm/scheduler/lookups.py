"""Look-ups of requests in the store, in threads: no engine step that computes waits for one.

Knows calls and clocks, no requests.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cacheblend.core.load.threads import DaemonPool

THREADS = 8

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class LookUp(Generic[Found]):
    """A look-up that has begun.

    Attributes:
        future: its result.
        began: by `time.monotonic`.
        deadline: after which it is given up.
    """

    future: "Future[Found]"
    began: float
    deadline: float

    @property
    def is_over(self) -> bool:
        """It has ended, or nobody waits for it any more."""
        return self.future.done() or time.monotonic() >= self.deadline

    def wait(self, seconds: float) -> None:
        """Returns when it has ended, or so many seconds after it began."""
        wait([self.future], max(0.0, self.began + seconds - time.monotonic()))

    def result(self) -> Found:
        """What was found.

        Raises:
            TimeoutError: it did not end in time, and is not begun any more.
            Exception: what the look-up raised.
        """
        self.drop()
        if self.future.cancelled():
            raise TimeoutError
        return self.future.result(timeout=0)

    def drop(self) -> None:
        """Nobody waits for it any more: if it has not begun it never will, and takes no thread from others."""
        self.future.cancel()


class LookUps(Generic[Found]):
    """The look-ups of one engine.

    Args:
        timeout_s: seconds that a request waits for one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pool = DaemonPool(THREADS, "cacheblend-lookup")
        self._open: list[LookUp[Found]] = []

    def start(self, find: Callable[[], Found], after: "Future[Any] | None" = None) -> "LookUp[Found] | None":
        """Has `find` called in a thread; None if every thread waits for a store that did not answer in time.

        Args:
            find: the look-up.
            after: what it needs, and takes no thread to wait for; None: nothing.
        """
        self._open = [each for each in self._open if not each.future.done()]
        if sum(each.future.running() and each.is_over for each in self._open) >= THREADS:
            return None
        began = time.monotonic()
        future = self._pool.submit(find) if after is None else self._pool.submit_after(after, find)
        made = LookUp(future, began, began + self.timeout_s)
        self._open.append(made)
        return made

    def run(self, call: Callable[[], object]) -> None:
        """Has something else of the store called in one of the threads; its result is not waited for."""
        self._pool.submit(call)

    def close(self) -> None:
        """Waits for nothing."""
        self._pool.close()
