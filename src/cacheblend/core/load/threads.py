"""A pool of daemon threads, for calls of a store that may never return: no such call keeps a process from ending.
`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter ends, whatever they are doing."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

from cacheblend.core.errors import StoreError
from cacheblend.core.openmp import end_team

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
T = TypeVar("T")


class PoolCall(Future[Result]):
    """A call of a pool. `asked`: those of other pools that it waits for (`results_of`)."""

    is_dropped, asked = False, cast("Sequence[Future[Any]]", ())

    def drop(self) -> None:
        """Nobody waits for it any more: cancels it, or what it has asked for and has not begun."""
        self.is_dropped = True
        if not self.cancel():
            for each in self.asked:
                each.cancel()


ASIDE_EVERY = 16  # items, of some ten microseconds each
IDLE_S = 0.05  # until a thread counts as one that does not compute
_here = threading.local()  # `call`: the one that this thread is in


class DaemonPool:
    """Runs calls in the order of their submission, in at most `threads` daemon threads, which are started when needed.
    `threads`: the most calls that run at the same time, at least 1. `name`: of the threads, for debuggers."""

    def __init__(self, threads: int, name: str) -> None:
        self._shared = _Shared()
        self._most, self._name = max(1, threads), name

    def submit(
        self, fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> PoolCall[Result]:
        """Has `fn` called; returns at once. Raises `RuntimeError`: the pool is closed, or the system has no more
        threads."""
        future = PoolCall[Result]()
        self._put(future, lambda: fn(*args, **kwargs))
        return future

    def _put(self, future: PoolCall[Any], call: Callable[[], Any]) -> None:
        shared = self._own()
        if shared.is_closed:
            raise RuntimeError(f"the threads {self._name!r} are closed")
        shared.outstanding.append(None)
        shared.calls.put((future, call))
        if shared.is_closed:  # since: nobody may take it any more
            future.cancel()
            return
        if len(shared.threads) >= min(self._most, len(shared.outstanding)):
            return
        with shared.starting:
            if len(shared.threads) < min(self._most, len(shared.outstanding)):  # there may be enough meanwhile
                name = f"{self._name}-{len(shared.threads)}"
                thread = threading.Thread(target=_run, args=(shared,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not shared.threads and future.cancel():  # else another thread has it, or will
                        raise
                else:
                    shared.threads.append(thread)

    def submit_after(self, first: "Future[Any]", fn: Callable[[], Result]) -> PoolCall[Result]:
        """Has `fn` called once another call has succeeded, and takes no thread until then; its error is this one's."""
        future, calls = PoolCall[Result](), [fn]

        def begin(done: "Future[Any]") -> None:
            call = calls.pop() if calls else None  # `first` keeps this function, which keeps nothing else
            if call is None or done.cancelled():
                future.cancel()
            elif (error := done.exception()) is not None:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            elif not future.cancelled():
                try:
                    self._put(future, call)
                except RuntimeError:
                    future.cancel()

        future.add_done_callback(lambda ended: calls.clear())  # cancelled, while `first` may hang
        first.add_done_callback(begin)
        return future

    def _own(self) -> "_Shared":
        """This process's part: after a fork threads are not copied, and a lock may be held for ever."""
        if self._shared.process != os.getpid():
            self._shared = _Shared()
        return self._shared

    def close(self) -> None:
        """Cancels the calls that have not begun; does not wait for the others, whose threads end after them. May be
        called again."""
        shared = self._own()
        shared.is_closed = True
        with contextlib.suppress(Empty):
            while True:
                if (call := shared.calls.get_nowait()) is not None:
                    call[0].cancel()
        shared.calls.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """After `close`: waits for the calls that are under way, for ever or so many seconds."""
        left = time_left(timeout_s)
        for thread in self._own().threads:
            thread.join(left())

    def __del__(self) -> None:
        if os is not None:  # else the interpreter is ending, and takes modules away in any order
            self.close()


def standing_aside(items: Iterable[T]) -> Iterator[T]:
    """The items of a long loop in a thread beside one that computes. That one waits for the interpreter whenever an
    operation of PyTorch ends, up to five milliseconds each time, unless this thread lets it go before."""
    for number, item in enumerate(items, 1):
        if number % ASIDE_EVERY == 0:
            time.sleep(0)
        yield item


def time_left(timeout_s: float | None) -> Callable[[], float | None]:
    """Tells what is left of so many seconds from now on, 0 at least; None: of no limit."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if end is None else max(0.0, end - time.monotonic())


def submit_or_call(
    pool: DaemonPool, fn: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> "Future[Result]":
    """Has a pool call `fn`, or calls it here where the system has no more threads or the pool is closed."""
    try:
        return pool.submit(fn, *args, **kwargs)
    except RuntimeError:
        done = Future[Result]()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def results_of(asked: Sequence["Future[Result]"]) -> list[Result]:
    """The results of calls, in order; after an error those that have not begun are cancelled. Raises what they raise;
    `StoreError`: the pool was closed before one began; `CancelledError`: nobody waits for this (`PoolCall.drop`)."""
    call: PoolCall[Any] = getattr(_here, "call", None) or PoolCall()
    call.asked = asked
    if call.is_dropped:
        call.drop()
    try:
        return [answer.result() for answer in asked]
    except CancelledError:
        if call.is_dropped:
            raise
        raise StoreError("the store was closed while it was asked") from None
    finally:
        call.asked = ()
        for answer in asked:
            answer.cancel()
            del answer
        del call, asked  # see `_answer`


class _Shared:
    """What a pool and its threads share; the threads do not keep the pool itself alive. Callers need a lock to start a
    thread only: a KeyboardInterrupt may leave a condition's lock held for ever, and a pool may be deleted anywhere."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[PoolCall[Any], Callable[[], Any]] | None] = SimpleQueue()  # None: it is closed
        self.outstanding = deque[None]()  # as many as calls that have not ended; each is to have a thread
        self.threads: list[threading.Thread] = []
        self.starting = threading.Lock()
        self.is_closed = False
        self.process = os.getpid()


def _run(shared: _Shared) -> None:
    """The life of a thread."""
    while (taken := _next_call(shared)) is not None:
        future, call = taken
        del taken
        _answer(future, call, shared.outstanding.pop)
        del future, call  # else a waiting thread would keep the last result alive
    shared.calls.put(None)  # for the next thread


def _next_call(shared: _Shared) -> tuple[PoolCall[Any], Callable[[], Any]] | None:
    """The next call, or None. A thread that waits longer ends its team of threads; one takes .1 ms to make, which calls
    that follow each other, as the layers of a prompt are read, should not each take."""
    try:
        return shared.calls.get(timeout=IDLE_S)
    except Empty:
        end_team()
        return shared.calls.get()


def _answer(future: PoolCall[Any], call: Callable[[], Any], ended: Callable[[], Any] = lambda: None) -> None:
    """Calls `ended` before anybody has the answer, who may ask again at once."""
    try:
        if not future.set_running_or_notify_cancel():
            ended()
            return
        _here.call = future
        try:
            result = call()
        except BaseException as error:
            ended()
            future.set_exception(error)
        else:
            ended()
            future.set_result(result)
            del result
    finally:
        _here.call = None
        del future, call  # else an error, whose traceback has this frame, and the future would keep each other alive
