"""The planner: names a prompt's blocks, looks them up, and decides where each row's KV comes from. Looks all blocks up
in one call, and compares token ids before it counts a hit. A second call is made only for a run of a chunk that was
stored with another block size than was guessed."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, TokenIds, block_name, chain_names, join_ids, root_name, split_blocks
from cacheblend.core.plan.blocks import BlockEntry, BlockSource, ChunkManifest
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.plan import BlendPlan, Source, Span
from cacheblend.core.plan.prompt import Prompt, Segment, text


def guessed_size(chunk: ChunkManifest, configured: int) -> int:
    """A block size with which the chunk has its number of blocks: the configured one, if it fits, or a round one."""
    count, tokens = len(chunk.block_names), len(chunk.token_ids)
    if count <= 1 or _fits(configured, count, tokens):
        return configured
    least, most = -(-tokens // count), (tokens - 1) // (count - 1)
    if least > most:
        return configured  # no size fits: the manifest's names and tokens do not belong together
    steps = (1 << power for power in reversed(range(most.bit_length())))
    return next(size for size in (-(-least // step) * step for step in steps) if size <= most)


def held_size(chunk: ChunkManifest, entries: Mapping[BlockName, BlockEntry | None]) -> int | None:
    """The block size with which a chunk was stored, from the entries of its blocks; None if none is held, or it has a
    single block. An entry whose ids are not the chunk's is not believed."""
    count, tokens = len(chunk.block_names), len(chunk.token_ids)
    for number, name in enumerate(chunk.block_names if count > 1 else ()):
        entry = entries.get(name)
        if entry is None:
            continue
        length, is_last = len(entry.token_ids), number == count - 1
        size, rest = divmod(tokens - length, count - 1) if is_last else (length, 0)
        start = number * size
        if rest or not _fits(size, count, tokens):
            continue
        if np.array_equal(entry.token_ids, chunk.token_ids[start : min(start + size, tokens)]):
            return size
    return None


def _fits(size: int, count: int, tokens: int) -> bool:
    return (count - 1) * size < tokens <= count * size


AnchorRule = Literal["none", "bos", "system", "text"]


@dataclass(frozen=True)
class Anchor:
    """The tokens in front of a chunk when it is computed alone. Raises `InvalidInputError`: a rule without the tokens
    that it needs."""

    rule: AnchorRule = "none"  # none, BOS, the prompt's plain text in front of its first chunk, or `front`
    bos_id: int | None = None  # needed by ``bos``
    front: tuple[tuple[int, ...], ...] = ()  # of ``text``: segments that are the same for all prompts

    def __post_init__(self) -> None:
        if self.rule == "bos" and self.bos_id is None:
            raise InvalidInputError("the anchor 'bos' needs a tokenizer that sets a BOS token; use 'none'")
        if self.rule == "text" and not self.front:
            raise InvalidInputError("the anchor 'text' needs a text and the model's tokenizer; use 'none'")

    @property
    def described(self) -> str:
        """As profiles record it: the rule, and which text."""
        digest = hashlib.sha256(repr(self.front).encode()).hexdigest()
        return f"text {digest[:8]}" if self.rule == "text" else self.rule

    def segments(self, prompt: Prompt | None) -> list[TokenIds]:
        """The anchor's tokens for chunks of this prompt, segment by segment. Raises `InvalidInputError`: the rule is
        ``system`` and there is no prompt."""
        if self.rule == "system":
            if prompt is None:
                raise InvalidInputError(
                    "the anchor 'system' needs the text in front of the chunks: warm(..., system=...)"
                )
            return [segment.token_ids for segment in cut_bos(prompt, self.bos_id).in_front]
        if self.rule == "text":
            return [segment.token_ids for segment in cut_bos(Prompt.of(map(text, self.front)), self.bos_id).segments]
        return [np.array([self.bos_id], dtype="<u4")] if self.rule == "bos" else []


def cut_bos(prompt: Prompt, bos_id: int | None) -> Prompt:
    """The prompt with a leading BOS token as a segment of its own, so that its chain starts like the anchor's."""
    segments = _behind_bos(prompt.segments, bos_id)
    front = None if prompt.front is None else _behind_bos(prompt.front, bos_id)
    is_same = segments is prompt.segments and front is prompt.front
    return prompt if is_same else replace(prompt, segments=segments, front=front)


def _behind_bos(segments: tuple[Segment, ...], bos_id: int | None) -> tuple[Segment, ...]:
    if bos_id is None or not segments:
        return segments
    first, *others = segments
    if first.is_chunk or len(first) == 1 or int(first.token_ids[0]) != bos_id:
        return segments
    head, rest = replace(first, token_ids=first.token_ids[:1]), replace(first, token_ids=first.token_ids[1:])
    return (head, rest, *others)


@dataclass(frozen=True)
class Planner:
    """Plans prompts for one model, dtype, codec and tenant."""

    root: BlockName  # of the chunks' chains
    anchor: Anchor = field(default_factory=Anchor)  # of the chunks
    block_size: int = 256  # most tokens of a block
    codec: str = "raw"  # of the chunks' records
    # of the prompt's own chain, whose hits are exact; it differs from `root` where chunks are compressed. None: `root`.
    exact_root: BlockName | None = None
    # leading hits are what the engine would compute. False: its cache rounds what attention reads, so that they are
    # not; they are loaded like any other chunk, and text is computed.
    has_exact_hits: bool = True

    @staticmethod
    def of_model(
        fingerprint: str, dtype: str, anchor: Anchor, block_size: int, *, codec: str = "raw", salt: str = ""
    ) -> "Planner":
        """The planner of a model; for the arguments see `root_name`. Raises `InvalidInputError`: an unknown codec."""
        exact = root_name(fingerprint, dtype, salt=salt)
        root = exact if codec_of(codec).is_exact else root_name(fingerprint, dtype, codec, salt)
        return Planner(root, anchor, block_size, codec, exact)

    def plan(self, prompt: Prompt, source: BlockSource) -> BlendPlan:
        """Looks all blocks up and decides each row's source. A hit counts only if the token ids stored with the block
        equal the prompt's. `source.find` is called once; twice if a run's chunk was stored with another block size than
        its length suggests."""
        prompt = cut_bos(prompt, self.anchor.bos_id)
        anchor_segments = self.anchor.segments(prompt)
        anchor_name = self.chain_of(anchor_segments)
        anchor_ids = join_ids(anchor_segments)
        blocks, entries = self._look_up(prompt, anchor_name, len(anchor_ids), source)

        spans, in_prefix, above = [], self.has_exact_hits, self._prompts_root
        for span, tokens, chain, longer in blocks:
            exact = chain
            if longer is not None and _holds(entries[longer], tokens, 0) and not _holds(entries[chain], tokens):
                exact = longer
            entry = entries[exact]
            in_prefix = in_prefix and (exact == longer or _holds(entry, tokens))
            if in_prefix and entry is not None:
                span = replace(
                    span,
                    source=Source.PREFIX,
                    name=exact,
                    parent=above,
                    stored_start=span.start,
                    record_tokens=len(entry.token_ids),
                    record_start=0,
                    is_raw=True,
                    tier=entry.tier,
                )
            elif span.source is Source.MISS:
                segment, entry = prompt.segments[span.segment], entries[span.name]
                is_run = segment.found_in is not None or segment.whole is not None
                if entry is not None and _holds(entry, tokens, span.record_start if is_run else None):
                    span = replace(
                        span,
                        source=Source.LOADED,
                        record_tokens=len(entry.token_ids),
                        is_raw=segment.is_moved,
                        tier=entry.tier,
                    )
            above = chain
            spans.append(span)
        # of each chunk the name of its last block, whatever the prompt has of it
        chunk_ids = {span.segment: span.name for span, *_ in blocks if prompt.segments[span.segment].is_chunk}
        for index in chunk_ids:
            segment = prompt.segments[index]
            if segment.found_in is not None:
                chunk_ids[index] = segment.found_in.chunk_id
            elif segment.whole is not None:
                *_, chunk_ids[index] = chain_names(anchor_name, split_blocks(segment.whole, self.block_size))
        return BlendPlan(prompt, anchor_ids, anchor_name, tuple(spans), chunk_ids=chunk_ids)

    @property
    def _prompts_root(self) -> BlockName:
        return self.root if self.exact_root is None else self.exact_root

    def chain_of(self, segments: Sequence[TokenIds]) -> BlockName:
        """Name of the last block of a chain of these segments; the root if there are none."""
        name = self.root
        for tokens in segments:
            name = ([name, *chain_names(name, split_blocks(tokens, self.block_size))])[-1]
        return name

    def _look_up(
        self, prompt: Prompt, anchor_name: BlockName, anchor_length: int, source: BlockSource
    ) -> tuple[list["_Placed"], dict[BlockName, BlockEntry | None]]:
        """The prompt's blocks (see `_blocks`), and the entries of all their names."""
        runs = {s.found_in.chunk_id: s.found_in for s in prompt.segments if s.found_in is not None}
        sizes = {chunk_id: guessed_size(chunk, self.block_size) for chunk_id, chunk in runs.items()}
        blocks = self._blocks(prompt, anchor_name, anchor_length, sizes)
        # All blocks of a run's chunk, also those beside the run: any of them tells the block size.
        beside = dict.fromkeys(name for chunk in runs.values() for name in chunk.block_names)
        wanted = list(_names(blocks) | beside)
        entries = dict(zip(wanted, source.find(wanted), strict=True))

        held = {chunk_id: held_size(chunk, entries) or sizes[chunk_id] for chunk_id, chunk in runs.items()}
        if held != sizes:
            blocks = self._blocks(prompt, anchor_name, anchor_length, held)
            missing = [name for name in _names(blocks) if name not in entries]
            entries.update(zip(missing, source.find(missing) if missing else (), strict=True))
        return blocks, entries

    def _blocks(
        self, prompt: Prompt, anchor_name: BlockName, anchor_length: int, sizes: Mapping[BlockName, int]
    ) -> list["_Placed"]:
        """Every block's span as if nothing were stored; `sizes`: block sizes of the runs' chunks, by id."""
        first_chunk = next((i for i, s in enumerate(prompt.segments) if s.is_chunk), 0)
        # names of the blocks of the prompt's front, where that is another one, by the name of the block before them
        front, above = dict[BlockName, BlockName](), self._prompts_root
        for segment in prompt.front or ():
            for name in chain_names(above, split_blocks(segment.token_ids, self.block_size)):
                front[above], above = name, name
        blocks, position, chain = [], 0, self._prompts_root
        for index, segment in enumerate(prompt.segments):
            offset, parent = 0, anchor_name
            for piece in self._pieces(segment, anchor_name, anchor_length, position, sizes):
                tokens = piece.token_ids
                longer = None if segment.is_chunk else front.get(chain)
                above, chain = chain, block_name(chain, tokens)
                longer = None if longer == chain else longer
                if piece.name is not None:
                    name = piece.name
                else:  # directly behind its anchor a chunk has the same name in both chains: no second hash
                    name = chain if not segment.is_chunk or parent == above else block_name(parent, tokens)
                span = Span(
                    start=position,
                    stop=position + len(tokens),
                    source=Source.MISS if segment.is_chunk else Source.TEXT,
                    name=name,
                    parent=parent if segment.is_chunk else above,
                    storable=index < first_chunk and position < prompt.shared_tokens,
                    stored_start=piece.stored_start,
                    segment=index,
                    chunk_offset=offset,
                    record_tokens=piece.record_start + len(tokens),
                    record_start=piece.record_start,
                )
                blocks.append(_Placed(span, tokens, chain, longer))
                parent, offset, position = name, offset + len(tokens), position + len(tokens)
        return blocks

    def _pieces(
        self,
        segment: Segment,
        anchor_name: BlockName,
        anchor_length: int,
        position: int,
        sizes: Mapping[BlockName, int],
    ) -> Iterator["_Piece"]:
        """A segment cut into blocks; a run, or a part, of a chunk is cut where that chunk's blocks end."""
        chunk, whole, stop = segment.found_in, segment.whole, segment.offset + len(segment)
        if chunk is not None:
            size = sizes[chunk.chunk_id]
            for number, name in enumerate(chunk.block_names):
                first, last = max(segment.offset, number * size), min(stop, (number + 1) * size)
                if number == len(chunk.block_names) - 1:
                    last = stop  # also where no size fits
                if first < last:
                    stored_start = len(chunk.anchor_ids) + first
                    yield _Piece(chunk.token_ids[first:last], stored_start, name, first - number * size)
        elif whole is not None:
            start, name = 0, anchor_name
            for tokens in split_blocks(whole, self.block_size):
                name = block_name(name, tokens)
                first, last = max(segment.offset, start), min(stop, start + len(tokens))
                if first < last:
                    yield _Piece(whole[first:last], anchor_length + first, name, first - start)
                start += len(tokens)
        else:
            start = anchor_length if segment.is_chunk else position
            for tokens in split_blocks(segment.token_ids, self.block_size):
                yield _Piece(tokens, start)
                start += len(tokens)


class _Placed(NamedTuple):
    """A block of the prompt: its span, its tokens, its name in the prompt's own chain, and that of a block of the
    prompt's front which begins with these tokens, if it is another one."""

    span: Span
    token_ids: TokenIds
    chain: BlockName
    longer: BlockName | None = None


class _Piece(NamedTuple):
    """A block's part of a segment; `name` where it is known without hashing it."""

    token_ids: TokenIds
    stored_start: int
    name: BlockName | None = None
    record_start: int = 0


def _names(blocks: Sequence[_Placed]) -> dict[BlockName, None]:
    """All names of each block, each once, in order."""
    named = (name for block in blocks for name in (block.chain, block.span.name, block.longer))
    return dict.fromkeys(name for name in named if name is not None)


def _holds(entry: BlockEntry | None, tokens: TokenIds, start: int | None = None) -> bool:
    """Whether these are the tokens of a block; with `start`, those of it from there on."""
    part = slice(None) if start is None else slice(start, start + len(tokens))
    return entry is not None and np.array_equal(entry.token_ids[part], tokens)
