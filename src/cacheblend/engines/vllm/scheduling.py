"""The scheduler's side: finds a request's chunks, plans it, claims its tokens, and says what the workers are to do.

    on_new      ids -> prompt -> plan; blended: names its blocks away from plain ones; plain: its misses are noted
    claim       all but the last token, where something is loaded behind what vLLM holds itself
    allocated   -> a job for the workers
    finished    -> what is under way is dropped

vLLM computes the last token itself, and everything of a request that has nothing to load.
"""

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.capture import ChunkJob, manifest_of
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.matching import ChunkIndex
from cacheblend.core.naming import BlockName, join_ids
from cacheblend.core.plan import BlendPlan, Planner, Source
from cacheblend.core.prompt import Prompt, Segment, run_of, text
from cacheblend.core.selection import Selector
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.chunks import find_chunks
from cacheblend.engines.vllm.config import ConnectorConfig
from cacheblend.engines.vllm.jobs import BlendJob, StepJobs
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.store import KVStore

VERSION = 1
"""Of what blended blocks hold: another one must not find them."""

logger = logging.getLogger("cacheblend.vllm")


@dataclass
class _Known:
    """A request that is blended, or has chunks to be captured behind it.

    Attributes:
        plan: of all its prompt but the last token.
        missed: chunks that the store lacks.
    """

    plan: BlendPlan
    missed: list[ChunkJob] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Tokens up to the last one that the store holds; 0: none."""
        return max((span.stop for span in self.plan.spans if span.source in (Source.PREFIX, Source.LOADED)), default=0)

    @property
    def is_blended(self) -> bool:
        """Something is loaded that is not exact here."""
        return any(span.source is Source.LOADED for span in self.plan.spans)


class Scheduling:
    """One engine's.

    Args:
        config: the connector's.
        blend: how prompts are blended.
        selector: which loaded rows are recomputed; part of the blended blocks' names.
        planner: plans prompts.
        store: where chunks lie.
        block_size: of the paged cache.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        blend: BlendConfig,
        selector: Selector,
        planner: Planner,
        store: KVStore,
        block_size: int,
    ) -> None:
        self._config, self._blend, self._planner, self._store, self._block_size = (
            config,
            blend,
            planner,
            store,
            block_size,
        )
        described = f"{VERSION} {selector!r} {planner.root.hex()} {planner.anchor!r}"
        self._salt = hashlib.sha256(described.encode()).digest()
        self._index = ChunkIndex(config.min_match_tokens) if config.match_content else None
        self._refreshed = float("-inf")
        self._known: dict[str, _Known] = {}
        self._capturing: dict[BlockName, None] = {}
        self._jobs = StepJobs()
        self._sent = self._captured = 0
        self.counts = Counts()

    @property
    def is_capturing(self) -> bool:
        """Chunks are being computed for the store."""
        return self._sent > self._captured or bool(self._jobs.capture)

    def on_new(self, request: Any) -> None:
        """A request came. What is wrong with what it says of its chunks costs it the blending, not the answer."""
        if not self._is_blendable(request):
            return
        ids = request.prompt_token_ids
        try:
            self._refresh()
            prompt = find_chunks(
                ids,
                request.kv_transfer_params,
                chunk_end_token_id=self._config.chunk_end_token_id,
                index=self._index,
            )
            if not prompt.chunks:
                return
            known = self._plan(prompt)
        except InvalidInputError as error:
            self.counts.add_fallback("bad spans")
            logger.warning("request %s is not blended: %s", request.request_id, error)
            return
        except (StoreError, OSError) as error:
            self.counts.add_fallback("store")
            logger.warning("request %s is not blended: %s", request.request_id, error)
            return
        self._known[request.request_id] = known
        if known.is_blended:
            first = next(span.start for span in known.plan.spans if span.source in (Source.LOADED, Source.MISS))
            compat.salt_from(request, first, self._block_size, self._salt)

    def claim(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens behind those that vLLM holds itself that the workers will provide."""
        known = self._known.get(request.request_id)
        if known is None or num_computed_tokens >= known.held:
            return 0  # what is left is plain text, or missed, and vLLM prefills it itself
        return len(known.plan) - num_computed_tokens

    def allocated(self, request: Any, block_ids: list[int], claimed: int) -> None:
        """A request got its blocks: for the first time, or behind a preemption."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        if claimed:
            self._jobs.blend.append(BlendJob(request.request_id, known.plan, len(known.plan) - claimed, block_ids))
        self._capture(known.missed)
        known.missed = []

    def take_jobs(self) -> StepJobs:
        """What came together since the last call."""
        jobs, self._jobs = self._jobs, StepJobs()
        self._sent += len(jobs.capture)
        return jobs

    def finished(self, request: Any) -> None:
        """A request ended, or was aborted."""
        known = self._known.pop(request.request_id, None)
        if known is not None and known.held:
            self._jobs.dropped.append(request.request_id)

    def reported(self, captured: int) -> None:
        """The workers' own count of what they captured."""
        if captured > self._captured:
            self._captured = captured
            self._refreshed = float("-inf")  # new chunks can be found
        if not self.is_capturing:
            self._capturing.clear()

    # ---- inside -----------------------------------------------------------------------------------------

    def _is_blendable(self, request: Any) -> bool:
        """What cannot be is left to vLLM: its ids do not say what its KV is, or every row's output is wanted."""
        sampling = request.sampling_params
        return bool(
            request.prompt_token_ids
            and len(request.prompt_token_ids) > 1
            and sampling is not None
            and sampling.prompt_logprobs is None
            and not getattr(request, "mm_features", None)
            and getattr(request, "prompt_embeds", None) is None
            and request.lora_request is None
            and not getattr(request, "skip_reading_prefix_cache", False)
        )

    def _plan(self, prompt: Prompt) -> _Known:
        whole = self._planner.plan(_without_last(prompt), self._store)
        anchor = tuple(self._planner.anchor.segments(whole.prompt))
        missed = [ChunkJob(anchor, s.token_ids, s.label) for s in prompt.chunks if s.found_in is None]
        if not self._blend.capture:
            missed = []
        return _Known(whole, missed)

    def _capture(self, jobs: list[ChunkJob]) -> None:
        """Chunks that are neither held nor under way, as many as may wait."""
        for job in jobs:
            manifest = manifest_of(job, self._planner, "")
            if manifest.chunk_id in self._capturing or self._is_held(manifest.chunk_id, manifest.block_names):
                continue
            if len(self._capturing) >= self._blend.capture_queue:
                self.counts.add_fallback("capture queue full")
                continue
            self._capturing[manifest.chunk_id] = None
            self._jobs.capture.append(job)

    def _is_held(self, chunk_id: BlockName, names: tuple[BlockName, ...]) -> bool:
        return all(entry is not None for entry in self._store.find(names)) and self._store.has_manifest(chunk_id)

    def _refresh(self) -> None:
        """The index as the store stands: others may write to it."""
        if self._index is None or time.monotonic() - self._refreshed < self._config.refresh_s:
            return
        self._refreshed = time.monotonic()
        anchor = join_ids(self._planner.anchor.segments(None)).tolist()
        listed = [m for m in self._store.manifests() if m.root == self._planner.root]
        held = {m.chunk_id: m for m in listed if m.anchor_ids.tolist() == anchor}
        self._index.remove([chunk_id for chunk_id in self._index.chunk_ids if chunk_id not in held])
        self._index.add(held.values())


def _without_last(prompt: Prompt) -> Prompt:
    """The prompt but for its last token, which vLLM computes; chunks stay whole where they can."""
    *segments, last = prompt.segments
    if len(last) > 1:
        rest = last.token_ids[:-1]
        segments.append(text(rest) if not last.is_chunk else _shorter(last))
    return Prompt.of(segments)


def _shorter(last: Segment) -> Segment:
    """A chunk that ends the prompt, without its last token: a run of it where it was found, else plain text."""
    if last.found_in is not None:
        return run_of(last.found_in, last.offset, len(last) - 1)
    return text(last.token_ids[:-1])
