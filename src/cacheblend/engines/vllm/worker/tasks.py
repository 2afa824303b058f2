"""A worker's unfinished jobs, and which of them can go on without waiting for the store.

next layer read on all ranks       READY    computed
... not yet                        WAITING  passed over; a read that has just begun is waited for a little
... not in the job's `load_s`      SLOW     given up: vLLM computes the prompt, which takes less time
... not in `read_timeout_s`        LATE     given up: the store hangs
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.fuse.prefill import PrefillJob, PrefillResult
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.vllm.jobs import Adapter, BlendJob, BlendOutcome, CaptureJob
from cacheblend.engines.vllm.worker.ranks import Ranks

PATIENCE_S = 0.005  # that a step waits for reads in all, and for one read: longer ones are passed over
IDLE_S = 0.05  # the same in a step in which vLLM computes nothing
READY, WAITING, SLOW, LATE, BROKEN = range(5)
logger = logging.getLogger("cacheblend.vllm")


@dataclass(eq=False)
class Task(PrefillJob):
    """A job that has not finished."""

    job: BlendJob | CaptureJob
    number: int = -1  # of a `CaptureJob`, in the order of sending
    started: float = 0.0
    busy_s: float = 0.0  # of computing, with the waits of its loader
    is_alone: bool = True  # nothing else was computed in those seconds
    kv: list[LayerKV] = field(default_factory=list)
    ended: tuple[BlendOutcome, PrefillResult] | None = None
    waits_since: float | None = None  # when its next layer was found to be unread
    read_at: float | None = None  # when the read that it waits for ended
    waited_s: float = 0.0  # for reads that have ended, between layers that were computed

    @property
    def reads(self) -> bool:
        """It may have to wait for the store."""
        return isinstance(self.job, BlendJob) or self.job.exact is not None

    @property
    def adapter(self) -> Adapter | None:
        return self.job.adapter

    @property
    def waiting_s(self) -> float:
        return 0.0 if self.waits_since is None else time.monotonic() - self.waits_since

    def begin_wait(self, read: "Future[Any]") -> None:
        def note_end(read: "Future[Any]") -> None:
            self.read_at = time.monotonic()

        if self.waits_since is None:
            self.waits_since, self.read_at = time.monotonic(), None
            read.add_done_callback(note_end)

    def end_wait(self) -> None:
        """The next layer is there, perhaps since some time: other work was done meanwhile."""
        if self.waits_since is not None:
            self.waited_s += max(0.0, (self.read_at or time.monotonic()) - self.waits_since)
            self.waits_since = None

    def close(self) -> None:
        """Stops reading, and lets go of everything that was computed."""
        prefill, self.prefill, self.kv = self.prefill, None, []
        if prefill is not None:
            prefill.close()


class Readiness:
    """Tells which open tasks can go on."""

    def __init__(self, ranks: Ranks, read_timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, read_timeout_s
        self._left, self._is_idle = 0.0, False

    def begin_step(self, *, is_idle: bool) -> None:
        self._is_idle, self._left = is_idle, IDLE_S if is_idle else PATIENCE_S

    def of(self, tasks: Sequence[Task]) -> dict[Task, int]:
        """The state of each of these open tasks, the same on all ranks. May wait for as long as the step may."""
        found = [_begin_read(task) for task in tasks]
        pending = {task: read for task, read in zip(tasks, found, strict=True) if isinstance(read, Future)}
        if pending and self._left > 0:
            self._wait(pending, is_any_ready=len(pending) < len(tasks))
        states = [self._state(task, read) for task, read in zip(tasks, found, strict=True)]
        return dict(zip(tasks, self._ranks.agree_each(states), strict=True))

    def _wait(self, pending: dict[Task, "Future[Any]"], *, is_any_ready: bool) -> None:
        """Waits for reads that have just begun; in an idle step for any, if nothing else can be done."""
        started = time.monotonic()
        if self._is_idle and not is_any_ready:
            wait(pending.values(), self._left, FIRST_COMPLETED)
        else:
            ends = {task: (task.waits_since or started) + PATIENCE_S for task in pending}
            young = [task for task in pending if ends[task] > started]
            limit = min([self._left, *(ends[task] - started for task in young)])
            wait([pending[task] for task in young], limit, ALL_COMPLETED)
        self._left -= time.monotonic() - started

    def _state(self, task: Task, read: "Future[Any] | int") -> int:
        if isinstance(read, int):
            return read
        if read.done():
            task.end_wait()
            return READY
        if task.waiting_s > self._timeout_s:
            return LATE
        most = task.job.load_s if isinstance(task.job, BlendJob) else None
        return SLOW if most is not None and task.waited_s + task.waiting_s > most else WAITING


def _begin_read(task: Task) -> "Future[Any] | int":
    assert task.prefill is not None
    try:
        read = task.prefill.awaited
    except Exception:
        logger.exception("the store cannot be read")
        return BROKEN
    if read is None:
        task.end_wait()
        return READY
    task.begin_wait(read)
    return read
