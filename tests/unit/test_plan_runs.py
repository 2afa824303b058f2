"""Plans of prompts with runs of stored chunks: one look-up for any prompt, the same plan as with a look-up a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.names import BlockName, TokenIds, as_token_ids, chain_names, join_ids, root_name, split_blocks
from cacheblend.core.plan.blocks import BlockEntry, BlockSource, ChunkManifest, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Anchor, Planner, guessed_size, held_size
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, run_of, text
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


@pytest.mark.parametrize("runs", [1, 20])
@pytest.mark.parametrize("size", [256, 200])
def test_any_number_of_runs_is_one_look_up(runs: int, size: int) -> None:
    chunks = [stored_chunk(np.arange(300) + 1000 * number, size, []) for number in range(runs)]
    held = {n: ids for m in chunks for n, ids in zip(m.block_names, split_blocks(m.token_ids, size), strict=True)}
    source = CountingSource(held)
    plan = Planner(ROOT).plan(Prompt.of([text([5]), *(run_of(m, 3, 290) for m in chunks), text([6])]), source)
    assert plan.tokens_by_source()["memory"] == 290 * runs
    assert source.finds == (1 if size == 256 else 2)


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
