"""The scheduler's queue of missed chunks: waits for their request's first token, bounds and deduplicates them.

    add_missed -> waiting (until the request has a token, or ended) -> take: sent to the workers -> finish: listed

Knows requests by their id and number of tokens. Does not know plans, nor how the workers compute chunks.
"""

from collections.abc import Sequence
from typing import Any

from cacheblend.core.errors import StoreError
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.planner import Planner
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.engines.vllm.metrics import Counts


class CaptureQueue:
    """Missed chunks of one engine, from the request that missed them until the workers have stored them.

    Args:
        keeper: tells which chunks the store holds.
        planner: names chunks.
        limit: chunks that may be queued or computed at once; more are dropped and counted.
        counts: gets the dropped chunks.
    """

    def __init__(self, keeper: ChunkKeeper, planner: Planner, limit: int, counts: Counts) -> None:
        self._keeper, self._planner, self._limit, self._counts = keeper, planner, limit, counts
        self._waiting: dict[str, tuple[Any, Sequence[ChunkJob]]] = {}
        self._queued: list[ChunkJob] = []
        self._unfinished: dict[BlockName, ChunkManifest] = {}  # queued and sent, in the order of sending
        self._sent = self._finished = 0

    @property
    def is_busy(self) -> bool:
        """Chunks are queued, or the workers compute some."""
        return self._sent > self._finished or bool(self._queued)

    def add_missed(self, request: Any, jobs: Sequence[ChunkJob]) -> None:
        """Chunks to be captured once vLLM's request has its first token, so that they do not delay it."""
        self._waiting[request.request_id] = (request, jobs)

    def end_request(self, request_id: str) -> None:
        """Queues what a request that ended has missed."""
        _, jobs = self._waiting.pop(request_id, (None, ()))
        self._add(jobs)

    def take(self) -> list[ChunkJob]:
        """Chunks to be sent to the workers in this step."""
        started = [name for name, (request, _) in self._waiting.items() if request.num_output_tokens > 0]
        for request_id in started:
            self.end_request(request_id)
        jobs, self._queued = self._queued, []
        self._sent += len(jobs)
        return jobs

    def finish(self, finished: int) -> list[ChunkManifest]:
        """Takes the workers' count of chunks that need no more work; returns those of the new ones that are stored.

        Args:
            finished: since the start, in the order of sending.
        """
        done = list(self._unfinished)[: finished - self._finished]
        found = [self._unfinished.pop(chunk_id) for chunk_id in done]
        self._finished = max(self._finished, finished)
        return [manifest for manifest in found if self._is_held(manifest)]

    def _add(self, jobs: Sequence[ChunkJob]) -> None:
        for job in jobs:
            manifest = manifest_of(job, self._planner, "")
            if manifest.chunk_id in self._unfinished or self._is_held(manifest):
                continue
            if len(self._unfinished) >= self._limit:
                self._counts.add_fallback("capture queue full")
                continue
            self._unfinished[manifest.chunk_id] = manifest
            self._queued.append(job)

    def _is_held(self, manifest: ChunkManifest) -> bool:
        try:
            return self._keeper.is_held(manifest)
        except (StoreError, OSError):
            return True  # nothing can be stored there now
