"""BlendPlan: for every row of a prompt, where its KV comes from and whether it is computed. Knows no tensors.

    prompt   | BOS | system | chunk A     | chunk B | chunk C     | question |
    segment  |  0  |   1    |      2      |    3    |      4      |    5     |
    blocks   | b0  | b1     | b2     | b3 | b4      | b5     | b6 | b7       |
    source   | PREFIX       | LOADED      | MISS    | LOADED|MISS | TEXT     |
    computed | nothing      | selection   | all     | sel.  | all | all      |
             0             prefix_length                                      len(prompt)

Blocks are cut at segment boundaries, so a passage has the same blocks wherever it stands. A chunk's chain starts at
its anchor; the prompt's own chain extends the anchor's chain, and its leading hits are exact. `planner` makes plans.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import CacheBlendError
from cacheblend.core.names import BlockName, TokenIds, block_name
from cacheblend.core.plan.prompt import Prompt, Segment

RESIDENT = BlockName(b"resident in an engine's own cache")
"""Name of the span whose KV an engine already holds; it is longer than any block's name."""


class Source(Enum):
    """Where a row's KV comes from."""

    PREFIX = "prefix"  # stored and exact for this prompt: never computed
    LOADED = "loaded"  # stored, computed for the chunk alone: re-positioned, some rows recomputed
    MISS = "miss"  # a chunk's block that the store does not hold: computed in context
    TEXT = "text"  # plain text: computed


@dataclass(frozen=True)
class Span:
    """Rows of one block in the prompt. `part` cuts it, and nothing else does. Raises `CacheBlendError`: the stored
    block has no such rows: a mistake of whoever made the span, not of a client."""

    # start, stop: first position, and that after the last
    start: int
    stop: int
    source: Source
    name: BlockName  # the block's name: in the chunk's chain for chunks, in the prompt's chain for text
    parent: BlockName  # name of the preceding block in that chain
    storable: bool  # its KV, computed in this prompt, is exact for its name: text in front of the first chunk
    stored_start: int  # position at which the stored keys were rotated
    # segment, chunk_offset: index of the segment it belongs to, and place of its first token inside it
    segment: int
    chunk_offset: int
    record_tokens: int  # tokens of the stored block; of one that is not held, as far as the span shows
    # its first row in the stored block; above 0 where a run, or a part of a span, begins inside it
    record_start: int = 0
    # its record is not compressed, whatever the chunks' codec: it was found in the prompt's own chain
    is_raw: bool = False
    tier: str = ""  # from which the store would read it; empty if it is not held

    def __post_init__(self) -> None:
        if self.record_start < 0 or not 0 < len(self) <= self.record_tokens - self.record_start:
            raise CacheBlendError(
                f"rows {self.start} to {self.stop} of a prompt cannot be rows {self.record_start} and following of a "
                f"block of {self.record_tokens} tokens"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:  # the name of its block then says what its rows are
        return len(self) == self.record_tokens

    def part(self, start: int, stop: int) -> "Span":
        """Its rows from position `start` up to `stop` of the prompt; raises `CacheBlendError` if it lacks some."""
        if not self.start <= start < stop <= self.stop:
            raise CacheBlendError(f"rows {start} to {stop} are not among those from {self.start} to {self.stop}")
        before = start - self.start
        return replace(
            self,
            start=start,
            stop=stop,
            stored_start=self.stored_start + before,
            chunk_offset=self.chunk_offset + before,
            record_start=self.record_start + before,
        )


@dataclass(frozen=True)
class BlendPlan:
    """What a prefill of one prompt loads and computes."""

    prompt: Prompt  # with a leading BOS token as a segment of its own
    anchor_ids: TokenIds  # tokens in front of each chunk in its chain
    anchor_name: BlockName  # name of that chain
    spans: tuple[Span, ...]  # all blocks in order, without gaps
    left_out: frozenset[BlockName] = frozenset()  # stored blocks that are computed nevertheless, because that is faster
    # names under which the chunks are listed, by their segments' indices
    chunk_ids: Mapping[int, BlockName] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.spans[-1].stop

    @cached_property
    def prefix_length(self) -> int:
        """Leading rows that are not computed. The last row always is: its logits give the first token of the answer."""
        stop = 0
        for span in self.spans:
            if span.source is not Source.PREFIX:
                break
            stop = span.stop
        return min(stop, len(self) - 1)

    @property
    def publishable(self) -> list[Span]:
        """Spans that this request computes and may store: all KV in front of them is exact."""
        whole = (s for s in self.spans if s.source is Source.TEXT and s.storable and s.is_whole)
        return [s for s in whole if s.name not in self.left_out]

    @cached_property
    def candidate_rows(self) -> npt.NDArray[np.int64]:
        """Positions that a selector may drop, ascending: LOADED rows except the prompt's last."""
        rows = self._rows_from(Source.LOADED)
        return rows[rows < len(self) - 1]

    @cached_property
    def chunk_offsets(self) -> npt.NDArray[np.int64]:  # [len(prompt)] place of each row inside its segment
        return np.concatenate([np.arange(s.chunk_offset, s.chunk_offset + len(s)) for s in self.spans])

    @cached_property
    def segment_indices(self) -> npt.NDArray[np.int64]:  # [len(prompt)] index of the segment that each row belongs to
        return np.repeat([s.segment for s in self.spans], [len(s) for s in self.spans]).astype(np.int64)

    @cached_property
    def stored_rows(self) -> npt.NDArray[np.int64]:  # positions whose KV the store holds, exact or not, ascending
        return self._rows_from(Source.PREFIX, Source.LOADED)

    def _rows_from(self, *sources: Source) -> npt.NDArray[np.int64]:
        runs = [np.arange(s.start, s.stop) for s in self.spans if s.source in sources]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)

    def question_rows(self, limit: int) -> npt.NDArray[np.int64]:
        """Positions that represent the question, ascending: the suffix. A suffix longer than `limit` is represented by
        its first row (which has seen no word of the question) and its last `limit` - 1. A prompt that ends in a chunk
        has no suffix: its last row is used. None is a candidate."""
        chunks = [s.stop for s in self.spans if self.prompt.segments[s.segment].is_chunk]
        held = self.candidate_rows[-1:].tolist()
        start = min(max([0, *chunks[-1:], *(row + 1 for row in held)]), len(self) - 1)
        suffix = np.arange(start, len(self))
        return suffix if len(suffix) <= limit else np.concatenate([suffix[:1], suffix[len(suffix) - limit + 1 :]])

    def missed_chunks(self) -> list[Segment]:
        """Chunks with a block that the store does not hold, each once, in order, whole; runs of chunks do not count."""
        missed: dict[BlockName, Segment] = {}
        for span in self.spans:
            segment = self.prompt.segments[span.segment]
            if span.source is Source.MISS and segment.found_in is None and span.name not in self.left_out:
                whole = replace(segment, token_ids=segment.stored_ids, whole=None, offset=0)
                missed.setdefault(block_name(self.anchor_name, whole.token_ids), whole)
        return list(missed.values())

    def held_chunks(self) -> dict[BlockName, bool]:
        """Whether the store holds all that the prompt has of a chunk, by the names under which chunks are listed. Not
        of chunks that are held as part of an exact prefix: the store was not asked for their own blocks."""
        exact = {span.segment for span in self.spans if span.source is Source.PREFIX and span.name != RESIDENT}
        held: dict[BlockName, bool] = {}
        for span in self.spans:
            name = self.chunk_ids.get(span.segment)
            if name is not None and span.name != RESIDENT and span.segment not in exact:
                held[name] = held.get(name, True) and (span.source is not Source.MISS or span.name in self.left_out)
        return held

    @property
    def is_moved(self) -> bool:
        """Something is loaded that is not exact, all of it runs of an edited history."""
        loaded = {span.segment for span in self.spans if span.source is Source.LOADED}
        return bool(loaded) and all(self.prompt.segments[index].is_moved for index in loaded)

    def tokens_by_source(self) -> dict[str, int]:
        """Tokens of each source; LOADED tokens by tier, or as moved."""
        counts = {"prefix": 0, "memory": 0, "disk": 0, "miss": 0, "text": 0}
        for span in self.spans:
            key = span.tier if span.source is Source.LOADED else span.source.value
            if span.source is Source.LOADED and self.prompt.segments[span.segment].is_moved:
                key = "moved"
            counts[key] = counts.get(key, 0) + len(span)
        return counts

    def hit_tokens(self) -> dict[str, int]:
        """The part of that which the store holds: ``prefix``, and each tier."""
        return {source: count for source, count in self.tokens_by_source().items() if source not in ("miss", "text")}

    def with_resident(self, stop: int) -> "BlendPlan":
        """The plan if the engine already holds the first `stop` rows: a span `RESIDENT` that is read from no store."""
        last = next(span for span in self.spans if span.stop >= stop)
        resident = Span(0, stop, Source.PREFIX, RESIDENT, RESIDENT, False, 0, last.segment, 0, record_tokens=stop)
        rest = (span.part(max(stop, span.start), span.stop) for span in self.spans if span.stop > stop)
        return replace(self, spans=(resident, *rest))

    def without(self, lost: Iterable[BlockName] | Literal["all"]) -> "BlendPlan":
        """The plan after blocks were lost: their rows are misses, or text. A PREFIX span after a lost one still has
        exact KV; it is kept as LOADED with keys that need not move."""
        gone = self._lost(lost)
        spans, in_prefix = [], True
        for span in self.spans:
            if span.name in gone and span.source in (Source.PREFIX, Source.LOADED):
                span = self._computed(span)
            in_prefix = in_prefix and span.source is Source.PREFIX
            if span.source is Source.PREFIX and not in_prefix:
                span = replace(span, source=Source.LOADED)
            spans.append(span)
        return replace(self, spans=tuple(spans))

    def _lost(self, names: Iterable[BlockName] | Literal["all"]) -> frozenset[BlockName]:
        """`names`, or all but what the engine holds itself."""
        return frozenset((s.name for s in self.spans if s.name != RESIDENT) if names == "all" else names)

    def exact_only(self) -> "BlendPlan":
        """The plan that loads nothing but the exact prefix; what it computes instead does not count as missed."""
        left_out = {s.name for s in self.spans if s.source is Source.LOADED}
        spans = (replace(s, source=Source.MISS, tier="") if s.source is Source.LOADED else s for s in self.spans)
        return replace(self, spans=tuple(spans), left_out=self.left_out | left_out)

    def resumed_at(self, stop: int, *, loads: bool) -> "BlendPlan":
        """The plan for recurrent layers whose states are known at `stop`, the end of a block of the exact prefix, or 0:
        every row behind it is computed. `loads`: chunks behind it are loaded nevertheless, for layers that follow the
        last recurrent one."""
        spans, left_out = [], set[BlockName]()
        for span in self.spans:
            if span.start >= stop and (span.source is Source.PREFIX or (span.source is Source.LOADED and not loads)):
                left_out.add(span.name)
                span = self._computed(span)
            spans.append(span)
        return replace(self, spans=tuple(spans), left_out=self.left_out | left_out)

    def _computed(self, span: Span) -> Span:
        """A stored span that is computed instead. Text that begins a longer block has a name of its own again."""
        if self.prompt.segments[span.segment].is_chunk:
            return replace(span, source=Source.MISS, tier="")
        if span.record_start == 0 and not span.is_whole:
            name = block_name(span.parent, self.prompt.token_ids[span.start : span.stop])
            span = replace(span, name=name, record_tokens=len(span))
        return replace(span, source=Source.TEXT, tier="")

    def exact_ends(self, *, chunks: bool) -> dict[int, BlockName]:
        """Ends of the leading blocks that a store keeps, and whose rows have nothing but their own chain in front of
        them: position to name. `chunks`: also those of a chunk behind its anchor."""
        ends, above = dict[int, BlockName](), None
        for span in self.spans:
            segment = self.prompt.segments[span.segment]
            is_whole_chunk = segment.is_chunk and segment.found_in is None and segment.whole is None
            if not span.is_whole or not (span.storable or (chunks and is_whole_chunk)):
                break
            if above is not None and span.parent != above:
                break
            ends[span.stop] = above = span.name
        return ends

    def without_last_row(self) -> "BlendPlan":
        """The plan of the prompt without its last token, which an engine computes itself; at least two tokens."""
        *spans, last = self.spans
        if len(last) > 1:
            spans.append(last.part(last.start, last.stop - 1))
        *segments, end = self.prompt.segments
        if len(end) > 1:
            whole = end.stored_ids if end.is_chunk and end.found_in is None else None  # it is stored as it was
            segments.append(replace(end, token_ids=end.token_ids[:-1], whole=whole))
        return replace(self, prompt=replace(self.prompt, segments=tuple(segments)), spans=tuple(spans))

    def leaving_out(self, names: Iterable[BlockName] | Literal["all"]) -> "BlendPlan":
        """The plan that computes these stored blocks instead of loading them; they do not count as missed."""
        gone = self._lost(names)
        return replace(self.without(gone), left_out=self.left_out | gone)
