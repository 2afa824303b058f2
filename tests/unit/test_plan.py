"""Prompts, names of blocks, and plans: what holds for any prompt over any store, and the cases that shaped them."""

import hashlib
import itertools
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.fuse.question import rows_to_ask
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
from cacheblend.core.plan.blocks import BlockEntry, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan, Source, Span
from cacheblend.core.plan.planner import Anchor, Planner, cut_bos
from cacheblend.core.plan.prompt import Prompt, Segment, check_ids, chunk, part_of, text
from campaign import share

ROOT = root_name("model", "float32")
LAYOUT = KVLayout((LayerShape(1, 2),), torch.float32)
BOS = 1
HELD = (Source.PREFIX, Source.LOADED)


class IdsByName(EmptySource):
    """Holds names with token ids; some may be wrong, as after a hash collision. `finds`: its calls."""

    tier = "memory"

    def __init__(self, held: dict[BlockName, TokenIds]) -> None:
        self.held, self.finds, self.asked = held, 0, list[BlockName]()

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        assert len(set(names)) == len(names), "a name is asked for twice"
        self.finds += 1
        self.asked += names
        return [BlockEntry(self.held[n], LAYOUT, self.tier) if n in self.held else None for n in names]


EMPTY = IdsByName({})


def tokens_of(plan: BlendPlan, span: Span) -> TokenIds:
    return plan.prompt.token_ids[span.start : span.stop]


def prompt_chain(plan: BlendPlan) -> list[BlockName]:
    names, name = [], ROOT
    for span in plan.spans:
        name = block_name(name, tokens_of(plan, span))
        names.append(name)
    return names


def own_chain(planner: Planner, plan: BlendPlan, index: int) -> list[BlockName]:
    """Names of the blocks of segment `index` behind the plan's anchor."""
    name, names = plan.anchor_name, []
    for tokens in split_blocks(plan.prompt.segments[index].token_ids, planner.block_size):
        name = block_name(name, tokens)
        names.append(name)
    return names


def all_names(planner: Planner, plan: BlendPlan) -> dict[BlockName, TokenIds]:
    """Every name under which a block of the plan could be stored: prompt chain, and chunk chains."""
    found = {n: tokens_of(plan, s) for n, s in zip(prompt_chain(plan), plan.spans, strict=True)}
    for index, segment in enumerate(plan.prompt.segments):
        if segment.is_chunk:
            blocks = split_blocks(segment.token_ids, planner.block_size)
            found |= dict(zip(own_chain(planner, plan, index), blocks, strict=True))
    return found


def holding(names: Iterable[BlockName], every: dict[BlockName, TokenIds]) -> IdsByName:
    return IdsByName({name: every[name] for name in names})


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Few ids and few passages, so that chunks repeat and chains share their starts."""
    passages = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=3))
    segments: list[Segment] = [text(draw(st.sampled_from([[], [BOS], [BOS, 2], [2, 2, 3]])))]
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            segments.append(chunk(draw(st.sampled_from(passages))))
        else:
            segments.append(text(draw(st.lists(st.integers(1, 3), max_size=6))))
    if not any(map(len, segments)) or draw(st.booleans()):
        segments.append(text([3]))
    return Prompt.of(segments)


anchors = st.sampled_from([Anchor(), Anchor("bos", BOS), Anchor("system"), Anchor("system", BOS), Anchor("none", BOS)])


@st.composite
def plans(draw: st.DrawFn) -> tuple[Planner, IdsByName, BlendPlan]:
    """A plan over a store that holds a random part of what it could hold, collisions included."""
    planner = Planner(ROOT, draw(anchors), draw(st.integers(1, 5)))
    prompt = draw(prompts())
    every = all_names(planner, planner.plan(prompt, EMPTY))
    names = sorted(every)
    held = {n: every[n] for n, kept in zip(names, draw(st.tuples(*[st.booleans()] * len(names))), strict=True) if kept}
    for name in draw(st.lists(st.sampled_from(sorted(held)), max_size=2)) if held else []:
        held[name] = as_token_ids([*held[name].tolist()[:-1], 99])  # same length, another token
    source = IdsByName(held)
    return planner, source, planner.plan(prompt, source)


@settings(max_examples=share(120))
@given(plans())
def test_the_laws_of_a_plan(made: tuple[Planner, IdsByName, BlendPlan]) -> None:
    planner, source, plan = made
    check_spans(planner, plan)
    check_sources(planner, source, plan)
    check_rows(plan)
    check_publishing(plan)


def check_spans(planner: Planner, plan: BlendPlan) -> None:
    """Gapless, ordered, cover the prompt, cut at segment boundaries, named after their parents."""
    assert [s.start for s in plan.spans] == [0, *(s.stop for s in plan.spans[:-1])]
    assert len(plan) == plan.spans[-1].stop == len(plan.prompt)
    lengths = [len(s) for s in plan.prompt.segments]
    for index, group in groupby(plan.spans, key=lambda s: s.segment):
        spans = list(group)
        assert [s.chunk_offset for s in spans] == [s.start - spans[0].start for s in spans]
        assert spans[0].start == sum(lengths[:index])
        assert sum(map(len, spans)) == lengths[index]
        assert all(len(s) == planner.block_size for s in spans[:-1])
        assert 1 <= len(spans[-1]) <= planner.block_size
    for span in plan.spans:
        assert span.name == block_name(span.parent, tokens_of(plan, span))


def check_sources(planner: Planner, source: IdsByName, plan: BlendPlan) -> None:
    """Each row's source follows from what is held; the prefix is the leading run of the prompt's own chain."""
    in_prefix = True
    for span, name in zip(plan.spans, prompt_chain(plan), strict=True):
        tokens = tokens_of(plan, span)
        in_prefix = in_prefix and np.array_equal(source.held.get(name), tokens)
        is_chunk = plan.prompt.segments[span.segment].is_chunk
        if in_prefix:
            assert (span.source, span.name, span.stored_start) == (Source.PREFIX, name, span.start)
        elif not is_chunk:
            assert (span.source, span.name) == (Source.TEXT, name)
        else:
            own = own_chain(planner, plan, span.segment)[span.chunk_offset // planner.block_size]
            is_held = np.array_equal(source.held.get(own), tokens)
            assert (span.source, span.name) == (Source.LOADED if is_held else Source.MISS, own)
            assert span.stored_start == len(plan.anchor_ids) + span.chunk_offset
        assert span.tier == (source.tier if span.source in HELD else "")
    assert len(source.asked) == len(set(source.asked))


def check_rows(plan: BlendPlan) -> None:
    last = len(plan) - 1
    rows = {source: [p for s in plan.spans if s.source is source for p in range(s.start, s.stop)] for source in Source}
    assert sorted(chain.from_iterable(rows.values())) == list(range(len(plan)))
    assert plan.prefix_length == min(len(rows[Source.PREFIX]), last)
    assert plan.candidate_rows.tolist() == [p for p in rows[Source.LOADED] if p != last]
    assert plan.chunk_offsets.tolist() == [i for s in plan.prompt.segments for i in range(len(s))]
    counts = plan.tokens_by_source()
    assert counts == {
        "prefix": len(rows[Source.PREFIX]),
        "memory": len(rows[Source.LOADED]),
        "disk": 0,
        "miss": len(rows[Source.MISS]),
        "text": len(rows[Source.TEXT]),
    }


def check_publishing(plan: BlendPlan) -> None:
    """Only text in front of the first chunk, with only exact KV in front of it; missed chunks are listed once."""
    first_chunk = next((i for i, s in enumerate(plan.prompt.segments) if s.is_chunk), 0)
    assert plan.publishable == [s for s in plan.spans if s.source is Source.TEXT and s.segment < first_chunk]
    chain = prompt_chain(plan)
    for span in plan.publishable:
        at = plan.spans.index(span)
        assert [s.name for s in plan.spans[: at + 1]] == chain[: at + 1]
        assert all(s.stored_start == s.start for s in plan.spans[:at])
    lacking = [s.segment for s in plan.spans if s.source is Source.MISS]
    expected = list(dict.fromkeys(plan.prompt.segments[i].token_ids.tobytes() for i in lacking))
    assert [s.token_ids.tobytes() for s in plan.missed_chunks()] == expected


@settings(max_examples=share(80))
@given(plans(), st.data())
def test_the_plan_without_lost_blocks(made: tuple[Planner, IdsByName, BlendPlan], data: st.DataObject) -> None:
    planner, _, plan = made
    held = sorted({s.name for s in plan.spans if s.source in HELD})
    lost = set(data.draw(st.lists(st.sampled_from(held), max_size=3))) if held else set()
    less = plan.without(lost)
    in_prefix = True
    for before, after in zip(plan.spans, less.spans, strict=True):
        assert (before.start, before.stop, before.name, before.stored_start) == (
            after.start,
            after.stop,
            after.name,
            after.stored_start,
        )
        if before.source in HELD and before.name in lost:
            is_chunk = plan.prompt.segments[before.segment].is_chunk
            assert after.source is (Source.MISS if is_chunk else Source.TEXT)
            assert after.tier == ""
        elif before.source is Source.PREFIX and not in_prefix:
            assert after.source is Source.LOADED
            assert after.start == after.stored_start  # nothing to move
        else:
            assert after.source is before.source
        in_prefix = in_prefix and after.source is Source.PREFIX
    check_spans(planner, less)
    check_rows(less)
    check_publishing(less)
    nothing = plan.without("all")
    assert {s.source for s in nothing.spans} <= {Source.MISS, Source.TEXT}
    assert nothing.prefix_length == 0
    assert len(nothing.candidate_rows) == 0
    check_publishing(nothing)


def test_a_chunks_names_depend_on_its_anchor_alone_which_is_bos_or_the_text_in_front() -> None:
    planner = Planner(ROOT, Anchor("bos", BOS), block_size=4)
    passage = chunk(range(10, 21))
    fronts = [[], [text([BOS])], [text([BOS, 5])], [text([5]), chunk([6, 7])], [chunk(range(9))], [passage]]
    names = set()
    for front in fronts:
        plan = planner.plan(Prompt.of([*front, passage, text([3])]), EMPTY)
        names.add(tuple(s.name for s in plan.spans if s.segment == len(plan.prompt.segments) - 2))
    assert len(names) == 1
    planner = Planner(ROOT, Anchor("system"))  # but on the system in front of it, where that is the anchor
    assert len({planner.plan(Prompt.of([text([i]), chunk([8])]), EMPTY).spans[1].name for i in range(5)}) == 5
    for anchor, front in [
        (Anchor(), []),
        (Anchor("bos", BOS), [text([BOS])]),
        (Anchor("system", BOS), [text([BOS, 5, 6]), text([7])]),
        (Anchor("text", BOS, ((BOS, 5, 6), (7,))), [text([BOS, 5, 6]), text([7])]),
        (Anchor("text", None, ((5, 6),)), [text([5, 6])]),
    ]:
        planner = Planner(ROOT, anchor, block_size=4)
        prompt = Prompt.of([*front, chunk(range(10, 20)), text([3])])
        plan = planner.plan(prompt, EMPTY)
        assert [s.source for s in plan.spans[-4:]] == [*[Source.MISS] * 3, Source.TEXT]
        again = planner.plan(prompt, IdsByName({s.name: tokens_of(plan, s) for s in plan.spans[:-1]}))
        assert {s.source for s in again.spans[:-1]} == {Source.PREFIX}
        assert again.prefix_length == len(prompt) - 1
        assert again.publishable == []
    planner = Planner(ROOT, Anchor("bos", BOS), block_size=8)  # bos alone, wherever the text was cut
    joined = planner.plan(Prompt.of([text([BOS, 5, 6]), chunk([7])]), EMPTY)
    apart = planner.plan(Prompt.of([text([BOS]), text([5, 6]), chunk([7])]), EMPTY)
    assert [s.name for s in joined.spans] == [s.name for s in apart.spans]
    assert joined.spans[1].parent == joined.anchor_name == planner.chain_of([as_token_ids([BOS])])
    for prompt in (Prompt.of([chunk([BOS, 5])]), Prompt.of([text([BOS])]), Prompt.of([text([5, BOS])])):
        assert cut_bos(prompt, BOS) is prompt
    assert cut_bos(joined.prompt, None) is joined.prompt
    with pytest.raises(InvalidInputError, match="BOS token; use 'none'"):
        Anchor("bos")
    with pytest.raises(InvalidInputError, match="'text' needs a text and the model's tokenizer; use 'none'"):
        Anchor("text", BOS)
    assert [ids.tolist() for ids in Anchor("text", BOS, ((BOS, 5), (6,))).segments(None)] == [[BOS], [5], [6]]
    anchor = Anchor("system", BOS)
    system = [text([BOS, 5, 6]), text([7])]
    with_chunk = anchor.segments(Prompt.of([*system, chunk([8]), text([9]), chunk([4])]))
    assert [ids.tolist() for ids in with_chunk] == [[BOS], [5, 6], [7]]
    alone = anchor.segments(Prompt.of(system))  # what `warm(..., system=...)` is given
    assert [ids.tolist() for ids in alone] == [[BOS], [5, 6], [7]]
    assert anchor.segments(Prompt.of([chunk([8]), text([9])])) == []


def test_beside_a_cache_that_rounds_nothing_held_is_exact() -> None:
    """Chunks are loaded as chunks, also one directly behind its anchor; text that is held is computed."""
    for codec in ("raw", "int8"):
        exact = Planner.of_model("model", "float32", Anchor("bos", BOS), 4, codec=codec)
        planner = replace(exact, has_exact_hits=False)
        prompt = Prompt.of([text([BOS]), chunk(range(10, 20)), text([3]), chunk(range(30, 34)), text([4])])
        empty = planner.plan(prompt, EMPTY)
        held = {s.name: tokens_of(empty, s) for s in empty.spans} | all_names(exact, empty)
        plan = planner.plan(prompt, IdsByName(held))
        loaded = [Source.LOADED] * 3
        assert [s.source for s in plan.spans] == [Source.TEXT, *loaded, Source.TEXT, Source.LOADED, Source.TEXT]
        assert [s.start - s.stored_start for s in plan.spans if s.source is Source.LOADED] == [0, 0, 0, 11]
        assert plan.prefix_length == 0
        assert {s.source for s in plan.exact_only().spans} == {Source.TEXT, Source.MISS}


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8", "int4"])
def test_the_bytes_of_a_block_are_those_of_its_records_whenever_they_are_asked(codec: str) -> None:
    layout = KVLayout((LayerShape(3, 16), LayerShape(1, 64)), torch.bfloat16, codec)
    for tokens in (1, 7, 256, 5000, 7, 1, 5000):
        records = [torch.randn(each.kv_heads, 2, tokens, each.head_dim).bfloat16() for each in layout.layers]
        assert layout.block_bytes(tokens) == sum(layout.encode(record).nbytes for record in records)
    assert len(layout._block_bytes) == 3  # of the lengths that blocks have
    assert layout == KVLayout(layout.layers, torch.bfloat16, codec) == pickle.loads(pickle.dumps(layout))


@settings(max_examples=80)
@given(st.data())
def test_parts_of_chunks_count_under_the_whole_ones_name_and_last_ones_are_stored_whole(data: st.DataObject) -> None:
    """Whichever of its blocks the prompt has, and as what engines make of the plan."""
    planner = Planner(ROOT, Anchor("bos", BOS), data.draw(st.integers(1, 9)))
    ids = as_token_ids(data.draw(st.lists(st.integers(2, 5), min_size=2, max_size=30)))
    offset = data.draw(st.integers(0, len(ids) - 1))
    tokens = data.draw(st.integers(1, len(ids) - offset))
    blocks = split_blocks(ids, planner.block_size)
    names = chain_names(planner.chain_of([as_token_ids([BOS])]), blocks)
    held = {name: block for name, block in zip(names, blocks, strict=True) if data.draw(st.booleans())}
    prompt = Prompt.of([text([BOS, 6]), part_of(ids, offset, tokens), text([7])])
    plan = planner.plan(prompt, IdsByName(held))
    used = {names[at // planner.block_size] for at in range(offset, offset + tokens)}
    assert plan.held_chunks() == {names[-1]: used <= held.keys()}
    assert plan.without_last_row().held_chunks() == plan.held_chunks()
    stop = data.draw(st.integers(1, 2 + tokens))
    rest = {names[at // planner.block_size] for at in range(offset + max(0, stop - 2), offset + tokens)}
    assert plan.with_resident(stop).held_chunks() == ({names[-1]: rest <= held.keys()} if rest else {})
    # the last chunk of a prompt without its last row
    planner = Planner(ROOT, Anchor("bos", BOS), data.draw(st.integers(1, 9)))
    ids = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=30))
    plan = planner.plan(Prompt.of([text([BOS, 6]), chunk(ids)]), EMPTY)
    without = plan.without_last_row()
    assert without.prompt.token_ids.tolist() == [BOS, 6, *ids[:-1]]
    assert [c.token_ids.tolist() for c in without.missed_chunks()] == ([ids] if len(ids) > 1 else [])
    assert without.held_chunks() == (dict.fromkeys(plan.held_chunks(), False) if len(ids) > 1 else {})


segment_lists = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=6)


@given(segment_lists, st.sets(st.integers(0, 12)), st.integers(2, 12))
def test_question_rows(segments: list[tuple[bool, int]], held: set[int], limit: int) -> None:
    """Behind the last chunk, within the limit, the last row among them; never a candidate, never an exact prefix."""
    parts = [(chunk if is_chunk else text)([10 * i + 1] * n) for i, (is_chunk, n) in enumerate(segments)]
    prompt, planner = Prompt.of(parts), Planner(ROOT, block_size=4)
    empty = planner.plan(prompt, EMPTY)
    stored = {span.name: tokens_of(empty, span) for i, span in enumerate(empty.spans) if i in held}
    plan = planner.plan(prompt, IdsByName(stored))
    rows = plan.question_rows(limit)
    assert 1 <= len(rows) <= limit
    assert (np.diff(rows) > 0).all() and rows[-1] == len(plan) - 1
    assert not set(rows) & set(plan.candidate_rows)
    if len(plan.candidate_rows):
        assert rows[0] >= plan.prefix_length
    assert plan.stored_rows.tolist() == [p for s in plan.spans if s.source in HELD for p in range(s.start, s.stop)]
    assert plan.segment_indices.tolist() == [i for i, part in enumerate(prompt.segments) for _ in range(len(part))]
    ends = np.cumsum([len(part) for part in prompt.segments])
    behind = max((int(end) for end, part in zip(ends, prompt.segments, strict=True) if part.is_chunk), default=0)
    if behind < len(plan):
        assert rows[0] >= behind and len(rows) == min(limit, len(plan) - rows[0])
    assert [rows_to_ask(tokens) for tokens in (10, 59, 60, 2000)] == [2, 2, 3, 100]  # a twentieth of the prompt


def test_segments_keep_their_order_and_empty_or_long_prompts_and_foreign_ids_are_refused() -> None:
    prompt = Prompt.of([text([]), text([1]), chunk([2, 3], "title"), text([]), chunk([2, 3]), text([4])])
    assert prompt.token_ids.tolist() == [1, 2, 3, 2, 3, 4]
    assert prompt.token_ids.dtype == np.dtype("<u4")
    assert len(prompt) == 6
    assert [s.is_chunk for s in prompt.segments] == [False, True, True, False]
    assert [s.label for s in prompt.chunks] == ["title", ""]
    for segments in ([], [text([])]):
        with pytest.raises(InvalidInputError, match="prompt is empty; it needs at least one token"):
            Prompt.of(segments)
    with pytest.raises(InvalidInputError, match="chunk has no tokens; leave empty passages out"):
        chunk([])
    prompt = Prompt.of([text([1, 2]), chunk([9, 3])])
    prompt.check(vocab_size=10, max_length=4)
    with pytest.raises(InvalidInputError, match=r"token id 9 at index 2.*0\.\.8.*another model's tokenizer"):
        prompt.check(vocab_size=9, max_length=None)
    with pytest.raises(InvalidInputError, match=r"4 tokens.*context 3; use fewer or shorter chunks"):
        prompt.check(vocab_size=10, max_length=3)
    check_ids(as_token_ids([]), 0, "nothing")
    assert issubclass(InvalidInputError, ValueError) and issubclass(InvalidInputError, CacheBlendError)


ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids_lists)
def test_ids_are_little_endian_uint32_whatever_they_came_in(ids: list[int]) -> None:
    forms = [ids, np.array(ids, dtype="i8"), np.array(ids, dtype=">u4"), torch.tensor(ids, dtype=torch.int64)]
    for form in forms:
        got = as_token_ids(form)
        assert got.dtype == np.dtype("<u4")
        assert got.flags["C_CONTIGUOUS"]
        assert got.tolist() == ids
    assert as_token_ids(np.arange(10)[::2]).tobytes() == as_token_ids([0, 2, 4, 6, 8]).tobytes()  # a strided view


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, -1], OverflowError, r"0\.\.4294967295, got -1\.\.1"),
        ([2**32], OverflowError, r"0\.\.4294967295, got 4294967296"),
        ([2**70], TypeError, "integers, not object"),
        ([1.5], TypeError, "integers, not float64"),
        ([float("nan")], TypeError, "integers, not float64"),
        ([True], TypeError, "integers, not bool"),
        (["1"], TypeError, "integers, not <U1"),
        ([None], TypeError, "integers, not object"),
        ([[1], [2, 3]], ValueError, "inhomogeneous"),
        ([[1, 2], [3, 4]], TypeError, r"one list.*shape \(2, 2\)"),
        (7, TypeError, "one list"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_token_ids(ids)
    for make in (text, chunk):
        with pytest.raises(InvalidInputError, match=f"token ids.*{message}"):
            make(ids)


@given(st.lists(ids_lists, max_size=5), st.integers(1, 50))
def test_blocks_are_full_but_the_last_and_chains_follow(texts: list[list[int]], size: int) -> None:
    for ids in texts:
        blocks = split_blocks(as_token_ids(ids), size)
        assert join_ids(blocks).tolist() == ids
        assert all(len(block) == size for block in blocks[:-1])
        assert all(1 <= len(block) <= size for block in blocks)
    parent, expected, arrays = root_name("f", "bfloat16"), [], [as_token_ids(ids) for ids in texts if ids]
    for array in arrays:
        parent = hashlib.sha256(parent + np.array(array, dtype="<u4").tobytes()).digest()
        expected.append(parent)
    assert chain_names(root_name("f", "bfloat16"), arrays) == expected


def test_names_depend_on_every_token_in_front_and_roots_of_different_parts_never_meet() -> None:
    root = root_name("f", "bfloat16")
    block = as_token_ids([7, 8])
    names = {
        block_name(root, block),
        *chain_names(root, [as_token_ids([1]), block]),
        *chain_names(root, [as_token_ids([2]), block]),
        *chain_names(root_name("g", "bfloat16"), [block]),
    }
    assert len(names) == 6
    assert all(len(name) == 32 for name in names)
    # parts whose concatenations are equal give different names, because lengths are hashed, too
    words = ["", "a", "b", "ab", "ba", "aab", "\0", "\0\0\0\1a", "ü"]
    tuples = list(itertools.product(words, repeat=3))
    roots = {root_name(fingerprint, dtype, salt=salt) for fingerprint, dtype, salt in tuples}
    assert len(roots) == len(tuples)
    parts = [{}, {"codec": "int8"}, {"salt": "int8"}, {"codec": "int8", "salt": "raw"}, {"salt": "raw"}]
    assert len({root_name("f", "bfloat16", **part) for part in parts}) == len(parts)
    assert root_name("f", "bfloat16") == root_name("f", "bfloat16", "raw", "")
