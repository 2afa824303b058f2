"""Work beside the scheduler: bounded, in slices, each tenant's turn after the other's; ended with its client.

    tenant A   post of 700 chunks   |slice|     |slice|     |slice| ...
    tenant B   post of one chunk          |slice|

Work is a function, which is one slice, or a generator, whose slices end with each ``yield``. What has begun goes behind
the tenant's other work after each slice, so that long work holds up short work by a slice at most.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import Any, TypeVar, cast

from cacheblend.core.openmp import end_team
from cacheblend.engines.hf.scheduler import ClosedError, QueueFullError, TooLateError
from cacheblend.serve.errors import ApiError

T = TypeVar("T")
Work = Callable[[], T | Generator[None, None, T]]
SLICE_TOKENS, SLICE_CHARACTERS = 1024, 1 << 18
"""Tokens that work computes, and characters that it tokenises, before other requests have their turn."""
ASIDE_S = 0.003  # seconds between a worker's slices
LOOK_S = 0.5  # seconds after which waiting work looks whether its client is still there


@dataclass(eq=False)
class _QueuedCall:
    tenant: str
    work: Work[Any] | None  # None: it has begun
    turn: "asyncio.Future[None] | None" = None  # waits for the next slice; None while a slice runs
    slices: Generator[None, None, Any] | None = None  # of work that is a generator
    found: list[Any] = field(default_factory=list)  # what the work returned

    def advance(self) -> None:
        """Runs a slice, on a worker thread."""
        try:
            if self.work is not None:
                work, self.work = self.work, None
                found = work()
                if not isgenerator(found):
                    self.found.append(found)
                    return
                self.slices = cast(Generator[None, None, Any], found)
            assert self.slices is not None
            next(self.slices)
        except StopIteration as ended:
            self.found.append(ended.value)
        finally:
            end_team()


class FairQueue:
    """Runs work of several tenants in turn; on one event loop. `workers`: slices at a time, each in a thread. Beyond
    `limit` the newest waiting work of who has most gives way to who has less."""

    def __init__(self, workers: int, limit: int) -> None:
        self._workers, self._limit = workers, limit
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="cacheblend-queue")
        self._jobs: dict[_QueuedCall, None] = {}  # all that have come and not ended, the newest last
        self._turns: dict[str, deque[_QueuedCall]] = {}  # of the tenants that wait
        self._served: dict[str, int] = {}  # by tenant its last slice's number; who has waited longest is next
        self._slices = 0
        self._running = 0
        self._ended = False

    @property
    def waiting(self) -> int:
        """Work that has come and has no thread at the moment."""
        return self.waiting_of.total()

    @property
    def waiting_of(self) -> "Counter[str]":
        """The same by tenant."""
        return Counter(job.tenant for job in self._jobs if job.turn is not None and not job.turn.done())

    async def run(
        self, tenant: str, work: Work[T], deadline: float, is_gone: Callable[[], Awaitable[bool]] | None = None
    ) -> T:
        """What the work returns, called in a worker's thread. Raises `QueueFullError`; between slices `TooLateError`
        (the deadline, `time.monotonic`), `ClosedError` (ended) and `ApiError` 499 (`is_gone`)."""
        if len(self._jobs) >= self._limit + self._workers:
            self._make_room(tenant)
        job = _QueuedCall(tenant, work)
        self._jobs[job] = None
        try:
            while not job.found:
                await self._turn(job, deadline, is_gone)
                job.turn = None
                try:
                    running = asyncio.get_running_loop().run_in_executor(self._threads, job.advance)
                except RuntimeError:  # the system has no thread left, and the executor keeps the call for the next one
                    job.work = lambda: None
                    self._release()
                    raise
                # The worker stays taken as long as its thread runs, even if nobody awaits it any more, and a moment
                # longer: this thread and a worker, in turns, would keep the interpreter from the one that decodes.
                running.add_done_callback(lambda _: asyncio.get_running_loop().call_later(ASIDE_S, self._release))
                await asyncio.shield(running)
            found: T = job.found[0]
            return found
        finally:
            del self._jobs[job]
            if job in (waiting := self._turns.get(tenant, deque())):
                waiting.remove(job)
                if not waiting:
                    del self._turns[tenant]

    def end(self) -> None:
        """Ends all work before its next slice, with `ClosedError`."""
        self._ended = True

    def close(self) -> None:
        """Starts no further slice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, tenant: str) -> None:
        counts, full = Counter(job.tenant for job in self._jobs), QueueFullError(self.waiting, 5)
        most = max(counts, key=lambda each: counts[each], default=tenant)
        if counts[most] > counts[tenant] + 1:
            for job in reversed(self._jobs):
                if job.tenant == most and job.work is not None and job.turn is not None and not job.turn.done():
                    job.turn.set_exception(full)
                    return
        raise full

    async def _turn(self, job: _QueuedCall, deadline: float, is_gone: Callable[[], Awaitable[bool]] | None) -> None:
        """Waits for the job's next slice."""
        job.turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(job.tenant, deque()).append(job)
        self._hand_out()
        try:
            while True:
                if is_gone is not None and await is_gone():
                    raise ApiError(499, "the client has disconnected")
                if self._ended:
                    raise ClosedError("the server is being stopped; what was stored until then stays stored")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TooLateError("the request's deadline has passed; what it stored until then stays stored")
                await asyncio.wait({job.turn}, timeout=min(LOOK_S, left))
                if job.turn.done():
                    job.turn.result()
                    return
        except BaseException:
            turn, job.turn = job.turn, None
            if not turn.cancel() and turn.exception() is None:  # it had its turn, and does not take it
                self._release()
            raise

    def _release(self) -> None:
        self._running -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Gives free workers to the tenants in turn."""
        while self._running < self._workers and self._turns:
            tenant = min(self._turns, key=lambda each: self._served.get(each, 0))
            job = self._turns[tenant].popleft()
            if not self._turns[tenant]:
                del self._turns[tenant]
            self._slices += 1
            self._served[tenant] = self._slices
            if job.turn is not None and not job.turn.done():
                self._running += 1
                job.turn.set_result(None)
