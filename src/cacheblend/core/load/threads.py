"""A pool of daemon threads, for calls of a store that may never return: no such call keeps a process from ending.

`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter ends, whatever they are doing.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class DaemonPool:
    """Runs calls in the order of their submission, in at most `threads` daemon threads, which are started when needed.

    Args:
        threads: the most calls that run at the same time, at least 1.
        name: of the threads, for debuggers.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._shared = _Shared()
        self._most, self._name = max(1, threads), name

    def submit(
        self, fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        """Has `fn` called; returns at once.

        Raises:
            RuntimeError: the pool is closed.
        """
        shared, future = self._shared, Future[Result]()
        with shared.changed:
            if shared.is_closed:
                raise RuntimeError(f"the threads {self._name!r} are closed")
            shared.waiting.append((future, lambda: fn(*args, **kwargs)))
            if len(shared.waiting) > shared.idle and shared.threads < self._most:
                shared.threads += 1
                name = f"{self._name}-{shared.threads}"
                threading.Thread(target=_run, args=(shared,), name=name, daemon=True).start()
            shared.changed.notify()
        return future

    def close(self) -> None:
        """Cancels the calls that have not begun; does not wait for the others, whose threads end after them.

        May be called again.
        """
        with self._shared.changed:
            self._shared.is_closed = True
            waiting, self._shared.waiting = self._shared.waiting, deque()
            self._shared.changed.notify_all()
        for future, _ in waiting:
            future.cancel()

    def __del__(self) -> None:
        self.close()


class _Shared:
    """What a pool and its threads share; the threads do not keep the pool itself alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # re-entrant: a pool may be deleted in a thread that holds it
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.threads = self.idle = 0
        self.is_closed = False


def _run(shared: _Shared) -> None:
    """The life of a thread."""
    while True:
        with shared.changed:
            shared.idle += 1
            while not shared.waiting and not shared.is_closed:
                shared.changed.wait()
            shared.idle -= 1
            if not shared.waiting:
                return
            future, call = shared.waiting.popleft()
        _answer(future, call)
        del future, call  # else a waiting thread would keep the last result alive


def _answer(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
