"""Memory in front of a store: layers gather in it as they are read, and what it loses meanwhile is read again. Also as
tensor-parallel ranks use it: each reads its own heads, and finds nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, LayerShape, RecordMemory
from cacheblend.store import MemoryStore, TieredStore
from campaign import share
from lab.speed.throttle import ThrottledStore
from store_blocks import ROOT, make_block, same_bits
from store_folders import disk


def test_layers_gather_in_memory_without_a_second_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
    preads: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: (preads.append(at), preadv(fd, parts, at))[1])
    with TieredStore(MemoryStore(10_000), disk(tmp_path)) as store:
        for layer in (2, 0, 2, 0):
            assert same_bits(store.read(block.name, layer), block.records[layer])
        assert len(preads) == 4  # a block that was never looked up does not gather
        assert [entry and entry.tier for entry in store.find([block.name])] == ["disk"]
        store.read(block.name, 1, slice(0, 1))
        for layer in (0, 2, 2, 1, 1, 0):
            assert same_bits(store.read(block.name, layer), block.records[layer])
            assert same_bits(store.read(block.name, layer, slice(0, 1)), block.records[layer][:1])
        assert len(preads) == 4 + 1 + 3
        assert [entry and entry.tier for entry in store.find([block.name, ROOT])] == ["memory", None]
        front, back = store.stats().tiers
        assert (front.tier, front.blocks, back.tier, back.blocks) == ("memory", 1, "disk", 1)


def test_what_is_evicted_from_memory_during_a_read_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1)
    front = MemoryStore(10_000)
    peek = front.peek

    def peek_and_lose(name: BlockName, layer: int) -> torch.Tensor | None:
        record = peek(name, layer)
        front.delete(name)  # as another thread's write may do
        return record

    with TieredStore(front, disk(tmp_path)) as store:
        monkeypatch.setattr(front, "peek", peek_and_lose)
        for layer, heads in ((0, None), (1, slice(1, 2)), (0, None)):
            store.write(block)
            front.write(block)
            assert same_bits(store.read(block.name, layer, heads), block.records[layer][heads or slice(None)])
        front.write(block)
        with pytest.raises(InvalidInputError, match="2 KV heads"):
            store.read(block.name, 0, slice(0, 3))


# ---- ranks -------------------------------------------------------------------------------------------------


SHAPES = (LayerShape(4, 4), LayerShape(4, 4), LayerShape(2, 8))
LAYERS = range(len(SHAPES))
LOW, HIGH = slice(0, 2), slice(2, 4)


class Back(ThrottledStore):
    """A store of the tier "slow", which is as fast as memory and counts the records read from it."""

    def __init__(self) -> None:
        super().__init__(1e15, tier="slow", max_bytes=1 << 24)
        self.reads: list[tuple[BlockName, int, slice | None]] = []

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        self.reads += [(name, layer, heads) for name in names for layer in layers]
        return super().read_layers(names, layers, heads, memory)


def stored(count: int = 1, shapes: Sequence[LayerShape] = SHAPES[:2]) -> tuple[Back, list[Block]]:
    back, blocks = Back(), [make_block(seed, 5, shapes) for seed in range(count)]
    for block in blocks:
        back.write(block)
    return back, blocks


def test_a_rank_reads_its_heads_once() -> None:
    back, blocks = stored(3)
    store = TieredStore(MemoryStore(1 << 20), back)
    names = [block.name for block in blocks]
    for _ in range(3):
        for layer in (0, 1):
            for block, record in zip(blocks, store.read_many(names, layer, HIGH), strict=True):
                assert isinstance(record, torch.Tensor) and same_bits(record, block.records[layer][2:])
    assert len(back.reads) == 3 * 2


def test_other_heads_and_whole_records_are_read_from_the_store_behind() -> None:
    back, (block,) = stored()
    store = TieredStore(MemoryStore(1 << 20), back)
    wanted = [LOW, HIGH, slice(1, 3), slice(None, 2), slice(0, 1), slice(0, 4), None]
    for _ in range(2):
        for heads in wanted:
            assert same_bits(store.read(block.name, 0, heads), block.records[0][heads or slice(None)])
    assert len([each for each in back.reads if each[2] is not None]) == len(wanted) - 2  # [0, 2) has two forms
    assert len([each for each in back.reads if each[2] is None]) == 2  # a block that was never found does not gather


def test_a_whole_record_answers_for_all_heads_whenever_it_comes() -> None:
    back, (block,) = stored()
    store = TieredStore(MemoryStore(1 << 20), back)
    store.read(block.name, 0, LOW)
    store.find([block.name])
    for heads in (None, HIGH, slice(1, 2), None):
        assert same_bits(store.read(block.name, 0, heads), block.records[0][heads or slice(None)])
    assert [heads for _, _, heads in back.reads] == [LOW, None]
    store.read(block.name, 1)
    assert same_bits(store.read(block.name, 1, HIGH), block.records[1][2:])
    assert len(back.reads) == 3


def test_the_tier_is_memory_only_for_whole_records() -> None:
    back, (block,) = stored()
    store = TieredStore(MemoryStore(1 << 20), back)
    for heads in (LOW, HIGH):
        for layer in (0, 1):
            store.read(block.name, layer, heads)
    assert store.front.stats().bytes == sum(record.nbytes for record in block.records)
    assert store.front.find([block.name]) == [None] and store.front.stats().blocks == 0
    assert [entry and entry.tier for entry in store.find([block.name])] == ["slow"]
    store.read(block.name, 1)
    store.read(block.name, 0)
    assert [entry and entry.tier for entry in store.find([block.name])] == ["memory"]
    assert store.front.stats().blocks == 1


def test_a_deleted_block_is_gone_with_all_its_heads() -> None:
    back, (block, other) = stored(2)
    store = TieredStore(MemoryStore(1 << 20), back)
    for each in (block, other):
        for heads in (LOW, HIGH):
            store.read(each.name, 0, heads)
    store.delete(block.name)
    for heads in (LOW, HIGH, None):
        with pytest.raises(BlockLostError):
            store.read(block.name, 0, heads)
    assert same_bits(store.read(other.name, 0, LOW), other.records[0][:2])
    assert len(back.reads) == 4 + 3


def test_heads_share_the_bound_with_whole_blocks_and_the_oldest_go_first() -> None:
    back, blocks = stored(8)
    size = sum(record.nbytes for record in blocks[0].records)
    store = TieredStore(MemoryStore(3 * size), back)
    for number, block in enumerate(blocks):
        if number % 2:
            store.find([block.name])
        for layer in (0, 1):
            store.read(block.name, layer, None if number % 2 else HIGH)
        assert store.front.stats().bytes <= 3 * size
    back.reads.clear()
    for layer in (0, 1):
        store.read(blocks[6].name, layer, HIGH)
        store.read(blocks[7].name, layer)
    assert back.reads == []
    store.read(blocks[0].name, 0, HIGH)
    assert len(back.reads) == 1
    small = TieredStore(MemoryStore(blocks[0].records[0].nbytes // 2 - 1), back)
    assert same_bits(small.read(blocks[0].name, 0, HIGH), blocks[0].records[0][2:])
    assert small.front.stats().bytes == 0


def test_heads_that_a_layer_does_not_have_are_refused_each_time() -> None:
    back, (block,) = stored(1, SHAPES)
    store = TieredStore(MemoryStore(1 << 20), back)
    store.read(block.name, 0, HIGH)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="2 KV heads"):
            store.read(block.name, 2, HIGH)


def test_a_part_of_a_larger_tensor_does_not_keep_it_alive() -> None:
    back, (block,) = stored()
    store = TieredStore(MemoryStore(1 << 20), back)
    store.read(block.name, 0, slice(1, 2))
    kept = store.read(block.name, 0, slice(1, 2))
    assert kept.untyped_storage().nbytes() == kept.nbytes


heads_read = st.one_of(st.none(), st.sampled_from([LOW, HIGH, slice(1, 3), slice(0, 1), slice(0, 4), slice(3, 4)]))
actions = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 1), heads_read),
    st.tuples(st.sampled_from(["find", "write", "delete", "prune", "lose"]), st.integers(0, 3)),
)


@settings(max_examples=share(200), deadline=None)
@given(st.lists(actions, max_size=40), st.integers(0, 4))
def test_any_reads_of_any_heads_give_the_stored_bits_within_the_bound(taken: list[tuple], room: int) -> None:  # type: ignore[type-arg]
    blocks = [make_block(seed, 5, SHAPES[:2]) for seed in range(4)]
    bound = room * sum(record.nbytes for record in blocks[0].records) * 3 // 4
    back = Back()
    store = TieredStore(MemoryStore(bound), back)
    kept: set[int] = set()
    for action, number, *how in taken:
        block = blocks[number]
        if action == "read":
            layer, heads = how
            (record,) = store.read_many([block.name], layer, heads)
            if isinstance(record, torch.Tensor):
                assert same_bits(record, block.records[layer][heads or slice(None)])
            else:
                assert number not in kept
        elif action == "find":
            store.find([block.name])
        elif action == "write":
            store.write(block)
            kept.add(number)
        elif action == "delete":
            store.delete(block.name)
            kept.discard(number)
            assert isinstance(store.read_many([block.name], 0, HIGH)[0], BlockLostError)
        elif action == "lose":
            back.delete(block.name)  # by another process
            kept.discard(number)
        else:
            store.front.prune(bound // 2)
        assert store.front.stats().bytes <= bound
        held = sum(part.nbytes for each in store.front._held.values() for part in each.records if part is not None)
        assert held == store.front.stats().bytes
