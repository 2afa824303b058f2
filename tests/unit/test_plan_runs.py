"""Plans of prompts with runs of stored chunks: one look-up for any prompt, the same plan as with a look-up a run;
cut at any row, what is loaded is what was loaded of the same rows of the whole plan; and passages in another order
share all that is equal, whichever token the tokenizer puts at an edge.
"""

import random
from collections.abc import Collection, Sequence
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
    split_blocks,
)
from cacheblend.core.plan.blocks import BlockEntry, BlockSource, ChunkManifest, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.codec import CODECS, codec_of
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span
from cacheblend.core.plan.planner import Anchor, Planner, guessed_size, held_size
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, run_of, text
from cacheblend.engines.tokens import Passage, PromptBuilder
from campaign import share
from unit.test_plan import HELD, LAYOUT, ROOT, IdsByName

PLANNER = Planner(ROOT)


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
    """A prompt over a store that holds these blocks; `sizes`: of the blocks of chunks, by id; `own`: chunks' blocks."""

    planner: Planner
    prompt: Prompt
    held: dict[BlockName, TokenIds]
    sizes: dict[BlockName, int]
    own: Collection[BlockName]

    def blocks_of(self, manifest: ChunkManifest) -> list[TokenIds]:
        return split_blocks(manifest.token_ids, self.sizes[manifest.chunk_id])

    @property
    def runs(self) -> list[ChunkManifest]:
        return [segment.found_in for segment in self.prompt.segments if segment.found_in is not None]

    def shows_its_size(self, manifest: ChunkManifest) -> bool:
        """A block of the full size is held."""
        blocks = zip(manifest.block_names, self.blocks_of(manifest), strict=True)
        return any(name in self.held and len(ids) == self.sizes[manifest.chunk_id] for name, ids in blocks)


def stored_chunk(ids: Sequence[int], size: int, planner: Planner = PLANNER) -> ChunkManifest:
    """A chunk in blocks of so many tokens."""
    tokens, anchor = as_token_ids(list(ids)), planner.anchor.segments(None)
    names = chain_names(replace(planner, block_size=size).chain_of(anchor), split_blocks(tokens, size))
    return ChunkManifest(names[-1], planner.root, join_ids(anchor), tokens, tuple(names))


@st.composite
def cases(draw: st.DrawFn, codec: str = "raw", longest: int = 30) -> Case:
    """A few chunks, stored with a block size each, and a prompt with runs of them; a random part is still held."""
    rng, anchor = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([Anchor(), Anchor("bos", 1)]))
    block_size = draw(st.integers(1, 9) | st.sampled_from([16, 90]))
    planner = Planner.of_model("model", "float32", anchor, block_size, codec=codec)
    stored: list[ChunkManifest] = []
    sizes: dict[BlockName, int] = {}
    own: dict[BlockName, TokenIds] = {}
    for _ in range(draw(st.integers(1, 3))):
        ids = [rng.randint(1, 3) for _ in range(draw(st.integers(1, longest)))]
        size = draw(st.just(block_size) | st.integers(1, 12) | st.sampled_from([16, 80, 90]))
        manifest = stored_chunk(ids, size, planner)
        if manifest.chunk_id not in sizes:
            sizes[manifest.chunk_id] = size
            stored.append(manifest)
            own |= zip(manifest.block_names, split_blocks(manifest.token_ids, size), strict=True)
    segments: list[Segment] = [text(draw(st.sampled_from([[], [1], [1, 2], [1, *[3, 2] * 30]])))]
    for _ in range(draw(st.integers(1, 4))):
        manifest = draw(st.sampled_from(stored))
        offset = draw(st.integers(0, len(manifest.token_ids) - 1)) * draw(st.booleans())
        rest = len(manifest.token_ids) - offset
        segments.append(run_of(manifest, offset, draw(st.just(rest) | st.integers(1, rest))))
        segments.append(text(draw(st.lists(st.integers(1, 3), max_size=3))))
        if draw(st.integers(0, 4)) == 0:
            segments.append(chunk([2, 2, 3]))
    prompt, anchored = Prompt.of(segments), anchor.segments(None)
    blocks = planner._blocks(prompt, planner.chain_of(anchored), len(join_ids(anchored)), sizes)
    every = {chain: ids for span, ids, chain, _ in blocks if span.record_start == 0} | own
    share = draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    held = {name: every[name] for name in sorted(every) if rng.random() < share}
    return Case(planner, prompt, held, sizes, own)


class Row(NamedTuple):
    """Where a row's KV comes from: a row of a block, whose keys move so far."""

    source: Source
    name: BlockName
    at: int
    moved: int


def held_rows(plan: BlendPlan) -> dict[int, Row]:
    """Of each row whose KV is held."""
    return {
        span.start + at: Row(span.source, span.name, span.record_start + at, span.start - span.stored_start)
        for span in plan.spans
        if span.source in HELD
        for at in range(len(span))
    }


@settings(max_examples=share(400), deadline=None)
@given(cases())
def test_the_plan_is_that_of_a_look_up_for_each_run_and_loads_what_is_held(case: Case) -> None:
    source, block_size = IdsByName(case.held), case.planner.block_size
    plan = case.planner.plan(case.prompt, source)
    slow = SlowPlanner(ROOT, case.planner.anchor, block_size).plan(case.prompt, IdsByName(case.held))
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
    prefix = {at for at, row in rows.items() if row.source is Source.PREFIX}
    for segment in plan.prompt.segments:
        manifest = segment.found_in
        if manifest is not None and any(name in case.held for name in manifest.block_names):
            size = case.sizes[manifest.chunk_id]
            for at in range(len(segment)):
                name = manifest.block_names[(segment.offset + at) // size]
                assert start + at in prefix or (start + at in rows) == (name in case.held)
                if start + at in rows.keys() - prefix:
                    assert rows[start + at][1:3] == (name, (segment.offset + at) % size)
        if segment.is_chunk:
            name = (manifest or stored_chunk(segment.token_ids.tolist(), block_size, case.planner)).chunk_id
            places = {*range(start, start + len(segment))}
            if not places & prefix:
                chunks[name] = chunks.get(name, True) and places <= rows.keys()
        start += len(segment)
    assert plan.held_chunks() == chunks
    assert all(missed.found_in is None for missed in plan.missed_chunks()), "a run is never captured"


@settings(max_examples=share(300))
@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 60))
def test_a_guess_gives_the_chunks_number_of_blocks(tokens: int, size: int, configured: int) -> None:
    manifest = stored_chunk([7] * tokens, size)
    guess = guessed_size(manifest, configured)
    assert len(manifest.block_names) == 1 or -(-tokens // guess) == len(manifest.block_names)
    assert guess == configured or -(-tokens // configured) != len(manifest.block_names)


def test_a_manifest_whose_names_and_tokens_do_not_belong_together() -> None:
    whole = stored_chunk(range(10), 2)
    wrong = ChunkManifest(whole.chunk_id, ROOT, whole.anchor_ids, whole.token_ids[:3], whole.block_names)
    assert guessed_size(wrong, 4) == 4
    source = IdsByName(dict.fromkeys(whole.block_names, whole.token_ids[:2]))
    plan = Planner(ROOT, block_size=4).plan(Prompt.of([text([1]), run_of(wrong, 0, 3)]), source)
    assert len(plan) == 4 and source.finds == 1
    # A block with other ids tells no size.
    manifest = stored_chunk([1, 2, 3, 4, 5, 6, 7], 3)
    entries = {manifest.block_names[0]: BlockEntry(as_token_ids([9, 9]), LAYOUT, "disk")}
    assert held_size(manifest, entries) is None
    entries[manifest.block_names[2]] = BlockEntry(as_token_ids([7]), LAYOUT, "disk")
    assert held_size(manifest, entries) == 3


WIDTH = 8
WIDE = KVLayout((LayerShape(2, WIDTH),), torch.float32)
ROTATION = KeyRotation(1e2 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)), "half")


class Stored(EmptySource):
    """What a case's store holds, with random KV; only the blocks of chunks are compressed."""

    def __init__(self, case: Case) -> None:
        self.tokens = case.held
        self._kinds = {name: case.planner.codec if name in case.own else "raw" for name in case.held}
        self._records = {name: self._made(name, codec_of(kind)) for name, kind in self._kinds.items()}

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


def cut_somewhere(plan: BlendPlan, rng: random.Random) -> BlendPlan:
    """Every other span in two parts, at any row."""
    parts: list[Span] = []
    for span in plan.spans:
        at = rng.randrange(span.start, span.stop)
        is_cut = at > span.start and rng.random() < 0.5
        parts += [span.part(span.start, at), span.part(at, span.stop)] if is_cut else [span]
    return replace(plan, spans=tuple(parts))


@settings(max_examples=share(150), deadline=None)
@given(st.sampled_from(list(CODECS)).flatmap(partial(cases, longest=200)), st.randoms(), st.data())
def test_a_cut_plan_loads_what_the_whole_one_does(case: Case, rng: random.Random, data: st.DataObject) -> None:
    store = Stored(case)
    uncut = case.planner.plan(case.prompt, store)
    plan = cut_somewhere(uncut, rng)
    whole = {(span.start, span.stop) for span in uncut.spans}
    assert all((span.start, span.stop) in whole for span in plan.publishable)
    assert plan.exact_ends(chunks=True).items() <= uncut.exact_ends(chunks=True).items()
    stop = data.draw(st.integers(1, len(plan)))
    held = plan.with_resident(stop)
    assert held.spans[0].name == RESIDENT and len(held) == len(plan)
    assert [s.start for s in held.spans] == [0, *(s.stop for s in held.spans[:-1])]
    assert held.chunk_offsets[stop:].tolist() == plan.chunk_offsets[stop:].tolist()
    assert held.segment_indices[stop:].tolist() == plan.segment_indices[stop:].tolist()
    plan, wanted = uncut, held_rows(uncut)  # what is loaded
    if len(plan) > 1 and data.draw(st.booleans(), "without its last row"):
        plan = plan.without_last_row()
    if data.draw(st.booleans(), "some blocks are lost"):
        names = sorted({of.name for of in wanted.values()})
        lost = set(rng.sample(names, len(names) // 3))
        plan, wanted = plan.without(lost), {row: of for row, of in wanted.items() if of.name not in lost}
    stop = 0
    if len(plan) > 1 and data.draw(st.booleans(), "an engine holds its front"):
        plan = plan.with_resident(stop := rng.randrange(1, len(plan)))
    if data.draw(st.booleans(), "cut anywhere"):
        plan = cut_somewhere(plan, rng)
    held = torch.randn(2, 2, max(stop, 1), WIDTH)
    options = {"codec": case.planner.codec, "resident": (lambda layer: held) if stop else None}
    with LayerLoader(plan, store, WIDE, [ROTATION], **options) as loader:
        keys, values = loader.layer(0)
    for row in range(len(plan)):
        if row < stop:
            key, value = held[:, :, row].unbind(1)
        elif row in wanted:
            _, name, at, moved = wanted[row]
            key, value = store.rows(name)[:, :, at].unbind(1)
            key = reposition_keys(key[:, None], turn_by(ROTATION, torch.tensor([moved])))[:, 0] if moved else key
        else:
            key = value = torch.full((2, WIDTH), torch.nan)  # not written, see conftest
        torch.testing.assert_close(values[:, row], value, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(keys[:, row], key, rtol=0, atol=1e-5, equal_nan=True)


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


class Kept(IdsByName):
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
