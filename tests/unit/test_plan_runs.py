"""Plans of prompts with runs of stored chunks: one look-up for any prompt, the same plan as with a look-up a run;
cut at any row, what is loaded is what was loaded of the same rows of the whole plan; and passages in another order
share all that is equal, whichever token the tokenizer puts at an edge.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizers_for_tests as tokenizers
from cacheblend.core.errors import CacheBlendError
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import (
    BlockName,
    TokenIds,
    as_token_ids,
    block_name,
    chain_names,
    join_ids,
    root_name,
    split_blocks,
)
from cacheblend.core.plan.blocks import BlockEntry, BlockSource, ChunkManifest, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.codec import CODECS, codec_of
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span
from cacheblend.core.plan.planner import Anchor, Planner, guessed_size, held_size
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, run_of, text
from cacheblend.engines.tokens import Passage, PromptBuilder
from campaign import share

ROOT = root_name("model", "float32")
LAYOUT = KVLayout((LayerShape(1, 2),), torch.float32)
HELD = (Source.PREFIX, Source.LOADED)


class CountingSource(EmptySource):
    """Holds names with token ids, and counts the calls."""

    def __init__(self, held: dict[BlockName, TokenIds]) -> None:
        self.held, self.finds = held, 0

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        assert len(set(names)) == len(names), "a name is asked for twice"
        self.finds += 1
        return [BlockEntry(self.held[n], LAYOUT, "memory") if n in self.held else None for n in names]


class SlowPlanner(Planner):
    """Asks for each run's block size first: the longest block of its chunk that is held."""

    def _look_up(self, prompt: Prompt, anchor_name: BlockName, anchor_length: int, source: BlockSource):  # type: ignore[no-untyped-def]
        sizes = {}
        for segment in prompt.segments:
            if (found_in := segment.found_in) is not None:
                lengths = [len(e.token_ids) for e in source.find(found_in.block_names) if e is not None]
                sizes[found_in.chunk_id] = max(lengths, default=self.block_size)
        blocks = self._blocks(prompt, anchor_name, anchor_length, sizes)
        wanted = list(dict.fromkeys(name for span, _, chain, _ in blocks for name in (chain, span.name)))
        return blocks, dict(zip(wanted, source.find(wanted), strict=True))


@dataclass(frozen=True)
class Case:
    planner: Planner
    prompt: Prompt
    held: dict[BlockName, TokenIds]
    sizes: dict[BlockName, int]  # with which the chunks were stored

    def blocks_of(self, manifest: ChunkManifest) -> list[TokenIds]:
        return split_blocks(manifest.token_ids, self.sizes[manifest.chunk_id])

    @property
    def runs(self) -> list[ChunkManifest]:
        return [segment.found_in for segment in self.prompt.segments if segment.found_in is not None]

    def shows_its_size(self, manifest: ChunkManifest) -> bool:
        """A block of the full size is held."""
        blocks = zip(manifest.block_names, self.blocks_of(manifest), strict=True)
        return any(name in self.held and len(ids) == self.sizes[manifest.chunk_id] for name, ids in blocks)


def stored_chunk(ids: Sequence[int], size: int, anchor: Sequence[TokenIds]) -> ChunkManifest:
    tokens = as_token_ids(list(ids))
    above = Planner(ROOT, block_size=size).chain_of(anchor)
    names = chain_names(above, split_blocks(tokens, size))
    return ChunkManifest(names[-1], ROOT, join_ids(anchor), tokens, tuple(names))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A few chunks, stored with a block size each, and a prompt with runs of them; a random part is still held."""
    anchor = draw(st.sampled_from([Anchor(), Anchor("bos", 1)]))
    planner = Planner(ROOT, anchor, draw(st.integers(1, 9)))
    stored: list[ChunkManifest] = []
    sizes: dict[BlockName, int] = {}
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(1, 3), min_size=1, max_size=30))
        size = draw(st.one_of(st.just(planner.block_size), st.integers(1, 12)))
        manifest = stored_chunk(ids, size, anchor.segments(None))
        if manifest.chunk_id not in sizes:
            sizes[manifest.chunk_id] = size
            stored.append(manifest)
    segments: list[Segment] = [text(draw(st.sampled_from([[], [1], [1, 2]])))]
    for _ in range(draw(st.integers(1, 4))):
        manifest = draw(st.sampled_from(stored))
        offset = draw(st.integers(0, len(manifest.token_ids) - 1)) * draw(st.booleans())
        length = draw(st.one_of(st.just(len(manifest.token_ids) - offset), st.integers(1, 30)))
        segments.append(run_of(manifest, offset, min(length, len(manifest.token_ids) - offset)))
        segments.append(text(draw(st.lists(st.integers(1, 3), max_size=3))))
        if draw(st.integers(0, 4)) == 0:
            segments.append(chunk([2, 2, 3]))
    prompt = Prompt.of(segments)
    every: dict[BlockName, TokenIds] = {}
    for manifest in stored:
        every |= zip(manifest.block_names, split_blocks(manifest.token_ids, sizes[manifest.chunk_id]), strict=True)
    length = len(join_ids(anchor.segments(None)))
    for span, ids, chain, _ in planner._blocks(prompt, planner.chain_of(anchor.segments(None)), length, sizes):
        every |= {chain: ids} if span.record_start == 0 else {}
    names = sorted(every)
    share = draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    random = draw(st.randoms(use_true_random=False))
    return Case(planner, prompt, {n: every[n] for n in names if random.random() < share}, sizes)


def held_rows(plan: BlendPlan) -> dict[int, tuple[object, ...]]:
    """Of each row whose KV is held: where it comes from."""
    rows: dict[int, tuple[object, ...]] = {}
    for span in plan.spans:
        if span.source in HELD:
            size = span.record_tokens or len(span)
            for at in range(len(span)):
                stored = (span.record_start + at, span.stored_start + at)
                rows[span.start + at] = (span.source, span.tier, span.name, span.parent, size, span.segment, *stored)
    return rows


@settings(max_examples=share(400), deadline=None)
@given(cases())
def test_the_plan_is_that_of_a_look_up_for_each_run_and_loads_what_is_held(case: Case) -> None:
    source, block_size = CountingSource(case.held), case.planner.block_size
    plan = case.planner.plan(case.prompt, source)
    slow = SlowPlanner(ROOT, case.planner.anchor, block_size).plan(case.prompt, CountingSource(case.held))
    # Where a chunk's shorter last block alone is held, the slow one takes its length for the size and cuts wrongly.
    if all(case.shows_its_size(manifest) for manifest in case.runs):
        assert plan.spans == slow.spans
    # A second look-up is made for a wrong guess only.
    guessed = [guessed_size(each, block_size) == case.sizes[each.chunk_id] for each in case.runs]
    single = [len(each.block_names) == 1 for each in case.runs]
    assert source.finds <= 2
    if all(right or alone for right, alone in zip(guessed, single, strict=True)):
        assert source.finds == 1
    # A run is loaded where its chunk's blocks are held, and a chunk is held if all its rows here are.
    rows, start, chunks = held_rows(plan), 0, dict[BlockName, bool]()
    anchor = case.planner.anchor.segments(None)
    for segment in plan.prompt.segments:
        manifest = segment.found_in
        if manifest is not None and any(name in case.held for name in manifest.block_names):
            size = case.sizes[manifest.chunk_id]
            for at in range(len(segment)):
                name = manifest.block_names[(segment.offset + at) // size]
                is_prefix = rows.get(start + at, (None,))[0] is Source.PREFIX
                assert is_prefix or (start + at in rows) == (name in case.held)
                if start + at in rows and not is_prefix:
                    assert rows[start + at][2] == name and rows[start + at][6] == (segment.offset + at) % size
        if segment.is_chunk:
            name = (manifest or stored_chunk(segment.token_ids.tolist(), block_size, anchor)).chunk_id
            found = [rows.get(at, (None,))[0] for at in range(start, start + len(segment))]
            if Source.PREFIX not in found:
                chunks[name] = chunks.get(name, True) and None not in found
        start += len(segment)
    assert plan.held_chunks() == chunks


@settings(max_examples=share(300))
@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 60))
def test_a_guess_gives_the_chunks_number_of_blocks(tokens: int, size: int, configured: int) -> None:
    manifest = stored_chunk([7] * tokens, size, [])
    guess = guessed_size(manifest, configured)
    assert len(manifest.block_names) == 1 or -(-tokens // guess) == len(manifest.block_names)
    assert guess == configured or -(-tokens // configured) != len(manifest.block_names)


def test_a_manifest_whose_names_and_tokens_do_not_belong_together() -> None:
    whole = stored_chunk(range(10), 2, [])
    wrong = ChunkManifest(whole.chunk_id, ROOT, whole.anchor_ids, whole.token_ids[:3], whole.block_names)
    assert guessed_size(wrong, 4) == 4
    source = CountingSource(dict.fromkeys(whole.block_names, whole.token_ids[:2]))
    plan = Planner(ROOT, block_size=4).plan(Prompt.of([text([1]), run_of(wrong, 0, 3)]), source)
    assert len(plan) == 4 and source.finds == 1
    # A block with other ids tells no size.
    manifest = stored_chunk([1, 2, 3, 4, 5, 6, 7], 3, [])
    entries = {manifest.block_names[0]: BlockEntry(as_token_ids([9, 9]), LAYOUT, "disk")}
    assert held_size(manifest, entries) is None
    entries[manifest.block_names[2]] = BlockEntry(as_token_ids([7]), LAYOUT, "disk")
    assert held_size(manifest, entries) == 3


WIDTH = 8
WIDE = KVLayout((LayerShape(2, WIDTH),), torch.float32)
ROTATION = KeyRotation(1e2 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)), "half")


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
        return [BlockEntry(self.tokens[n], WIDE, "memory") if n in self.tokens else None for n in names]

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        return [[self._records[name] for _ in layers] for name in names]


class CutCase(NamedTuple):
    plan: BlendPlan
    store: Stored
    codec: str
    random: random.Random


@st.composite
def cut_cases(draw: st.DrawFn) -> CutCase:
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
    return CutCase(planner.plan(prompt, store), store, codec, rng)


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
@given(cut_cases(), st.data())
def test_a_cut_plan_loads_what_the_whole_one_does(case: CutCase, data: st.DataObject) -> None:
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
    plan, rng = case.plan, case.random  # what is loaded
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
    with LayerLoader(plan, case.store, WIDE, [ROTATION], **options) as loader:
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


MAKERS = {
    "prepend": tokenizers.sentencepiece,
    "metaspace": partial(tokenizers.sentencepiece, dummy_prefix="metaspace"),
    "byte_level": tokenizers.byte_level,
    "byte_level bos": partial(tokenizers.byte_level, bos=True),
    "gemma": tokenizers.gemma,
    "neox": tokenizers.neox,
    "unigram": tokenizers.unigram,
}
TEMPLATES = {
    "space": "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/]{% endfor %}",
    "line": "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}",
    "two lines": "{% for m in messages %}{{ m.role }}:\n\n{{ m.content }}\n\n{% endfor %}",
    "special": "{% for m in messages %}</s>{{ m.content }}<|im_end|>{% endfor %}",
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "documents": "{% for d in documents %}<doc> {{ d.text }} </doc> {% endfor %}{{ messages[-1].content }}",
    "numbers": "Read: {% for d in documents %}{{ d.text }} {{ loop.index }}. {% endfor %}{{ messages[-1].content }}",
}
PASSAGES = [
    "The quick brown fox jumps over the lazy dog.",
    "the dog sleeps on.",
    "1 2 3 passages are stored once",
    "你好世界, nobody knows.",
    "  Who wrote it? ",
    "\nGröße, déjà vu",
    "\n\nand lines.\n",
    "A passage is reused at any position of a prompt\n\n",
    "dog",
    "s",
    "<s> is the answer </s>",
    "😀 emoji 😀",
]
ROUNDS = 3
SYSTEMS = ["", "The answer is in the second passage:", "Who wrote it? "]


class Kept(CountingSource):
    """A store's blocks."""

    def serve(self, planner: Planner, prompt: Prompt) -> BlendPlan:
        """Plans a prompt, and stores what an engine would: exact text, and missed chunks behind their anchor."""
        plan = planner.plan(prompt, self)
        ids = plan.prompt.token_ids
        for span in plan.publishable:
            self.held[span.name] = ids[span.start : span.stop]
        anchor = planner.anchor.segments(plan.prompt)
        assert planner.chain_of(anchor) == plan.anchor_name
        assert join_ids(anchor).tolist() == plan.anchor_ids.tolist()
        for missed in plan.missed_chunks():
            name = planner.root
            for tokens in (*anchor, missed.token_ids):
                blocks = split_blocks(tokens, planner.block_size)
                names = chain_names(name, blocks)
                self.held |= dict(zip(names, blocks, strict=True))
                name = names[-1]
        return plan


@cache
def builder_of(name: str, template: str) -> PromptBuilder:
    return PromptBuilder(MAKERS[name](TEMPLATES[template]))


def asked(name: str, template: str, system: str, passages: Sequence[str]) -> Prompt:
    messages = [{"role": "system", "content": system}] if system else []
    return builder_of(name, template).chat(
        [*messages, {"role": "user", "content": "Who?"}], [Passage(each, each) for each in passages]
    )


def common(one: TokenIds, other: TokenIds) -> int:
    """Tokens that two prompts begin alike with."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


@pytest.mark.parametrize("rule", ["system", "bos", "none"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", MAKERS)
def test_another_order_shares_all_that_is_equal(name: str, template: str, rule: str) -> None:
    """Every passage is loaded as far as the prompt has its tokens, and the text in front of the first one as far as
    it is the same."""
    draw = random.Random(f"{name} {template} {rule}")
    bos = builder_of(name, template).bos_id
    if rule == "bos" and bos is None:
        pytest.skip("no BOS")
    for _ in range(ROUNDS):
        planner, held = Planner(block_name(BlockName(b"root"), np.empty(0, "<u4")), Anchor(rule, bos), 8), Kept({})
        passages, system = draw.sample(PASSAGES, draw.randrange(2, 5)), draw.choice(SYSTEMS)
        turned = [passages[at:] + passages[:at] for at in range(len(passages))]
        seen = [held.serve(planner, asked(name, template, system, order)) for order in turned]
        for _ in range(4):
            order = draw.sample(passages, len(passages))
            prompt = asked(name, template, system, order)
            plan = held.serve(planner, prompt)
            assert np.array_equal(plan.prompt.token_ids, prompt.token_ids)
            known = {tuple(chunk.stored_ids.tolist()) for before in seen for chunk in before.prompt.chunks}
            missed = {plan.prompt.segments[span.segment] for span in plan.spans if span.source is Source.MISS}
            assert not any(tuple(segment.stored_ids.tolist()) in known for segment in missed), order
            front = common(plan.prompt.token_ids, join_ids(Anchor("system", bos).segments(prompt)))
            assert plan.prefix_length >= front or not any(before.prompt.chunks for before in seen), order
            seen.append(plan)
        anchors = {plan.anchor_name for plan in seen}
        assert len(anchors) == 1, "the anchor depends on the order"
