"""The scheduler side: finds a request's chunks, plans it, claims its tokens, and makes jobs for the workers.

    on_new      ids -> prompt -> plan; if blended, its blocks get names that plain requests do not find
    claim       all tokens but the last, if the store holds some beyond those that vLLM has cached
    allocated   -> a job for the workers; missed chunks -> the capture queue
    finished    -> a job that is not complete is dropped

vLLM itself computes the last token, and a request that has nothing to load.
"""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.naming import join_ids
from cacheblend.core.plan.matching import ChunkIndex
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, Segment, run_of, text
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.capture_queue import CaptureQueue
from cacheblend.engines.vllm.chunks import find_chunks
from cacheblend.engines.vllm.config import ConnectorConfig
from cacheblend.engines.vllm.jobs import BlendJob, CaptureJob, StepJobs
from cacheblend.engines.vllm.listing import ChunkListing
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.store import KVStore

MOST_OUTSTANDING = 8
"""Requests that hold blocks while the workers fill them: more would take memory without being faster."""

VERSION = 1
"""Of the KV in blended blocks, part of their names: another version must not find them."""

logger = logging.getLogger("cacheblend.vllm")


@dataclass
class _Known:
    """A request that has chunks.

    Attributes:
        plan: of its prompt without the last token.
        missed: chunks that the store lacks, to be captured after the request.
        is_plain: vLLM computes it, whatever is held; its blocks have plain names, so blended KV must not be written to
            them.
        tried: how often it had been preempted when its prompt was last given to the workers; -1: never given.
    """

    plan: BlendPlan
    missed: list[ChunkJob] = field(default_factory=list)
    is_plain: bool = False
    tried: int = -1

    @property
    def held(self) -> int:
        """Tokens up to and including the last one that the store holds; 0: none."""
        return max((span.stop for span in self.plan.spans if span.source in _HELD), default=0)

    @property
    def is_blended(self) -> bool:
        """Some loaded KV is not exact in this prompt."""
        return any(span.source is Source.LOADED for span in self.plan.spans)

    def reused_share(self, start: int) -> float:
        """The share of the tokens from `start` on that the store holds."""
        held = sum(max(0, span.stop - max(span.start, start)) for span in self.plan.spans if span.source in _HELD)
        return held / max(1, len(self.plan) - start)


_HELD = (Source.PREFIX, Source.LOADED)


class Scheduling:
    """The scheduler side of one engine.

    Args:
        config: the connector's.
        blend: how prompts are blended.
        selector: which loaded rows are recomputed; part of the blended blocks' names.
        planner: plans prompts.
        store: where chunks are found.
        block_size: of the paged cache, in tokens.
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
        self._config, self._blend, self._planner, self._selector = config, blend, planner, selector
        self._store, self._block_size = store, block_size
        described = f"{VERSION} {selector!r} {planner.root.hex()} {planner.anchor!r}"
        self._salt = hashlib.sha256(described.encode()).digest()
        self._index = ChunkIndex(config.min_match_tokens) if config.match_content else None
        self._listing = self._open_listing(config.refresh_s)
        self._known: dict[str, _Known] = {}
        self._outstanding: set[str] = set()
        self._jobs = StepJobs()
        self.counts = Counts()
        self._captures = CaptureQueue(ChunkKeeper(store), planner, blend.capture_queue, self.counts)
        self.pool: Any = None
        """vLLM's block pool; None until the connector is given it."""

    @property
    def is_capturing(self) -> bool:
        """Chunks are being computed for the store, or queued for that."""
        return self._captures.is_busy

    def on_new(self, request: Any) -> None:
        """A request came. Wrong spans, or a store that fails, disable blending for this request only."""
        if not self._is_blendable(request):
            return
        known = self._find(request)
        if known is None:
            return
        cached = compat.cached_tokens(self.pool, request, self._block_size)
        known.is_plain = cached >= known.held or known.reused_share(0) < self._config.min_reused_share
        self._known[request.request_id] = known
        if known.is_blended and not known.is_plain:
            first = next(span.start for span in known.plan.spans if span.source in (Source.LOADED, Source.MISS))
            compat.salt_from(request, first, self._block_size, self._salt)

    def claim(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens after those that vLLM has cached the workers will provide; None: ask again later."""
        known = self._known.get(request.request_id)
        if known is None or known.is_plain or known.tried == request.num_preemptions:
            return 0
        share = known.reused_share(num_computed_tokens)
        if num_computed_tokens >= known.held or share < self._config.min_reused_share:
            return 0  # the rest is plain text or missed: vLLM prefills it itself
        if len(self._outstanding) >= MOST_OUTSTANDING:
            return None
        return len(known.plan) - num_computed_tokens

    def allocated(self, request: Any, block_ids: list[int], claimed: int) -> None:
        """A request got its blocks: for the first time, or after a preemption."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        if claimed:
            known.tried = request.num_preemptions
            self._outstanding.add(request.request_id)
            local = len(known.plan) - claimed
            self._jobs.blend.append(BlendJob(request.request_id, known.plan, self._selector, local, block_ids))
        if known.missed:
            self._captures.add_missed(request, known.missed)
            known.missed = []

    def provided(self, request_ids: Iterable[str]) -> None:
        """The workers have provided these requests' prompts."""
        self._outstanding.difference_update(request_ids)

    def take_jobs(self, *, is_idle: bool = False) -> StepJobs:
        """New jobs since the last call; chunks are captured once their request has its first token."""
        jobs, self._jobs = self._jobs, StepJobs()
        jobs.capture = [CaptureJob(job, self._planner) for job in self._captures.take()]
        jobs.is_idle = is_idle
        return jobs

    def finished(self, request: Any) -> None:
        """A request ended, or was aborted."""
        self._known.pop(request.request_id, None)
        if request.request_id in self._outstanding:
            self._jobs.dropped.append(request.request_id)
        self._captures.end_request(request.request_id)

    def close(self) -> None:
        """Ends the thread that reads the store's list."""
        if self._listing is not None:
            self._listing.close()

    def reported(self, captured: int) -> None:
        """Takes the workers' count of captured chunks, and adds the stored ones to the index."""
        stored = self._captures.finish(captured)
        if self._index is not None and stored:
            self._index.add(stored)

    # ---- inside -----------------------------------------------------------------------------------------

    def _is_blendable(self, request: Any) -> bool:
        """False for a request that vLLM must compute: ids do not determine its KV, or it needs all rows' outputs."""
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

    def _find(self, request: Any) -> _Known | None:
        """The plan of a request with chunks; None where vLLM computes it whole. Raises nothing: an error in one request
        must not end the engine."""
        try:
            if self._listing is not None:
                self._listing.refresh()
            prompt = find_chunks(
                request.prompt_token_ids,
                request.kv_transfer_params,
                chunk_end_token_id=self._config.chunk_end_token_id,
                index=self._index,
            )
            return self._plan(prompt) if prompt.chunks else None
        except InvalidInputError as error:
            self.counts.add_fallback("bad spans")
            logger.warning("request %s is not blended: %s", request.request_id, error)
        except (StoreError, OSError) as error:
            self.counts.add_fallback("store")
            logger.warning("request %s is not blended: %s", request.request_id, error)
        except Exception as error:
            self.counts.add_fallback(type(error).__name__)
            logger.exception("request %s is not blended", request.request_id)
        return None

    def _plan(self, prompt: Prompt) -> _Known:
        whole = self._planner.plan(_without_last(prompt), self._store)
        anchor = tuple(self._planner.anchor.segments(whole.prompt))
        missed = [ChunkJob(anchor, s.token_ids, s.label) for s in prompt.chunks if s.found_in is None]
        if not self._blend.capture:
            missed = []
        return _Known(whole, missed)

    def _open_listing(self, refresh_s: float) -> ChunkListing | None:
        if self._index is None:
            return None
        root, anchor = self._planner.root, join_ids(self._planner.anchor.segments(None)).tolist()
        return ChunkListing(
            self._store, self._index, lambda m: m.root == root and m.anchor_ids.tolist() == anchor, refresh_s
        )


def _without_last(prompt: Prompt) -> Prompt:
    """The prompt without its last token, which vLLM computes; a chunk stays a chunk unless it loses that token."""
    *segments, last = prompt.segments
    if len(last) > 1:
        rest = last.token_ids[:-1]
        segments.append(text(rest) if not last.is_chunk else _shorter(last))
    return Prompt.of(segments)


def _shorter(last: Segment) -> Segment:
    """A chunk at the prompt's end, without its last token: a run of a stored chunk if it was found, else plain text."""
    if last.found_in is not None:
        return run_of(last.found_in, last.offset, len(last) - 1)
    return text(last.token_ids[:-1])
