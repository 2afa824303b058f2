"""Stores chunks: before their first use (`warm`), or after a request that missed them.

Knows the model's plain forward, the store and the background queue. Does not know requests or engines.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.load.capture import CapturedChunk, ChunkJob, manifest_of, publish
from cacheblend.core.naming import TokenIds
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Segment, check_ids
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.capture import batches, compute_chunks
from cacheblend.engines.hf.following import AdapterFollower
from cacheblend.engines.hf.survey import Survey, check_mode
from cacheblend.engines.keeper import ChunkKeeper, WarmReport
from cacheblend.store import KVStore, WriteBehind

Progress = Callable[[int, int], None]
HOLD_UP_TOKENS = 2048
"""A longer chunk is captured only while there are no requests."""


class ChunkWarmer:
    """Computes chunks alone, each with its anchor in front of it, and stores them.

    Args:
        model: computes them by its plain forward.
        store: where they go.
        survey: the model's limits.
        config: batch size and whether misses are captured.
        background: runs the work that is done after requests.
        name: of the model, for people.
        adapters: of the model; KV computed while they change is not stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        survey: Survey,
        config: BlendConfig,
        background: Background,
        name: str,
        adapters: AdapterFollower,
    ) -> None:
        self._model, self._store, self._survey, self._config = model, store, survey, config
        self._background, self._name, self._adapters = background, name, adapters
        self._writer = WriteBehind(store)
        self._keeper = ChunkKeeper(store)

    def warm(
        self,
        planner: Planner,
        anchor: Sequence[TokenIds],
        segments: Sequence[Segment],
        progress: Progress | None = None,
    ) -> WarmReport:
        """Stores the segments that the store does not hold; see `BlendEngine.warm`."""
        started = time.perf_counter()
        version = self._adapters.followed
        jobs = self._jobs(anchor, segments)
        missing = [job for job in jobs if not self._keeper.is_held(manifest_of(job, planner, self._name))]
        done = len(jobs) - len(missing)
        if progress is not None:
            progress(done, len(jobs))
        for batch in batches(missing, self._config.capture_batch_tokens):
            for captured in self._compute(batch, planner, version):
                self._keeper.store(captured)
            done += len(batch)
            if progress is not None:
                progress(done, len(jobs))
        self._store.flush()
        tokens = sum(len(job.token_ids) for job in missing)
        return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started)

    def after_request(self, planner: Planner, result: PrefillResult, *, text: bool = True) -> None:
        """After a request: writes its exact blocks as they are, and queues its missed chunks to be computed alone.

        Blocks that the loading controller left out because they are slow to load are promoted to a faster tier,
        since they are in use.

        Args:
            planner: the tenant's.
            result: the request's prefill.
            text: also write the exact blocks of plain text at the prompt's start.
        """
        left_out = result.plan.left_out
        if left_out and self._config.cost_model is not None:
            self._background.submit(left_out, partial(self._store.promote, sorted(left_out)), patient=True)
        if not self._config.capture or self._keeper.is_paused:
            return
        anchor, version = tuple(planner.anchor.segments(result.plan.prompt)), self._adapters.followed
        if not self._is(version) or planner.chain_of(anchor) != result.plan.anchor_name:
            return  # the request was computed with other adapters
        for block in publish(result.plan, result.kv) if text else ():
            self._writer.submit(block)
        for segment in result.plan.missed_chunks():
            job = ChunkJob(anchor, segment.token_ids, segment.label)
            self._background.submit(
                manifest_of(job, planner, "").chunk_id,
                partial(self._capture, planner, job, version),
                patient=len(job) > HOLD_UP_TOKENS,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Waits for the work that `after_request` queued; False if it took longer than `timeout` seconds."""
        done = self._background.flush(timeout)
        return self._writer.flush(timeout) and done

    def close(self) -> None:
        """Ends writing. The background queue is closed by its owner."""
        self._writer.close()

    def _jobs(self, anchor: Sequence[TokenIds], segments: Sequence[Segment]) -> list[ChunkJob]:
        """One job for each distinct chunk, checked against the model's limits."""
        limit = self._survey.max_length
        jobs: dict[bytes, ChunkJob] = {}
        for number, segment in enumerate(segments, 1):
            job, what = ChunkJob(tuple(anchor), segment.token_ids, segment.label), f"chunk {segment.label or number}"
            check_ids(segment.token_ids, self._survey.vocab_size, what)
            if limit is not None and len(job) > limit:
                reason = self._survey.max_length_reason
                raise InvalidInputError(f"{what} has {len(job)} tokens with its anchor, {reason} {limit}; split it")
            jobs.setdefault(segment.token_ids.tobytes(), job)
        return list(jobs.values())

    def _capture(self, planner: Planner, job: ChunkJob, version: int) -> None:
        """Computes and keeps a missed chunk, unless the store has received it since or cannot take chunks now."""
        if self._keeper.is_paused or self._keeper.is_held(manifest_of(job, planner, self._name)):
            return
        for captured in self._compute([job], planner, version):
            self._keeper.keep(captured)

    def _compute(self, jobs: Sequence[ChunkJob], planner: Planner, version: int) -> list[CapturedChunk]:
        """The chunks' KV, with the model as it was when the planner was made.

        Raises:
            InvalidInputError: the model is in training mode, or its adapters have changed.
        """
        check_mode(self._model)
        captured = list(compute_chunks(self._model, jobs, planner, self._name)) if self._is(version) else []
        if not self._is(version):
            raise InvalidInputError(
                "the model's adapters were changed while passages were computed, which are not stored; warm them again"
            )
        return captured

    def _is(self, version: int) -> bool:
        return self._adapters.version() == version
