"""Spans that are cut, at any row: what is loaded of a cut plan is what was loaded of the same rows of the whole plan.

Of any plan (exact fronts, chunks, runs of chunks stored with other block sizes, lost blocks) with any codec. The oracle
decodes each stored block whole, and turns row by row what it says of that row.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import CacheBlendError
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import BlockName, TokenIds, as_token_ids, chain_names, join_ids, split_blocks
from cacheblend.core.plan.blocks import BlockEntry, ChunkManifest, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.codec import CODECS, codec_of
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, Segment, run_of, text
from campaign import share

WIDTH = 8
LAYOUT = KVLayout((LayerShape(2, WIDTH),), torch.float32)
ROTATION = KeyRotation(1e2 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)), "half")
HELD = (Source.PREFIX, Source.LOADED)


class Stored(EmptySource):
    """Blocks with random KV; those of the prompt's own chain are not compressed.

    Args:
        raw, encoded: token ids by name.
        codec: of the latter.
    """

    def __init__(self, raw: dict[BlockName, TokenIds], encoded: dict[BlockName, TokenIds], codec: str) -> None:
        self.tokens = encoded | raw
        kinds = dict.fromkeys(encoded, codec) | dict.fromkeys(raw, "raw")
        self._records = {name: self._made(name, codec_of(kind)) for name, kind in kinds.items()}
        self._kinds = kinds

    def _made(self, name: BlockName, codec) -> torch.Tensor:
        draw = torch.Generator().manual_seed(int.from_bytes(name[:6], "little"))
        return codec.encode(torch.randn(2, 2, len(self.tokens[name]), WIDTH, generator=draw))

    def rows(self, name: BlockName) -> torch.Tensor:
        """[kv_heads, 2, tokens, head_dim] of the whole block."""
        codec = codec_of(self._kinds[name])
        return codec.decode(self._records[name], len(self.tokens[name]), WIDTH, torch.float32)

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [BlockEntry(self.tokens[n], LAYOUT, "memory") if n in self.tokens else None for n in names]

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        return [[self._records[name] for _ in layers] for name in names]


class Case(NamedTuple):
    plan: BlendPlan
    store: Stored
    codec: str
    random: random.Random


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A plan of a front and of runs of a few stored chunks; of their blocks a random part is held."""
    codec, rng = draw(st.sampled_from(list(CODECS))), draw(st.randoms(use_true_random=False))
    anchor = draw(st.sampled_from([Anchor(), Anchor("bos", 1)]))
    planner = Planner.of_model("model", "float32", anchor, rng.choice([1, 5, 16, 90]), codec=codec)
    chunks, sizes, own = list[ChunkManifest](), dict[BlockName, int](), dict[BlockName, TokenIds]()
    for _ in range(rng.randint(1, 3)):
        ids, size = as_token_ids([rng.randrange(9) for _ in range(rng.randint(1, 200))]), rng.choice([3, 16, 80, 90])
        blocks = split_blocks(ids, size)
        above = replace(planner, block_size=size).chain_of(anchor.segments(None))
        names = chain_names(above, blocks)
        if names[-1] not in sizes:
            chunks.append(ChunkManifest(names[-1], planner.root, join_ids(anchor.segments(None)), ids, tuple(names)))
            sizes[names[-1]] = size
            own |= zip(names, blocks, strict=True)
    front = [1] * draw(st.booleans()) + [rng.randrange(9) for _ in range(rng.choice([0, 0, 7, 60]))]
    segments: list[Segment] = [text(front)]
    for _ in range(rng.randint(1, 4)):
        one = rng.choice(chunks)
        offset = rng.randrange(len(one.token_ids)) * rng.randrange(2)
        rest = len(one.token_ids) - offset
        segments += [run_of(one, offset, rng.choice([rest, rng.randint(1, rest)])), text([4] * rng.randrange(3))]
    prompt = Prompt.of([*segments, text([2])])
    anchored = planner.chain_of(anchor.segments(None))
    blocks = planner._blocks(prompt, anchored, len(join_ids(anchor.segments(None))), sizes)
    chain = {name: ids for span, ids, name, _ in blocks[: rng.randint(0, len(blocks))] if not span.record_start}
    raw = {name: ids for name, ids in chain.items() if name not in own}
    kept = {name: ids for name, ids in own.items() if rng.random() < 0.9}
    store = Stored(raw, kept, codec)
    return Case(planner.plan(prompt, store), store, codec, rng)


def rows_of(plan: BlendPlan) -> dict[int, tuple[BlockName, int, int]]:
    """Of each row that is loaded: its block, its place there, and how far its keys move."""
    return {
        span.start + at: (span.name, span.record_start + at, span.start - span.stored_start)
        for span in plan.spans
        if span.source in HELD
        for at in range(len(span))
    }


def cut_somewhere(plan: BlendPlan, rng: random.Random) -> BlendPlan:
    """Every other span in two parts, at any row."""
    parts: list[Span] = []
    for span in plan.spans:
        at = rng.randrange(span.start, span.stop)
        is_cut = at > span.start and rng.random() < 0.5
        parts += [span.part(span.start, at), span.part(at, span.stop)] if is_cut else [span]
    return replace(plan, spans=tuple(parts))


@settings(max_examples=share(150), deadline=None)
@given(cases(), st.data())
def test_what_is_loaded_of_a_cut_plan_is_what_the_whole_one_has(case: Case, data: st.DataObject) -> None:
    plan, rng = case.plan, case.random
    wanted = rows_of(plan)
    if len(plan) > 1 and data.draw(st.booleans(), "without its last row"):
        plan = plan.without_last_row()
    if data.draw(st.booleans(), "some blocks are lost"):
        names = sorted({name for name, _, _ in wanted.values()})
        lost = set(rng.sample(names, len(names) // 3))
        plan, wanted = plan.without(lost), {row: of for row, of in wanted.items() if of[0] not in lost}
    stop = 0
    if len(plan) > 1 and data.draw(st.booleans(), "an engine holds its front"):
        plan = plan.with_resident(stop := rng.randrange(1, len(plan)))
    if data.draw(st.booleans(), "cut anywhere"):
        plan = cut_somewhere(plan, rng)
    held = torch.randn(2, 2, max(stop, 1), WIDTH)
    options = {"codec": case.codec, "resident": (lambda layer: held) if stop else None}
    with LayerLoader(plan, case.store, LAYOUT, [ROTATION], **options) as loader:
        keys, values = loader.layer(0)
    for row in range(len(plan)):
        if row < stop:
            key, value = held[:, :, row].unbind(1)
        elif row in wanted:
            name, at, moved = wanted[row]
            key, value = case.store.rows(name)[:, :, at].unbind(1)
            key = reposition_keys(key[:, None], turn_by(ROTATION, torch.tensor([moved])))[:, 0] if moved else key
        else:
            key = value = torch.zeros(2, WIDTH)
        assert torch.equal(values[:, row], value), row
        torch.testing.assert_close(keys[:, row], key, rtol=0, atol=1e-5)


@settings(max_examples=share(100), deadline=None)
@given(cases(), st.data())
def test_a_part_is_not_stored_under_its_blocks_name(case: Case, data: st.DataObject) -> None:
    plan = cut_somewhere(case.plan, case.random)
    whole = {(span.start, span.stop) for span in case.plan.spans}
    assert all((span.start, span.stop) in whole for span in plan.publishable)
    assert plan.exact_ends(chunks=True).items() <= case.plan.exact_ends(chunks=True).items()
    stop = data.draw(st.integers(1, len(plan)))
    held = plan.with_resident(stop)
    assert held.spans[0].name == RESIDENT and len(held) == len(plan)
    assert [s.start for s in held.spans] == [0, *(s.stop for s in held.spans[:-1])]
    assert held.chunk_offsets[stop:].tolist() == plan.chunk_offsets[stop:].tolist()
    assert held.segment_indices[stop:].tolist() == plan.segment_indices[stop:].tolist()


def test_no_span_has_rows_that_its_block_lacks() -> None:
    span = Span(
        10, 16, Source.LOADED, BlockName(b"n"), BlockName(b"p"), False, 3, 0, 0, record_tokens=8, record_start=2
    )
    part = span.part(12, 15)
    assert (part.start, part.stop, part.stored_start, part.chunk_offset) == (12, 15, 5, 2)
    assert (part.record_start, part.record_tokens, part.is_whole, span.part(10, 16)) == (4, 8, False, span)
    for start, stop in ((9, 12), (12, 17), (12, 12)):
        with pytest.raises(CacheBlendError, match=f"rows {start} to {stop} are not among those from 10 to 16"):
            span.part(start, stop)
    with pytest.raises(CacheBlendError, match=r"rows 10 to 16 of a prompt cannot be rows 3 .* a block of 8 tokens"):
        replace(span, record_start=3)  # a cut by hand
