"""One request as the scheduler side follows it: what was found, what became of it, and what its client is told."""

import hashlib
import math
import time
from bisect import bisect_right
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from cacheblend.core.load.threads import PoolCall
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache
from cacheblend.engines.vllm.jobs import Adapter, BlendOutcome, CaptureJob
from cacheblend.engines.vllm.reasons import RESET
from cacheblend.engines.vllm.scheduler.options import KEY, RequestOptions

QUEUED = 5  # times its own time that a look-up may wait for a thread
VERSION = 2  # of the KV in blended blocks, part of their names: another version must not find them


def salt_of(
    planner: Planner, selector: Selector, adapter: Adapter | None = None, conversation: str | None = None
) -> bytes:
    """What blended KV depends on besides the tokens: settings, model, tenant, LoRA adapter, and the conversation that
    runs were moved from."""
    # While an adapter is replaced, a request may be computed with other weights than its blocks are named by: so those
    # of the same weights, when they come back, have other names.
    again = f" {adapter.generation}" if adapter is not None and adapter.generation else ""
    whose = "" if conversation is None else f" of {conversation!r}"
    described = f"{VERSION} {selector!r} {planner.root.hex()} {planner.anchor!r}{again}{whose}"
    return hashlib.sha256(described.encode()).digest()


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


NOTHING_STORED = "nothing stored"
LITTLE_STORED = "below min_reused_share"
HELD_BY_VLLM = "prefix cache has it"
SHARED = "prefix cache has it, blended"
BEYOND_WINDOW = "beyond the sliding window"
OTHER_CONNECTOR = "another connector has it"
FULL_RECOMPUTE = "full recompute"
SLOWER_TO_LOAD = "slower to load than to compute"
NO_ROOM = "no room in the cache"

_HELD = (Source.PREFIX, Source.LOADED)


@dataclass(frozen=True, eq=False)
class FoundChunks:
    """What a look-up found."""

    plan: BlendPlan  # of the prompt without its last token
    selector: Selector
    salt: bytes
    named_by: Selector  # in the salt; blocks of these names may have been recomputed more, not less
    missed: list[CaptureJob] = field(default_factory=list)
    missed_at: float = 0.0  # when the store was asked, by `time.monotonic`
    is_slow: bool = False  # something is stored, and loading any of it takes longer than computing it
    is_full: bool = False  # the floor of the shadow check has all computed that is not exact, and something is stored
    load_s: float | None = None
    missed_tokens: int = 0
    near_miss_tokens: int = 0

    @cached_property
    def held(self) -> int:
        """Tokens up to and including the last one that is loaded; 0: none."""
        return max((stop for _, stop in self._held_spans), default=0)

    @cached_property
    def first_loaded(self) -> int:
        """The first position whose KV is not exact in this prompt; the prompt's end if all of it is."""
        return next((span.start for span in self.plan.spans if span.source is Source.LOADED), len(self.plan))

    @property
    def is_blended(self) -> bool:
        return self.first_loaded < len(self.plan)

    def blended_before(self, request: Any, cache: PrefixCache) -> int | None:
        """Where the salting of an earlier turn began whose blocks vLLM still holds; None: it holds none. Where that is
        beyond the first loaded row, vLLM holds the blocks before it, and only as long as it does may the request be
        blended."""
        size, cached, segments = cache.block_size, cache.tokens(request), self.plan.prompt.segments
        starts = {span.start for span in self.plan.spans if span.chunk_offset == 0 and segments[span.segment].is_chunk}
        may_begin = [at for at in starts if at <= self.first_loaded or at // size * size <= cached]
        held = (at for at in (*may_begin, self.first_loaded) if cache.holds_salted(request, at, self.salt))
        return max(held, default=None)

    def reused_share(self, start: int) -> float:
        """The share of the tokens from `start` on that the store holds."""
        at = bisect_right(self._held_spans, start, key=lambda span: span[1])
        cut = max(0, start - self._held_spans[at][0]) if at < len(self._held_spans) else 0
        return (self._held_from[at] - cut) / max(1, len(self.plan) - start)

    @cached_property
    def _held_spans(self) -> list[tuple[int, int]]:
        return [(span.start, span.stop) for span in self.plan.spans if span.source in _HELD]

    @cached_property
    def _held_from(self) -> list[int]:
        """Tokens of the held spans from each one on, and 0: asked for in every engine step that a request waits."""
        lengths = [stop - start for start, stop in reversed(self._held_spans)]
        return [*reversed(list(accumulate(lengths))), 0]


@dataclass(eq=False)
class Answers:
    """Of one engine's look-ups: when one was answered in time, the latest."""

    at: float = -math.inf


@dataclass(eq=False)
class LookUp:
    """A look-up in the store, in a thread: no engine step that computes waits for it. It has `timeout_s` from when the
    thread took it up. While none does, from when another one was answered, but no more than `QUEUED` times as long:
    many requests that come at once are no slow store."""

    timeout_s: float
    answers: Answers
    asked: float = field(default_factory=time.monotonic)  # when it was asked for
    began: float = math.inf  # when a thread took it up, which notes it
    future: PoolCall[FoundChunks | None] = field(init=False)

    @property
    def deadline(self) -> float:
        queued = min(max(self.asked, self.answers.at), self.asked + (QUEUED - 1) * self.timeout_s)
        return (queued if math.isinf(self.began) else self.began) + self.timeout_s

    @property
    def is_over(self) -> bool:
        """It has ended, or nobody waits for it any more."""
        return self.future.done() or time.monotonic() >= self.deadline

    def wait(self, seconds: float) -> None:
        """Returns when it has ended, or so many seconds after it was asked for."""
        wait([self.future], max(0.0, self.asked + seconds - time.monotonic()))

    def result(self) -> FoundChunks | None:
        """Raises TimeoutError: it did not end in time, and is dropped; or what the look-up raised."""
        self.future.drop()
        try:
            return self.future.result(timeout=0)
        except CancelledError:
            raise TimeoutError from None


@dataclass(eq=False)
class Tracked:
    """A request from its arrival to its end."""

    request: Any
    floor_step: int  # of the shadow check, when the request came
    options: RequestOptions = field(default_factory=RequestOptions)
    adapter: Adapter | None = None  # that its chunks are named by, once the workers have looked at it
    lookup: LookUp | None = None  # under way
    found: FoundChunks | None = None
    missed: tuple[list[CaptureJob], float] | None = None  # to be captured; and when the store was asked for them
    reason: str = ""  # why vLLM computes the request, one of few; empty: it does not, or this is not known yet
    detail: str = ""
    plain_tokens: int | None = None  # leading ones whose blocks have plain names; None: all
    waits_for: str | None = None  # the request whose blocks it will share
    missed_tokens: int = 0  # of chunks that are not stored
    near_miss_tokens: int = 0  # of those that are stored with another beginning or end
    tried: int = -1  # how often it had been preempted when its prompt was last given to the workers; -1: never given
    held_by_vllm: int = 0  # leading tokens that vLLM's prefix cache held when it was scheduled
    outcome: BlendOutcome | None = None
    block_ids: list[list[int]] = field(default_factory=list)
    is_older: bool = False  # than a reset: its blocks may be of the weights before
    is_asked: bool = False  # whether its answer is compared has been decided
    token_ids: TokenIds | None = None  # of its prompt, up to the first image; None: it is vLLM's alone
    tenant: str = field(init=False)  # what figures call it, since everyone may read them; empty: it has none
    cache_salt: str | None = field(init=False)  # of its tenant, when it came

    def __post_init__(self) -> None:
        salt = getattr(self.request, "cache_salt", None)  # it may change: `prefix_cache.salt_from`
        self.cache_salt = salt
        self.tenant = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:8] if salt else ""

    @property
    def waits_for_adapter(self) -> bool:
        """Its look-up begins when the workers have looked at its adapter."""
        return self.request.lora_request is not None and self.adapter is None and not self.reason

    def leave(self, reason: str, detail: str = "") -> None:
        """vLLM computes the request, for this reason; its blocks keep the names that they have."""
        self.drop_lookup()
        self.lookup = self.found = self.waits_for = None
        self.reason, self.detail = reason, detail

    def drop_lookup(self) -> None:
        if self.lookup is not None:
            self.lookup.future.drop()

    def forget(self) -> None:
        self.drop_lookup()
        if self.lookup is not None or (self.found is not None and self.tried < 0 and self.reason != SHARED):
            self.reason = RESET
        self.is_older = True
        self.lookup = self.found = self.waits_for = self.missed = None

    def answer(self) -> dict[str, Any]:
        done = self.outcome if self.outcome is not None and not self.outcome.failure else None
        shared = done is None and self.reason == SHARED
        chosen = None  # the rows to recompute
        if self.found is not None and done is not None:
            chosen = self.found.selector if self.found.is_blended else None
        elif self.found is not None and shared:
            chosen = self.found.named_by
        return {
            KEY: {
                "blended": done is not None or shared,
                "reason": f"{self.why_not}: {self.detail}" if self.detail else self.why_not,
                "hit_tokens": dict(done.hit_tokens) if done else ({"vllm": self.held_by_vllm} if shared else {}),
                "selector": chosen.name if chosen else "",
                "recompute_ratio": chosen.share if chosen else None,
                "recomputed_tokens": done.recomputed_tokens if done else 0,
                "missed_tokens": self.missed_tokens,
                "near_miss_tokens": self.near_miss_tokens,
                "row_layers": done.row_layers if done else 0,
                "prefill_share": round(done.prefill_share, 4) if done else 0.0,
            }
        }

    @property
    def why_not(self) -> str:
        if self.outcome is not None:
            return self.outcome.failure
        return self.reason or ("ended before its look-up" if self.lookup else "ended before it was provided")
