"""Names of a blended request's blocks in vLLM's own prefix cache, so that no plain request finds blended KV.

    prompt      front | chunk A (missed) | chunk B (loaded) | question
    KV          exact   exact              blended            blended
    names       plain   plain              salted             salted

Everything before the first loaded row is exact and shared with plain requests. In the next turn A may be an exact hit
of the store, or B a miss: what vLLM still holds of the turn before then decides where salting begins.
"""

import hashlib
from typing import Any

from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache
from cacheblend.engines.vllm.jobs import Adapter

VERSION = 2
"""Of the KV in blended blocks, part of their names: another version must not find them."""


def salt_of(planner: Planner, selector: Selector, adapter: Adapter | None = None) -> bytes:
    """What blended KV depends on besides the tokens: settings, model, tenant and LoRA adapter."""
    # While an adapter is replaced, a request may be computed with other weights than its blocks are named by: so those
    # of the same weights, when they come back, have other names.
    again = f" {adapter.generation}" if adapter is not None and adapter.generation else ""
    described = f"{VERSION} {selector!r} {planner.root.hex()} {planner.anchor!r}{again}"
    return hashlib.sha256(described.encode()).digest()


def first_loaded(plan: BlendPlan) -> int:
    """The first position whose KV is not exact in this prompt; `len(plan)` if all of it is."""
    return next((span.start for span in plan.spans if span.source is Source.LOADED), len(plan))


def blended_before(request: Any, plan: BlendPlan, salt: bytes, cache: PrefixCache, block_size: int) -> int | None:
    """Where the salting of an earlier turn began whose blocks vLLM still holds; None: it holds none. Where that is
    beyond the first loaded row, vLLM holds the blocks before it, and only as long as it does may the request be
    blended."""
    loaded = first_loaded(plan)
    cached = cache.tokens(request)
    is_chunk = [segment.is_chunk for segment in plan.prompt.segments]
    starts = {span.start for span in plan.spans if span.chunk_offset == 0 and is_chunk[span.segment]} | {loaded}
    may_begin = [at for at in starts if at <= loaded or at // block_size * block_size <= cached]
    return max((at for at in may_begin if cache.holds_salted(request, at, salt)), default=None)


class ComingBlocks:
    """The blocks that jobs under way will give to vLLM's prefix cache, by name."""

    def __init__(self) -> None:
        self._coming: dict[bytes, str] = {}
        self._names: dict[str, list[bytes]] = {}

    def add(self, request_id: str, names: list[bytes]) -> None:
        """Blocks of a job that begins; those that another job brings already stay that one's."""
        mine = [name for name in names if name not in self._coming]
        self._names[request_id] = mine
        self._coming |= dict.fromkeys(mine, request_id)

    def remove(self, request_id: str) -> None:
        """vLLM has the job's blocks now, or will never get them; no error if there is no such job."""
        for name in self._names.pop(request_id, ()):
            del self._coming[name]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._names

    def leader(self, names: list[bytes], first: int, fewest: int) -> str | None:
        """The job that brings the first missing block of another request, if jobs bring at least `fewest` in a row."""
        if first >= len(names) or names[first] not in self._coming:
            return None
        count = next((n for n, name in enumerate(names[first:]) if name not in self._coming), len(names) - first)
        return self._coming[names[first]] if count >= fewest else None
