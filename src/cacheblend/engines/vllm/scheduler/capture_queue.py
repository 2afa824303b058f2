"""The scheduler's queue of missed chunks: waits for their request's first token, bounds and deduplicates them.

    add_missed -> waiting (until the request has a token, or ended) -> take: sent to the workers -> finish

Only so many tokens are with the workers at a time, since each holds its KV until it is stored.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from cacheblend.core.names import BlockName
from cacheblend.engines.vllm.jobs import CaptureJob
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import QUEUE_FULL, TOO_LARGE

STUCK_S = 10.0  # seconds without progress after which the rest waits for the next request
_REMEMBERED = 1024  # finished chunks that requests which missed them meanwhile do not queue again


class CaptureQueue:
    """Missed chunks of one engine, from the request that missed them until the workers have stored them. At most
    `limit` are queued or computed at once, and the workers have `most_tokens` of anchors and chunks, none of more than
    `longest`; more chunks, and longer ones, are dropped and counted."""

    def __init__(self, limit: int, most_tokens: int, longest: int, counts: Counts) -> None:
        self._limit, self._most_tokens, self._counts = limit, most_tokens, counts
        self.longest = min(longest, most_tokens)
        self._waiting: dict[str, tuple[Any, Sequence[CaptureJob], float]] = {}
        self._queued: deque[tuple[BlockName, CaptureJob]] = deque()
        self._sent: OrderedDict[BlockName, CaptureJob] = OrderedDict()  # with the workers, in the order of sending
        self._sent_tokens = self._finished = self._work = 0
        self._progress_at = time.monotonic()
        self._unfinished: set[BlockName] = set()  # queued and sent
        self._finished_at: OrderedDict[BlockName, float] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Chunks are queued, or `is_computing`."""
        return self.is_computing if self._sent else bool(self._queued)

    @property
    def is_computing(self) -> bool:
        """Chunks are being computed. Not while the workers get no further: a store that hangs must not keep an idle
        engine stepping, nor vLLM from pausing."""
        return bool(self._sent) and time.monotonic() - self._progress_at < STUCK_S

    def add_missed(self, request: Any, jobs: Sequence[CaptureJob], missed_at: float) -> None:
        """Chunks to be captured once vLLM's request has its first token, so that they do not delay it."""
        self._waiting[request.request_id] = (request, jobs, missed_at)

    @property
    def is_empty(self) -> bool:
        return not self._queued and not self._sent

    @property
    def has_room(self) -> bool:
        """Nothing is queued that the workers do not have yet, and little with them."""
        return not self._queued and len(self._sent) <= 1

    def __contains__(self, job: CaptureJob) -> bool:
        """Whether a job of its name is queued, or with the workers."""
        return job.name in self._unfinished

    def sends_at_once(self, tokens: int) -> bool:
        """What is added now is sent in this step, if it has so many tokens at most."""
        return not self._queued and self._sent_tokens + tokens <= self._most_tokens

    def end_request(self, request_id: str) -> None:
        _, jobs, missed_at = self._waiting.pop(request_id, (None, (), 0.0))
        for job in jobs:
            self.add(job, missed_at)

    def take(self, *, is_paused: bool) -> list[CaptureJob]:
        """Chunks that are sent to the workers now; while vLLM is paused none, which its callers would wait for."""
        started = [name for name, (request, *_) in self._waiting.items() if request.num_output_tokens > 0]
        for request_id in started:
            self.end_request(request_id)
        jobs = []
        while self._queued and not is_paused:
            chunk_id, job = self._queued[0]
            if self._sent_tokens + job.tokens > self._most_tokens:
                break
            self._queued.popleft()
            self._sent[chunk_id] = job
            self._sent_tokens += job.tokens
            jobs.append(job)
        if jobs:
            self._progress_at = time.monotonic()
        return jobs

    def finish(self, finished: int, work: int) -> list[CaptureJob]:
        """Takes the workers' count of chunks that need no more work; returns the new ones, stored or not; `finished`:
        since the start, in the order of sending; `work`: what was computed of chunks since then. One chunk may take
        longer than `STUCK_S`: the section of a long history on a CPU."""
        found = []
        for _ in range(min(finished - self._finished, len(self._sent))):
            chunk_id, job = self._sent.popitem(last=False)
            self._sent_tokens -= job.tokens
            self._unfinished.discard(chunk_id)
            self._finished_at[chunk_id] = time.monotonic()
            found.append(job)
        if finished > self._finished or work > self._work:
            self._finished, self._work, self._progress_at = max(finished, self._finished), work, time.monotonic()
        while len(self._finished_at) > _REMEMBERED:
            self._finished_at.popitem(last=False)
        return found

    def clear(self) -> None:
        self._unfinished.difference_update(chunk_id for chunk_id, _ in self._queued)
        self._waiting.clear()
        self._queued.clear()

    def add(self, job: CaptureJob, missed_at: float) -> bool:
        """Queues a chunk that was missed then, by `time.monotonic`; False: it will not be captured."""
        if len(self._unfinished) >= self._limit:  # before names are computed
            self._counts.add_fallback(QUEUE_FULL)
            return False
        chunk_id = job.name
        if chunk_id in self._unfinished or self._finished_at.get(chunk_id, 0.0) > missed_at:
            return chunk_id in self._unfinished  # another request missed it as well
        if job.tokens > self.longest:
            self._counts.add_fallback(TOO_LARGE)
            return False
        if not self._queued and not self._sent:
            self._progress_at = time.monotonic()
        self._unfinished.add(chunk_id)
        self._queued.append((chunk_id, job))
        return True
