"""The scheduler's side: finds a request's chunks, plans it, claims its tokens, and says what the workers are to do.

    on_new      ids -> prompt -> plan; blended: names its blocks away from plain ones; plain: its misses are noted
    claim       all but the last token, where something is loaded behind what vLLM holds itself
    allocated   -> a job for the workers
    finished    -> what is under way is dropped

vLLM computes the last token itself, and everything of a request that has nothing to load.
"""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.naming import BlockName, join_ids
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.matching import ChunkIndex
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, Segment, run_of, text
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.chunks import find_chunks
from cacheblend.engines.vllm.config import ConnectorConfig
from cacheblend.engines.vllm.jobs import BlendJob, StepJobs
from cacheblend.engines.vllm.listing import ChunkListing
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.store import KVStore

MOST_OUTSTANDING = 8
"""Requests whose blocks are taken while the workers still provide others: more would hold memory and gain nothing."""

VERSION = 1
"""Of what blended blocks hold: another one must not find them."""

logger = logging.getLogger("cacheblend.vllm")


@dataclass
class _Known:
    """A request of which something is held, or has chunks to be captured behind it.

    Attributes:
        plan: of all its prompt but the last token.
        missed: chunks that the store lacks.
        is_plain: vLLM computes it, whatever is held; its blocks have plain names, so no blended KV may come into them.
        tried: how often it had been preempted when its prompt was last given to the workers; -1: never.
    """

    plan: BlendPlan
    missed: list[ChunkJob] = field(default_factory=list)
    is_plain: bool = False
    tried: int = -1

    @property
    def held(self) -> int:
        """Tokens up to the last one that the store holds; 0: none."""
        return max((span.stop for span in self.plan.spans if span.source in _HELD), default=0)

    @property
    def is_blended(self) -> bool:
        """Something is loaded that is not exact here."""
        return any(span.source is Source.LOADED for span in self.plan.spans)

    def reused_behind(self, start: int) -> float:
        """Of the tokens from `start` on, the share that the store holds."""
        held = sum(max(0, span.stop - max(span.start, start)) for span in self.plan.spans if span.source in _HELD)
        return held / max(1, len(self.plan) - start)


_HELD = (Source.PREFIX, Source.LOADED)


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
        self._config, self._blend, self._planner = config, blend, planner
        self._store, self._block_size = store, block_size
        described = f"{VERSION} {selector!r} {planner.root.hex()} {planner.anchor!r}"
        self._salt = hashlib.sha256(described.encode()).digest()
        self._index = ChunkIndex(config.min_match_tokens) if config.match_content else None
        self._listing = self._open_listing(config.refresh_s)
        self._known: dict[str, _Known] = {}
        self._outstanding: set[str] = set()
        self._behind: dict[str, tuple[Any, list[ChunkJob]]] = {}
        self._capturing: dict[BlockName, ChunkManifest] = {}
        self._jobs = StepJobs()
        self._sent = self._captured = 0
        self.counts = Counts()
        self.pool: Any = None
        """vLLM's blocks, once they are there."""

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
            if self._listing is not None:
                self._listing.refresh()
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
        except Exception as error:  # a request must not end the engine
            self.counts.add_fallback(type(error).__name__)
            logger.exception("request %s is not blended", request.request_id)
            return
        cached = compat.cached_tokens(self.pool, request, self._block_size)
        known.is_plain = cached >= known.held or known.reused_behind(0) < self._config.min_reused_share
        self._known[request.request_id] = known
        if known.is_blended and not known.is_plain:
            first = next(span.start for span in known.plan.spans if span.source in (Source.LOADED, Source.MISS))
            compat.salt_from(request, first, self._block_size, self._salt)

    def claim(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens behind those that vLLM holds itself that the workers will provide; None: ask again later."""
        known = self._known.get(request.request_id)
        if known is None or known.is_plain or known.tried == request.num_preemptions:
            return 0
        share = known.reused_behind(num_computed_tokens)
        if num_computed_tokens >= known.held or share < self._config.min_reused_share:
            return 0  # what is left is plain text, or missed: vLLM prefills it itself
        if len(self._outstanding) >= MOST_OUTSTANDING:
            return None
        return len(known.plan) - num_computed_tokens

    def allocated(self, request: Any, block_ids: list[int], claimed: int) -> None:
        """A request got its blocks: for the first time, or behind a preemption."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        if claimed:
            known.tried = request.num_preemptions
            self._outstanding.add(request.request_id)
            self._jobs.blend.append(BlendJob(request.request_id, known.plan, len(known.plan) - claimed, block_ids))
        if known.missed:
            self._behind[request.request_id] = (request, known.missed)
            known.missed = []

    def provided(self, request_ids: Iterable[str]) -> None:
        """The workers are done with these requests' prompts."""
        self._outstanding.difference_update(request_ids)

    def take_jobs(self) -> StepJobs:
        """What came together since the last call; chunks of requests that have their first token."""
        for request_id, (request, missed) in list(self._behind.items()):
            if request.num_output_tokens > 0:
                del self._behind[request_id]
                self._capture(missed)
        jobs, self._jobs = self._jobs, StepJobs()
        self._sent += len(jobs.capture)
        return jobs

    def finished(self, request: Any) -> None:
        """A request ended, or was aborted."""
        self._known.pop(request.request_id, None)
        if request.request_id in self._outstanding:
            self._jobs.dropped.append(request.request_id)
        _, missed = self._behind.pop(request.request_id, (None, []))
        self._capture(missed)

    def close(self) -> None:
        """Stops what runs beside it."""
        if self._listing is not None:
            self._listing.close()

    def reported(self, captured: int) -> None:
        """The workers' own count of what they captured."""
        done = list(self._capturing)[: captured - self._captured]  # in the order in which they were sent
        found = [self._capturing.pop(chunk_id) for chunk_id in done]
        self._captured = max(self._captured, captured)
        if self._index is not None and found:
            self._index.add(manifest for manifest in found if self._is_held(manifest))

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
            if manifest.chunk_id in self._capturing or self._is_held(manifest):
                continue
            if len(self._capturing) >= self._blend.capture_queue:
                self.counts.add_fallback("capture queue full")
                continue
            self._capturing[manifest.chunk_id] = manifest
            self._jobs.capture.append(job)

    def _is_held(self, manifest: ChunkManifest) -> bool:
        try:
            held = self._store.find(manifest.block_names)
            return all(entry is not None for entry in held) and self._store.has_manifest(manifest.chunk_id)
        except (StoreError, OSError):
            return True  # nothing can be stored there now

    def _open_listing(self, refresh_s: float) -> ChunkListing | None:
        if self._index is None:
            return None
        root, anchor = self._planner.root, join_ids(self._planner.anchor.segments(None)).tolist()
        return ChunkListing(
            self._store, self._index, lambda m: m.root == root and m.anchor_ids.tolist() == anchor, refresh_s
        )


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
