"""Stores chunks: before their first use (`warm`), or after a request that missed them.

Knows the model's plain forward, the store and the background queue. Does not know requests or engines.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, ModelChangedError
from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.load.capture import CapturedChunk, ChunkJob, manifest_of, publish
from cacheblend.core.naming import TokenIds
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Segment, check_ids
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.capture import batches, compute_chunks
from cacheblend.engines.hf.following import AdapterFollower
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.survey import Survey, check_mode
from cacheblend.engines.keeper import ChunkKeeper, WarmReport
from cacheblend.store import KVStore, WriteBehind

Progress = Callable[[int, int], None]
logger = logging.getLogger("cacheblend.engine")
HOLD_UP_TOKENS = 2048
"""A longer chunk is captured only while there are no requests."""


class ChunkWarmer:
    """Computes chunks alone, each with its anchor in front of it, and stores them.

    Args:
        model: the caller's, whose mode is looked at before anything is computed.
        store: where they go.
        config: batch size and whether misses are captured.
        background: runs the work that is done after requests.
        name: of the model, for people.
        adapters: of the model; KV computed while they change is not stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        config: BlendConfig,
        background: Background,
        name: str,
        adapters: AdapterFollower,
    ) -> None:
        self._model, self._store, self._config = model, store, config
        self._background, self._name, self._adapters = background, name, adapters
        self._writer = WriteBehind(store)
        self._keeper = ChunkKeeper(store)

    def warm(
        self,
        state: ModelState,
        tenant: str,
        anchor: Sequence[TokenIds],
        segments: Sequence[Segment],
        progress: Progress | None = None,
    ) -> WarmReport:
        """Stores the segments that the store does not hold; see `BlendEngine.warm`."""
        started = time.perf_counter()
        planner = state.planner_of(tenant)
        jobs = _jobs(state.survey, anchor, segments)
        missing = [job for job in jobs if not self._keeper.is_held(manifest_of(job, planner, self._name))]
        done = len(jobs) - len(missing)
        if progress is not None:
            progress(done, len(jobs))
        for batch in batches(missing, self._config.capture_batch_tokens):
            for captured in self._compute(batch, state, planner):
                self._keeper.store(captured)
            done += len(batch)
            if progress is not None:
                progress(done, len(jobs))
        self._store.flush()
        tokens = sum(len(job.token_ids) for job in missing)
        return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started)

    def after_request(self, state: ModelState, tenant: str, result: PrefillResult, *, text: bool = True) -> None:
        """After a request: writes its exact blocks as they are, and queues its missed chunks to be computed alone.

        Blocks that the loading controller left out because they are slow to load are promoted to a faster tier,
        since they are in use.

        Args:
            state: of the model, now.
            tenant: the request's.
            result: its prefill.
            text: also write the exact blocks of plain text at the prompt's start.
        """
        left_out = result.plan.left_out
        if left_out and self._config.cost_model is not None:
            self._background.submit(left_out, partial(self._store.promote, sorted(left_out)), patient=True)
        if not self._config.capture or self._keeper.is_paused:
            return
        planner = state.planner_of(tenant)
        anchor = tuple(planner.anchor.segments(result.plan.prompt))
        if not self._is_current(state) or planner.chain_of(anchor) != result.plan.anchor_name:
            return  # the request was computed with other adapters
        for block in publish(result.plan, result.kv) if text else ():
            self._writer.submit(block)
        for segment in result.plan.missed_chunks():
            job = ChunkJob(anchor, segment.token_ids, segment.label)
            self._background.submit(
                manifest_of(job, planner, "").chunk_id,
                partial(self._capture, state, planner, job),
                patient=len(job) > HOLD_UP_TOKENS,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Waits for the work that `after_request` queued; False if it took longer than `timeout` seconds."""
        done = self._background.flush(timeout)
        return self._writer.flush(timeout) and done

    def close(self) -> None:
        """Ends writing. The background queue is closed by its owner."""
        self._writer.close()

    def _capture(self, state: ModelState, planner: Planner, job: ChunkJob) -> None:
        """Computes and keeps a missed chunk, unless the store has received it since or cannot take chunks now."""
        if self._keeper.is_paused or self._keeper.is_held(manifest_of(job, planner, self._name)):
            return
        try:
            captured = self._compute([job], state, planner)
        except ModelChangedError:  # no failure: the request that missed it was one of the other adapters
            logger.info("a missed chunk of %d tokens is not stored: the adapters were switched", len(job.token_ids))
            return
        for each in captured:
            self._keeper.keep(each)

    def _compute(self, jobs: Sequence[ChunkJob], state: ModelState, planner: Planner) -> list[CapturedChunk]:
        """The chunks' KV, with the adapters that the planner names.

        Raises:
            InvalidInputError: the model is in training mode.
            ModelChangedError: its adapters have changed.
        """
        check_mode(self._model)
        captured: list[CapturedChunk] = []
        if self._is_current(state):
            captured += compute_chunks(state.adapted.model, jobs, planner, self._name)
        if not self._is_current(state):  # also weights that were replaced in their place
            raise ModelChangedError(
                "the model's adapters were changed while passages were computed, which are not stored; warm them again"
            )
        return captured

    def _is_current(self, state: ModelState) -> bool:
        return self._adapters.version() == state.adapted.version


def _jobs(survey: Survey, anchor: Sequence[TokenIds], segments: Sequence[Segment]) -> list[ChunkJob]:
    """One job for each distinct chunk, checked against the model's limits."""
    jobs: dict[bytes, ChunkJob] = {}
    for number, segment in enumerate(segments, 1):
        job, what = ChunkJob(tuple(anchor), segment.token_ids, segment.label), f"chunk {segment.label or number}"
        check_ids(segment.token_ids, survey.vocab_size, what)
        if survey.max_length is not None and len(job) > survey.max_length:
            limit = f"{survey.max_length_reason} {survey.max_length}"
            raise InvalidInputError(f"{what} has {len(job)} tokens with its anchor, {limit}; split it")
        jobs.setdefault(segment.token_ids.tobytes(), job)
    return list(jobs.values())
