"""BlendPlan: for every row of a prompt, where its KV comes from and whether it is computed. No tensors of the model.

    prompt   | BOS | system | chunk A     | chunk B | chunk C     | question |
    segment  |  0  |   1    |      2      |    3    |      4      |    5     |
    blocks   | b0  | b1     | b2     | b3 | b4      | b5     | b6 | b7       |
    source   | PREFIX       | LOADED      | MISS    | LOADED|MISS | TEXT     |
    computed | nothing      | selection   | all     | sel.  | all | all      |
             0             prefix_length                                      len(prompt)

Blocks are cut at segment boundaries, so a passage has the same blocks wherever it stands. A chunk's chain starts at
its anchor; the prompt's own chain is the anchor's chain extended, and its leading hits are exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.naming import BlockName, TokenIds, block_name, chain_names, join_ids, root_name, split_blocks
from cacheblend.core.plan.blocks import BlockEntry, BlockSource
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.prompt import Prompt, Segment

RESIDENT = BlockName(b"resident in an engine's own cache")
"""Name of the span that an engine holds itself; no block's name is as long."""


class Source(Enum):
    """Where a row's KV comes from."""

    PREFIX = "prefix"  # stored and exact for this prompt: never computed
    LOADED = "loaded"  # stored for the chunk alone: re-positioned, some rows recomputed
    MISS = "miss"  # a chunk's block that the store does not hold: computed in context
    TEXT = "text"  # plain text: computed


@dataclass(frozen=True)
class Span:
    """One block's rows in the prompt.

    Attributes:
        start: first position; stop: one behind the last.
        source: see `Source`.
        name: the block's name: in the chunk's chain for chunks, in the prompt's chain for text.
        parent: name of the block in front of it in that chain.
        storable: its KV, computed in this prompt, is what its name promises: text in front of the first chunk.
        stored_start: position at which the stored keys were rotated.
        segment: index of the segment it belongs to.
        chunk_offset: place of its first token inside that segment.
        record_start: its first row in the stored block; behind 0 where a run begins inside a block.
        record_tokens: of the stored block, where it is not this span alone; 0: it is.
        tier: where the store would read it from; empty if it is not held.
    """

    start: int
    stop: int
    source: Source
    name: BlockName
    parent: BlockName
    storable: bool
    stored_start: int
    segment: int
    chunk_offset: int
    record_start: int = 0
    record_tokens: int = 0
    tier: str = ""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BlendPlan:
    """What a prefill of one prompt loads and computes.

    Attributes:
        prompt: cut behind the anchor.
        anchor_ids: tokens in front of each chunk in its chain.
        anchor_name: name of that chain.
        spans: all blocks in order, without gaps.
        left_out: stored blocks that are computed all the same, since that is sooner.
    """

    prompt: Prompt
    anchor_ids: TokenIds
    anchor_name: BlockName
    spans: tuple[Span, ...]
    left_out: frozenset[BlockName] = frozenset()

    def __len__(self) -> int:
        return self.spans[-1].stop

    @cached_property
    def prefix_length(self) -> int:
        """Leading rows that are not computed. The last row always is: its logits are the answer's first."""
        stop = 0
        for span in self.spans:
            if span.source is not Source.PREFIX:
                break
            stop = span.stop
        return min(stop, len(self) - 1)

    @property
    def publishable(self) -> list[Span]:
        """Spans that are computed here and may be stored as they come out: only exact KV stands in front of them."""
        return [s for s in self.spans if s.source is Source.TEXT and s.storable and s.name not in self.left_out]

    @cached_property
    def candidate_rows(self) -> npt.NDArray[np.int64]:
        """Positions that a selector may drop, ascending: LOADED rows except the prompt's last."""
        runs = [np.arange(s.start, s.stop) for s in self.spans if s.source is Source.LOADED]
        rows = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
        return rows[rows < len(self) - 1]

    @cached_property
    def chunk_offsets(self) -> npt.NDArray[np.int64]:
        """[len(prompt)] each row's place inside its segment."""
        return np.concatenate([np.arange(s.chunk_offset, s.chunk_offset + len(s)) for s in self.spans])

    @cached_property
    def segment_indices(self) -> npt.NDArray[np.int64]:
        """[len(prompt)] index of the segment that each row belongs to."""
        return np.repeat([s.segment for s in self.spans], [len(s) for s in self.spans]).astype(np.int64)

    @cached_property
    def stored_rows(self) -> npt.NDArray[np.int64]:
        """Positions whose KV the store holds, exact or not, ascending."""
        runs = [np.arange(s.start, s.stop) for s in self.spans if s.source in (Source.PREFIX, Source.LOADED)]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)

    def question_rows(self, limit: int) -> npt.NDArray[np.int64]:
        """Positions that stand for the question, ascending: the suffix.

        Of a longer one its first row (which has seen no word of the question) and its last `limit` - 1. A prompt
        that ends in a chunk has no suffix: its last row stands for it. None of them is a candidate.
        """
        chunks = [s.stop for s in self.spans if self.prompt.segments[s.segment].is_chunk]
        held = self.candidate_rows[-1:].tolist()
        start = min(max([0, *chunks[-1:], *(row + 1 for row in held)]), len(self) - 1)
        suffix = np.arange(start, len(self))
        return suffix if len(suffix) <= limit else np.concatenate([suffix[:1], suffix[len(suffix) - limit + 1 :]])

    def missed_chunks(self) -> list[Segment]:
        """Chunks with a block that the store lacks, each once, in order; not runs of chunks, which are no chunks."""
        missed: dict[BlockName, Segment] = {}
        for span in self.spans:
            segment = self.prompt.segments[span.segment]
            if span.source is Source.MISS and segment.found_in is None and span.name not in self.left_out:
                missed.setdefault(block_name(self.anchor_name, segment.token_ids), segment)
        return list(missed.values())

    def tokens_by_source(self) -> dict[str, int]:
        """Tokens of each source; loaded ones by tier."""
        counts = {"prefix": 0, "memory": 0, "disk": 0, "miss": 0, "text": 0}
        for span in self.spans:
            key = span.tier if span.source is Source.LOADED else span.source.value
            counts[key] = counts.get(key, 0) + len(span)
        return counts

    def hit_tokens(self) -> dict[str, int]:
        """Of `tokens_by_source` what the store has: ``prefix``, and each tier."""
        return {source: count for source, count in self.tokens_by_source().items() if source not in ("miss", "text")}

    def with_resident(self, stop: int) -> "BlendPlan":
        """The plan where an engine holds the first `stop` rows already, and no store is asked: a span `RESIDENT`."""
        held = [span for span in self.spans if span.start < stop]
        first, rest = held[-1], [span for span in self.spans if span.start >= stop]
        resident = replace(
            first, start=0, stop=stop, source=Source.PREFIX, name=RESIDENT, stored_start=0, storable=False
        )
        spans = [replace(resident, chunk_offset=0, record_start=0, tier="")]
        if stop < first.stop:
            moved = stop - first.start
            cut = replace(first, start=stop, stored_start=first.stored_start + moved)
            spans.append(replace(cut, chunk_offset=cut.chunk_offset + moved, record_start=cut.record_start + moved))
        return replace(self, spans=(*spans, *rest))

    def without(self, lost: Iterable[BlockName] | Literal["all"]) -> "BlendPlan":
        """The plan after blocks were lost: their rows are misses, or text.

        A PREFIX span behind a lost one still holds exact KV; it is kept as LOADED with nothing to move.
        """
        gone = {s.name for s in self.spans} if lost == "all" else set(lost)
        spans, in_prefix = [], True
        for span in self.spans:
            if span.name in gone and span.source in (Source.PREFIX, Source.LOADED):
                is_chunk = self.prompt.segments[span.segment].is_chunk
                span = replace(span, source=Source.MISS if is_chunk else Source.TEXT, tier="")
            in_prefix = in_prefix and span.source is Source.PREFIX
            if span.source is Source.PREFIX and not in_prefix:
                span = replace(span, source=Source.LOADED)
            spans.append(span)
        return replace(self, spans=tuple(spans))

    def leaving_out(self, names: frozenset[BlockName]) -> "BlendPlan":
        """The plan that computes these blocks instead of loading them. They are stored: nothing of them was missed."""
        return replace(self.without(names), left_out=names)


AnchorRule = Literal["none", "bos", "system"]


@dataclass(frozen=True)
class Anchor:
    """What stands in front of a chunk when it is computed alone.

    Attributes:
        rule: nothing, the BOS token, or the prompt's plain text in front of its first chunk.
        bos_id: needed by ``bos``.
    """

    rule: AnchorRule = "none"
    bos_id: int | None = None

    def __post_init__(self) -> None:
        if self.rule == "bos" and self.bos_id is None:
            raise InvalidInputError("the anchor 'bos' needs a tokenizer that sets a BOS token; use 'none' or 'system'")

    def segments(self, prompt: Prompt | None) -> list[TokenIds]:
        """The anchor's tokens for chunks of this prompt, segment by segment.

        Raises:
            InvalidInputError: the rule is ``system`` and there is no prompt.
        """
        if self.rule == "system":
            if prompt is None:
                raise InvalidInputError(
                    "the anchor 'system' needs the text in front of the chunks: warm(..., system=...)"
                )
            segments = cut_bos(prompt, self.bos_id).segments
            first_chunk = next((i for i, s in enumerate(segments) if s.is_chunk), len(segments))
            return [segment.token_ids for segment in segments[:first_chunk]]
        return [np.array([self.bos_id], dtype="<u4")] if self.rule == "bos" else []


def cut_bos(prompt: Prompt, bos_id: int | None) -> Prompt:
    """The prompt with a leading BOS token as a segment of its own, so that its chain starts as the anchor's does."""
    first = prompt.segments[0]
    if bos_id is None or first.is_chunk or len(first) == 1 or int(first.token_ids[0]) != bos_id:
        return prompt
    head, rest = replace(first, token_ids=first.token_ids[:1]), replace(first, token_ids=first.token_ids[1:])
    return Prompt((head, rest, *prompt.segments[1:]))


@dataclass(frozen=True)
class Planner:
    """Plans prompts for one model, dtype, codec and tenant.

    Attributes:
        root: of the chunks' chains.
        anchor: of the chunks.
        block_size: tokens of a block at most.
        codec: of the chunks' records.
        exact_root: of the prompt's own chain, whose hits are exact; where chunks are compressed it is another than
            theirs. None: it is the same.
    """

    root: BlockName
    anchor: Anchor = field(default_factory=Anchor)
    block_size: int = 256
    codec: str = "raw"
    exact_root: BlockName | None = None

    @staticmethod
    def of_model(
        fingerprint: str, dtype: str, anchor: Anchor, block_size: int, *, codec: str = "raw", salt: str = ""
    ) -> "Planner":
        """The planner of a model; for the arguments see `root_name`.

        Raises:
            InvalidInputError: an unknown codec.
        """
        exact = root_name(fingerprint, dtype, salt=salt)
        root = exact if codec_of(codec).is_exact else root_name(fingerprint, dtype, codec, salt)
        return Planner(root, anchor, block_size, codec, exact)

    def plan(self, prompt: Prompt, source: BlockSource) -> BlendPlan:
        """Looks every block up once and decides each row's source.

        A hit counts only if the token ids stored with the block are the prompt's own.
        """
        prompt = cut_bos(prompt, self.anchor.bos_id)
        anchor_segments = self.anchor.segments(prompt)
        anchor_name = self.chain_of(anchor_segments)
        anchor_ids = join_ids(anchor_segments)
        blocks = self._blocks(prompt, anchor_name, len(anchor_ids), source)
        wanted = list({name: None for span, _, chain in blocks for name in (chain, span.name)})
        entries = dict(zip(wanted, source.find(wanted), strict=True))

        spans, in_prefix, above = [], True, self._prompts_root
        for span, tokens, chain in blocks:
            in_prefix = in_prefix and _holds(entries[chain], tokens)
            if in_prefix:
                span = replace(span, source=Source.PREFIX, name=chain, parent=above, stored_start=span.start)
                span = replace(span, record_start=0, tier=_tier(entries[chain]))
            elif span.source is Source.MISS:
                entry, is_run = entries[span.name], prompt.segments[span.segment].found_in is not None
                if _holds_run(entry, tokens, span.record_start) if is_run else _holds(entry, tokens):
                    whole = len(entry.token_ids) if entry else 0
                    span = replace(span, source=Source.LOADED, record_tokens=whole, tier=_tier(entry))
            above = chain
            spans.append(span)
        return BlendPlan(prompt, anchor_ids, anchor_name, tuple(spans))

    @property
    def _prompts_root(self) -> BlockName:
        return self.root if self.exact_root is None else self.exact_root

    def chain_of(self, segments: Sequence[TokenIds]) -> BlockName:
        """Name of the chain that consists of these segments."""
        name = self.root
        for tokens in segments:
            name = ([name, *chain_names(name, split_blocks(tokens, self.block_size))])[-1]
        return name

    def _blocks(
        self, prompt: Prompt, anchor_name: BlockName, anchor_length: int, source: BlockSource
    ) -> list[tuple[Span, TokenIds, BlockName]]:
        """Every block as if nothing were stored, its tokens, and its name in the prompt's own chain."""
        first_chunk = next((i for i, s in enumerate(prompt.segments) if s.is_chunk), 0)
        blocks, position, chain = [], 0, self._prompts_root
        for index, segment in enumerate(prompt.segments):
            offset, parent = 0, anchor_name
            for piece in self._pieces(segment, anchor_length, position, source):
                tokens = piece.token_ids
                above, chain = chain, block_name(chain, tokens)
                if piece.name is not None:
                    name = piece.name
                else:  # a chunk right behind its anchor has the same chain either way: no second hash
                    name = chain if not segment.is_chunk or parent == above else block_name(parent, tokens)
                span = Span(
                    start=position,
                    stop=position + len(tokens),
                    source=Source.MISS if segment.is_chunk else Source.TEXT,
                    name=name,
                    parent=parent if segment.is_chunk else above,
                    storable=index < first_chunk,
                    stored_start=piece.stored_start,
                    segment=index,
                    chunk_offset=offset,
                    record_start=piece.record_start,
                )
                blocks.append((span, tokens, chain))
                parent, offset, position = name, offset + len(tokens), position + len(tokens)
        return blocks

    def _pieces(self, segment: Segment, anchor_length: int, position: int, source: BlockSource) -> Iterator["_Piece"]:
        """A segment cut into blocks; a run of a stored chunk where that chunk's blocks end."""
        chunk = segment.found_in
        if chunk is None:
            start = anchor_length if segment.is_chunk else position
            for tokens in split_blocks(segment.token_ids, self.block_size):
                yield _Piece(tokens, start)
                start += len(tokens)
            return
        held = [len(entry.token_ids) for entry in source.find(chunk.block_names) if entry is not None]
        size = max(held, default=self.block_size)  # the last block is the shorter one
        stop = segment.offset + len(segment)
        for number, name in enumerate(chunk.block_names):
            first, last = max(segment.offset, number * size), min(stop, (number + 1) * size)
            if number == len(chunk.block_names) - 1:
                last = stop  # also where nothing is held, and the size a guess
            if first < last:
                stored_start = len(chunk.anchor_ids) + first
                yield _Piece(chunk.token_ids[first:last], stored_start, name, first - number * size)


class _Piece(NamedTuple):
    """A block's part of a segment; `name` where it is known without hashing."""

    token_ids: TokenIds
    stored_start: int
    name: BlockName | None = None
    record_start: int = 0


def _holds(entry: BlockEntry | None, tokens: TokenIds) -> bool:
    return entry is not None and np.array_equal(entry.token_ids, tokens)


def _holds_run(entry: BlockEntry | None, tokens: TokenIds, start: int) -> bool:
    return entry is not None and np.array_equal(entry.token_ids[start : start + len(tokens)], tokens)


def _tier(entry: BlockEntry | None) -> str:
    return entry.tier if entry else ""
