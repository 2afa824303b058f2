"""Background work: runs only while no request is running, bounded and deduplicated.

    jobs        as soon as there are no requests; each as a whole
    idle work   behind all jobs, and only after a while without requests; a slice at a time, so that a request finds the
                model free soon

A thread that has computed with OpenMP keeps its team of worker threads as long as it lives. libgomp's workers spin
between two parallel regions only if there are no more workers than processors. With a second team they sleep, and each
region waits for them to wake up: prefills on two cores took a fifth longer. So background work computes in threads that
end.
"""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import count_failure
from cacheblend.core.openmp import end_team
from cacheblend.engines.hf.shadow_check import ShadowCheck

QUIET_S = 0.05  # without a request before idle work goes on: in a steady stream it would slow each request
CLOSE_S = 30.0  # seconds that closing waits for what is under way, which a store that hangs may never end
RETRY_S = 0.5  # seconds after which `flush` tries again to start the thread, where the system had none
logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    patient: bool
    since: float = field(default_factory=time.monotonic)


class Background:
    """A queue of small jobs, run between requests by one thread, which ends when no job may run. Of more than `limit`
    waiting jobs the rest is dropped and counted."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.RLock()
        self._changed = threading.Condition(self._lock)  # never entered itself: see `WriteBehind`
        self._jobs: OrderedDict[Hashable, _Job] = OrderedDict()
        self._requests = self._flushing = 0
        self._working = self._closed = False
        self._running: Hashable = None
        self._thread: threading.Thread | None = None
        self._quiet_since = time.monotonic()
        self.idle_work: ShadowCheck | None = None  # done when nothing else is; whoever sets it calls `wake` for some
        self.holds_up_requests = False  # the work that is being done is done in their thread
        self.given_up = Counter(dict.fromkeys(("queue full", "failed", "histories", "quota", "store", "too long"), 0))

    def give_up(self, reason: str, times: int = 1) -> None:
        """So many jobs are dropped (``queue full``) or ``failed``, or chunks are not stored: the ``store`` takes
        nothing at the moment, a ``quota`` is used up, or they are ``too long``; or of ``histories`` more wait than
        may."""
        with self._lock:
            self.given_up[reason] += times

    def begin_request(self) -> None:
        """No further job is started until `end_request`."""
        self.check_open()
        with self._lock:
            self._requests += 1

    def check_open(self) -> None:
        """Raises `InvalidInputError` after `close`: the engine takes no more work."""
        if self._closed:
            raise InvalidInputError("the engine is closed; open another one")

    def end_request(self) -> None:
        """Must be called once for each `begin_request`, by the thread that computed."""
        end_team()
        with self._lock:
            self._requests -= 1
            self._quiet_since = time.monotonic()
            self._start()

    def wake(self) -> None:
        with self._lock:
            self._start()

    def submit(self, key: Hashable, job: Callable[[], Any], *, patient: bool = False) -> bool:
        """Queues a job, unless one with the same key is waiting; False if it was dropped. A patient job waits until
        there are no requests, however long that takes (see `catch_up`). Patient jobs take at most a quarter of the
        queue: beyond that the oldest one is dropped."""
        with self._lock:
            if key in self._jobs:
                return True
            patient_keys = [key for key, each in self._jobs.items() if each.patient]
            if patient and len(patient_keys) >= max(1, self._limit // 4):
                del self._jobs[patient_keys[0]]
                self.give_up("queue full")
            if self._closed or len(self._jobs) >= self._limit:
                if not self.given_up["queue full"]:
                    why = "closed" if self._closed else f"full ({self._limit} jobs)"
                    logger.warning("the background queue is %s; further jobs are dropped", why)
                self.give_up("queue full")
                return False
            self._jobs[key] = _Job(job, patient)
            self._start()
            return True

    def catch_up(self, after_s: float) -> bool:
        """Runs one job in the calling thread that has waited at least `after_s` seconds, even during requests; False if
        there is none. No patient job is run. For a caller that always has requests, in their thread."""
        with self._lock:
            key = next((key for key, job in self._jobs.items() if not job.patient), None)
            if key is None or self._working or time.monotonic() - self._jobs[key].since < after_s:
                return False
            job = self._take(key)
        self._run(job.work, holds_up=True)
        return True

    def advance_idle(self) -> bool:
        """Does a slice of idle work in the calling thread, even during requests; False if there is none. For the same
        caller as `catch_up`, which sees to it that requests hardly notice."""
        with self._lock:
            work = self.idle_work
            if self._working or self._closed or work is None or not work.has_work:
                return False
            self._working, self._running = True, None
        self._run(work.advance, holds_up=True)
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until every queued job is done, running jobs even during requests; False after `timeout` seconds. Idle
        work is not waited for, but for a slice that is under way."""
        with self._lock:
            self._flushing += 1
            end = math.inf if timeout is None else time.monotonic() + timeout
            try:
                while self._jobs or self._working:
                    self._start()
                    left = end - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(min(left, RETRY_S))
                return True
            finally:
                self._flushing -= 1

    def close(self, timeout: float | None = CLOSE_S) -> bool:
        """Drops waiting jobs, and ends the thread after the job that is running; False if that takes longer than
        `timeout` seconds: it may hang in the store, and is left to itself."""
        with self._lock:
            self._closed = True
            if self._jobs:
                logger.warning("closed with %d background job(s) waiting; they are dropped", len(self._jobs))
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("closed with a background job that has not ended; it may wait for the store")
                return False
        return True

    def _may_work(self) -> bool:
        return bool(self._jobs) and not self._working and (self._requests == 0 or self._flushing > 0)

    def _may_idle(self) -> bool:
        """Idle work is there, and nothing else; it may have to wait for `_quiet_left_s` yet."""
        busy = self._requests or self._flushing or self._working or self._closed or self._jobs
        return self.idle_work is not None and not busy and self.idle_work.has_work

    @property
    def _quiet_left_s(self) -> float:
        return self._quiet_since + QUIET_S - time.monotonic()

    def _start(self) -> None:
        if self._thread is None and (self._may_work() or self._may_idle()):
            thread = threading.Thread(target=self._work, name="cacheblend-background", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                logger.warning("the system has no thread for background work, which waits", exc_info=True)
                count_failure("background work")
            else:
                self._thread = thread

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._may_idle() and self._quiet_left_s > 0:
                    self._changed.wait(self._quiet_left_s)
                if self._may_work():
                    work = self._take(next(iter(self._jobs))).work
                elif self._may_idle() and self.idle_work is not None:
                    self._working, self._running, work = True, None, self.idle_work.advance
                else:
                    self._thread = None
                    return
            self._run(work)

    def _take(self, key: Hashable) -> _Job:
        self._running, self._working = key, True
        return self._jobs.pop(key)

    def _run(self, work: Callable[[], Any], *, holds_up: bool = False) -> None:
        self.holds_up_requests = holds_up
        try:
            work()
        except Exception:
            self.give_up("failed")
            count_failure("background work")
            logger.warning("background work failed; its request is not affected", exc_info=True)
        finally:
            end_team()
            self.holds_up_requests = False
            with self._lock:
                self._working = False
                self._start()
                self._changed.notify_all()
