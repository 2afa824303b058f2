"""Stores chunks: ahead of their use, or behind a request that missed them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.fuse.prefill import Prefill
from cacheblend.core.load.capture import ChunkJob, manifest_of, publish
from cacheblend.core.naming import TokenIds
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Segment, check_ids
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.capture import batches, compute_chunks
from cacheblend.engines.hf.survey import Survey
from cacheblend.store import KVStore, WriteBehind

Progress = Callable[[int, int], None]
PAUSE_S = 60  # behind a store that cannot take a chunk
HOLD_UP_TOKENS = 2048  # a chunk of more is captured in a moment without requests only
logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class WarmReport:
    """What `warm` did.

    Attributes:
        stored: chunks computed and stored.
        held: chunks that the store held already.
        tokens: of the chunks stored.
        seconds: in all.
    """

    stored: int
    held: int
    tokens: int
    seconds: float


class ChunkWarmer:
    """Computes chunks alone behind their anchor and stores them.

    Args:
        model: computes them by its plain forward.
        store: where they go.
        survey: the model's limits.
        config: batch size and whether misses are captured.
        background: runs what is done behind the requests.
        name: of the model, for people.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        survey: Survey,
        config: BlendConfig,
        background: Background,
        name: str,
    ) -> None:
        self._model, self._store, self._survey, self._config = model, store, survey, config
        self._background, self._name = background, name
        self._writer = WriteBehind(store)
        self._resume_at = 0.0

    def warm(
        self,
        planner: Planner,
        anchor: Sequence[TokenIds],
        segments: Sequence[Segment],
        progress: Progress | None = None,
    ) -> WarmReport:
        """Stores the segments that the store does not hold; see `BlendEngine.warm`."""
        started = time.perf_counter()
        jobs = self._jobs(anchor, segments)
        missing = [job for job in jobs if not self._is_held(planner, job)]
        done = len(jobs) - len(missing)
        if progress is not None:
            progress(done, len(jobs))
        for batch in batches(missing, self._config.capture_batch_tokens):
            self._compute(planner, batch)
            done += len(batch)
            if progress is not None:
                progress(done, len(jobs))
        self._store.flush()
        tokens = sum(len(job.token_ids) for job in missing)
        return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started)

    def after_request(self, planner: Planner, result: Prefill, *, text: bool = True) -> None:
        """Behind a request: its exact blocks are written as they are (`text`), its missed chunks computed alone, later.

        What the loading controller left where it lies, since loading it takes long, is brought nearer: it is asked for.
        """
        left_out = result.plan.left_out
        if left_out and self._config.cost_model is not None:
            self._background.submit(left_out, partial(self._store.promote, sorted(left_out)), patient=True)
        if not self._config.capture or time.monotonic() < self._resume_at:
            return
        for block in publish(result.plan, result.kv) if text else ():
            self._writer.submit(block)
        anchor = tuple(planner.anchor.segments(result.plan.prompt))
        for segment in result.plan.missed_chunks():
            job = ChunkJob(anchor, segment.token_ids, segment.label)
            self._background.submit(
                manifest_of(job, planner, "").chunk_id,
                partial(self._capture, planner, job),
                patient=len(job) > HOLD_UP_TOKENS,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Waits for `after_request`'s work; False after `timeout` seconds."""
        done = self._background.flush(timeout)
        return self._writer.flush(timeout) and done

    def close(self) -> None:
        """Ends the writing; the background is its owner's."""
        self._writer.close()

    def _jobs(self, anchor: Sequence[TokenIds], segments: Sequence[Segment]) -> list[ChunkJob]:
        """One job a distinct chunk, checked against the model's limits."""
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

    def _is_held(self, planner: Planner, job: ChunkJob) -> bool:
        manifest = manifest_of(job, planner, self._name)
        held = self._store.find(manifest.block_names)
        return all(entry is not None for entry in held) and self._store.has_manifest(manifest.chunk_id)

    def _capture(self, planner: Planner, job: ChunkJob) -> None:
        """Computes a missed chunk, unless it has come into the store meanwhile."""
        if time.monotonic() < self._resume_at or self._is_held(planner, job):
            return
        try:
            self._compute(planner, [job])
        except StoreError as error:
            # Full or read-only: computing more chunks that cannot be kept would only cost time.
            self._resume_at = time.monotonic() + PAUSE_S
            logger.warning("missed chunks are not captured for %d s: %s", PAUSE_S, error)

    def _compute(self, planner: Planner, jobs: Sequence[ChunkJob]) -> None:
        for captured in compute_chunks(self._model, jobs, planner, self._name):
            for block in captured.blocks:
                self._store.write(block)
            self._store.put_manifest(captured.manifest)
