"""Work behind the requests: runs only while no request is under way, bounded and deduplicated.

A thread that has computed keeps its OpenMP team for as long as it lives. libgomp's workers spin between two parallel
regions only while there are no more of them than processors; beside a second team they sleep, and each region waits
for them to wake: prefills on two cores took a fifth longer. So what computes beside the requests does it in threads
that end.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Found = TypeVar("Found")
logger = logging.getLogger("cacheblend.engine")


def run_apart(work: Callable[[], Found]) -> Found:
    """What `work` returns or raises, done in a thread that ends with it."""
    with ThreadPoolExecutor(1, thread_name_prefix="cacheblend-apart") as thread:
        return thread.submit(work).result()


class Background:
    """A queue of small jobs, worked off by one thread between requests, which ends when there is nothing it may do.

    Args:
        limit: jobs that wait at most; more are dropped and counted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: OrderedDict[Hashable, Callable[[], Any]] = OrderedDict()
        self._changed = threading.Condition()
        self._requests = 0
        self._working = False
        self._running: Hashable = None
        self._flushing = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.failed = 0

    def begin_request(self) -> None:
        """Until `end_request` no further job is begun."""
        with self._changed:
            self._requests += 1

    def end_request(self) -> None:
        """One for each `begin_request`."""
        with self._changed:
            self._requests -= 1
            self._start()

    def submit(self, key: Hashable, job: Callable[[], Any]) -> bool:
        """Queues a job unless one of that key waits or runs already; False if it was dropped."""
        with self._changed:
            if key in self._jobs or (self._working and key == self._running):
                return True
            if self._closed or len(self._jobs) >= self._limit:
                if not self.dropped:
                    logger.warning("background queue is full (%d jobs) or closed; what comes is dropped", self._limit)
                self.dropped += 1
                return False
            self._jobs[key] = job
            self._start()
            return True

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until every queued job is done, requests or not; False after `timeout` seconds."""
        with self._changed:
            self._flushing += 1
            self._start()
            try:
                return self._changed.wait_for(lambda: not self._jobs and not self._working, timeout)
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Drops what waits and ends the thread behind the job under way."""
        with self._changed:
            self._closed = True
            if self._jobs:
                logger.warning("closed with %d background job(s) waiting; they are given up", len(self._jobs))
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _may_work(self) -> bool:
        return bool(self._jobs) and (self._requests == 0 or self._flushing > 0)

    def _start(self) -> None:
        if self._thread is None and self._may_work():
            self._thread = threading.Thread(target=self._work, name="cacheblend-background", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._may_work():
                    self._thread = None
                    return
                self._running, job = self._jobs.popitem(last=False)
                self._working = True
            try:
                job()
            except Exception:
                self.failed += 1
                logger.warning("background work failed; the request it belongs to is not affected", exc_info=True)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()
