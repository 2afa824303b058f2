"""Stores in order, memory in front of a store, and write-behind: what falls through, is kept, waits, or is dropped."""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreFullError
from cacheblend.core.failures import NOT_WRITTEN, failed_since, failures
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, LayerShape
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore, WriteBehind, open_store, writer
from cacheblend.store.combined import CascadeStore
from lab.speed.throttle import ThrottledStore
from store_blocks import ROOT, before, holds, make_block, make_chain, make_manifest, same_bits
from store_folders import disk, inodes


def kinds_of(store: KVStore, *seeds: int) -> list[str]:
    return [entry.tier if entry else "" for entry in store.find([make_block(seed).name for seed in seeds])]


class Broken(MemoryStore):
    """A store that finds all blocks and cannot read them from one layer on."""

    from_layer = 0

    def read_layers(self, names: Sequence[BlockName], layers: range, heads: Any = None, memory: Any = None) -> Any:
        if layers[-1] >= self.from_layer:
            return [BlockLostError([name], "broken") for name in names]
        return super().read_layers(names, layers, heads, memory)


class Away(MemoryStore):
    """A store that does not answer."""

    @property
    def is_reachable(self) -> bool:
        return False


def test_writes_manifests_and_pins_go_to_all_of_them_and_what_the_nearest_lost_is_read_from_the_next() -> None:
    near, middle, far = MemoryStore(), MemoryStore(), MemoryStore()
    with CascadeStore([near, middle, far]) as store:
        block = make_block(1)
        assert store.write(block)
        assert holds(near, block)
        store.flush()
        assert holds(middle, block) and holds(far, block)
        assert not store.write(block)
    with CascadeStore([MemoryStore(100), MemoryStore()]) as store:  # too large for the nearest: it is kept farther
        with pytest.raises(StoreFullError):
            store.write(block)
        store.flush()
        assert holds(store, block)
    with pytest.raises(InvalidInputError, match="two stores at least"):
        CascadeStore([MemoryStore()])
    with CascadeStore([MemoryStore(), (gone := Away())]) as store:
        assert not store.is_reachable and not store.is_away, "what is not found here may be there"
        with TieredStore(MemoryStore(), gone) as alone:
            assert alone.is_away
    near, far = Broken(), MemoryStore()  # what the nearest lost is read from the next
    near.from_layer = 1
    with CascadeStore([near, far]) as store:
        block = make_block(1)
        store.write(block)
        store.flush()
        assert kinds_of(store, 1) == ["memory"]
        assert holds(store, block)
        far.delete(block.name)
        with pytest.raises(BlockLostError):
            store.read(block.name, 2)
    near, far = MemoryStore(), MemoryStore()  # manifests and pins are in all and found in any
    with CascadeStore([near, far]) as store:
        block, other = make_block(1), make_block(2)
        store.write(block)
        store.put_manifest(make_manifest(block, "title"))
        far.put_manifest(make_manifest(other, "elsewhere"))
        store.flush()
        assert near.has_manifest(block.name) and far.has_manifest(block.name)
        assert {manifest.label for manifest in store.manifests()} == {"title", "elsewhere"}
        store.pin([block.name])
        assert store.prune(0) > 0  # the manifest of a chunk that holds no block
        assert {manifest.label for manifest in store.manifests()} == {"title"}
        assert store.prune(0) == 0
        assert store.stats().blocks == 1
        assert store.pinned() == {block.name}
        assert len(store.stats().tiers) == 2


def slow() -> MemoryStore:
    """A store whose writes take a while."""
    store = MemoryStore()
    before(store, "write", lambda block: time.sleep(0.02))
    return store


@pytest.mark.parametrize("seed", range(5))
def test_what_is_deleted_stays_deleted(seed: int) -> None:
    """Writes and promotions that were queued before do not bring a block back."""
    draw = random.Random(seed)
    blocks = [make_block(number) for number in range(6)]
    gone = draw.sample(blocks, 3)
    promoted = make_block(7)
    near, far = slow(), slow()
    far.write(promoted)
    with CascadeStore([near, far]) as store:
        store.find([promoted.name])
        for layer in range(3):
            store.read(promoted.name, layer)
        for block in blocks:
            store.write(block)
        for block in [*gone, promoted]:
            assert store.delete(block.name)
            assert not store.delete(block.name)
        store.flush()
        for block in [*gone, promoted]:
            assert near.find([block.name]) == far.find([block.name]) == [None]
        assert all(holds(near, block) and holds(far, block) for block in blocks if block not in gone)


@pytest.mark.parametrize("down", [0, 1])
def test_what_one_store_did_not_delete_or_check_is_an_error_and_can_be_done_again(down: int) -> None:
    """Else what was deleted would come back from it, once it answers."""
    stores, is_down = [MemoryStore(), MemoryStore()], True

    def refuse(*_: Any) -> None:
        if is_down:
            raise StoreError("no answer")

    for call in ("delete", "unpin", "delete_manifest", "verify", "prune"):
        before(stores[down], call, refuse)
    with CascadeStore(stores) as store:
        store.write(block := make_block(1))
        store.put_manifest(manifest := make_manifest(block))
        store.flush()
        store.pin([block.name])
        asked: list[Callable[[], object]] = [
            store.verify,
            lambda: store.prune(0),
            lambda: store.unpin([block.name]),
            lambda: store.delete(block.name),
            lambda: store.delete_chunk(manifest.block_names),
        ]
        for ask in asked:
            with pytest.raises(StoreError, match="no answer"):
                ask()
        assert store.manifests() == [manifest]
        is_down = False
        for ask in asked:
            ask()
        assert not any(each.manifests() or each.pinned() or each.stats().blocks for each in stores)


@pytest.mark.may_fail(NOT_WRITTEN)
def test_what_was_pruned_stays_away_and_what_is_read_comes_nearer(tmp_path: Path) -> None:
    """By writes and promotions that were queued before."""

    def refuse(*_: Any) -> None:
        raise StoreError("gone")

    near, far = slow(), slow()
    far.write(promoted := make_block(7))
    with CascadeStore([near, far]) as store:
        assert holds(store, promoted)
        for number in range(6):
            store.write(block := make_block(number))
            store.put_manifest(make_manifest(block))
        store.prune(0)
        store.flush()
        assert [each.stats().blocks for each in (near, far)] == [0, 0]
        assert store.manifests() == []
    near, far = slow(), MemoryStore()
    for call in ("write", "prune"):
        before(far, call, refuse)
    with CascadeStore([near, far]) as store:
        for number in range(4):
            store.write(make_block(number))
        with pytest.raises(StoreError, match="gone"):
            store.prune(0)
        assert near.stats().blocks == 0
    far = MemoryStore()  # read from afar
    block, other = make_block(1), make_block(2)
    far.write_all([block, other])
    with DiskStore(tmp_path / "near") as near, CascadeStore([near, far]) as store:
        assert kinds_of(store, 1, 2) == ["memory", "memory"]
        for layer in range(3):
            store.read(other.name, layer, slice(0, 1))
        for layer in (1, 2):  # as a pass that checks at layer 1
            store.read(block.name, layer)
        store.flush()
        assert holds(near, block)
        assert near.find([other.name]) == [None]  # some heads do not make a block
        assert kinds_of(store, 1) == ["disk"]
    chain = make_chain(4)  # chains
    near, far = disk(tmp_path / "close"), disk(tmp_path / "far")
    with TieredStore(MemoryStore(1 << 20), CascadeStore([near, far])) as store:
        assert store.write_all(chain) == [True] * 4
        store.flush()
        assert [len(inodes(each, chain)) for each in (near, far)] == [1, 1]
        assert store.front.stats().blocks == 4
        assert store.write_all(chain) == [False] * 4


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_manifest_reaches_a_slow_store_behind_its_blocks_unless_it_is_deleted(is_deleted: bool) -> None:
    """Before them it would list an empty chunk, which a store may take off its list at any time."""
    near, far, go = MemoryStore(), MemoryStore(), threading.Event()
    before(far, "write", lambda block: go.wait(30))
    with CascadeStore([near, far]) as store:
        block = make_block(1)
        store.write(block)
        store.put_manifest(make_manifest(block))
        assert store.has_manifest(block.name)
        assert not is_deleted or store.delete_manifest(block.name)
        far.prune(0)
        go.set()
        store.flush()
        assert holds(far, block) and far.has_manifest(block.name) == store.has_manifest(block.name) != is_deleted


def test_tiers_have_the_plain_names_of_their_kinds_and_several_of_one_names_of_their_own(tmp_path: Path) -> None:
    for url, names in (
        ("memory", ("memory",)),
        (f"file://{tmp_path}/a", ("disk",)),
        (f"file://{tmp_path}/c?ram_bytes=1MiB", ("memory", "disk")),
    ):
        with open_store(url) as store:
            assert store.tier_names == names and list(store.tiers()) == list(names)
    url = ", ".join(f"file://{tmp_path}/{name}" for name in ("near", "middle", "far"))
    for seed, name in enumerate(("near", "middle", "far"), start=1):
        with DiskStore(tmp_path / name) as part:
            part.write(make_block(seed))
    for each, memory in ((url, ()), (f"memory://?max_bytes=1MiB, {url}", ("memory",))):
        with open_store(each) as store:
            assert store.tier_names == (*memory, "disk", "disk-2", "disk-3")
            assert kinds_of(store, 1, 2, 3, 4) == ["disk", "disk-2", "disk-3", ""]
            assert list(store.tiers()) == list(store.tier_names)
            for name, part in store.tiers().items():
                assert name == "memory" or part.find([make_block(int(f"0{name[5:]}") or 1).name]) != [None]
    with open_store(url) as store:
        assert [part.tier for part in store.stats().tiers] == ["disk", "disk-2", "disk-3"]
    with open_store(f"memory://?max_bytes=1MiB, {url.replace(', ', ',')}") as store:
        store.write(make_block(9))
        assert kinds_of(store, 9) == ["memory"]
        store.flush()
    for name in ("near", "middle", "far"):
        with DiskStore(tmp_path / name) as part:
            assert holds(part, make_block(9))

    def slow(*tiers: str) -> list[KVStore]:  # any nesting
        return [ThrottledStore(1e12, tier=tier) for tier in tiers]

    inner = CascadeStore(slow("d", "d", "d-3"))
    with CascadeStore([*slow("d-2"), inner, *slow("d"), CascadeStore(slow("d", "e"))]) as store:
        assert inner.tier_names == ("d", "d-2", "d-3")
        assert store.tier_names == ("d-2", "d", "d-3", "d-4", "d-5", "d-6", "e")
        assert len(store.tiers()) == 7
    parts = slow("s3", "a-b", "s3", "a-b", "x-2")
    for seed, part in enumerate(parts):
        part.write(make_block(seed))
    tiered = [TieredStore(MemoryStore(), CascadeStore(some)) for some in (parts[:2], parts[2:])]
    with CascadeStore(tiered) as store:
        assert store.tier_names == ("memory", "s3", "a-b", "memory-2", "s3-2", "a-b-2", "x-2")
        assert kinds_of(store, *range(5)) == ["s3", "a-b", "s3-2", "a-b-2", "x-2"]
        for layer in range(3):
            store.read(make_block(2).name, layer)
        assert kinds_of(store, 2) in (["memory-2"], ["memory"])  # the nearest gets a copy of it in the background
        assert set(store.tiers()) == set(store.tier_names)


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
    block = make_block(1)  # evicted during a read
    front = MemoryStore(10_000)
    peek = front.peek

    def peek_and_lose(name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor | None:
        record = peek(name, layer, heads)
        front.delete(name)  # as another thread's write may do
        return record

    with TieredStore(front, disk(tmp_path / "b")) as store:
        monkeypatch.setattr(front, "peek", peek_and_lose)
        for layer, heads in ((0, None), (1, slice(1, 2)), (0, None)):
            store.write(block)
            front.write(block)
            assert same_bits(store.read(block.name, layer, heads), block.records[layer][heads or slice(None)])
        front.write(block)
        with pytest.raises(InvalidInputError, match="2 KV heads"):
            store.read(block.name, 0, slice(0, 3))


SHAPES = (LayerShape(4, 4), LayerShape(4, 4), LayerShape(2, 8))
LOW, HIGH = slice(0, 2), slice(2, 4)


class Back(ThrottledStore):
    """A store of the tier "slow", which is as fast as memory and counts the records read from it."""

    def __init__(self) -> None:
        super().__init__(1e15, tier="slow", max_bytes=1 << 24)
        self.reads: list[tuple[BlockName, int, slice | None]] = []

    def read_layers(self, names: Sequence[BlockName], layers: range, heads: Any = None, memory: Any = None) -> Any:
        self.reads += [(name, layer, heads) for name in names for layer in layers]
        return super().read_layers(names, layers, heads, memory)


def stored(count: int = 1, shapes: Sequence[LayerShape] = SHAPES[:2]) -> tuple[Back, list[Block]]:
    back, blocks = Back(), [make_block(seed, 5, shapes) for seed in range(count)]
    for block in blocks:
        back.write(block)
    return back, blocks


def test_heads_take_the_bytes_that_they_have_and_make_no_block() -> None:
    """Which reads are answered by what is kept is drawn in test_store_open."""
    back, (block,) = stored(1, SHAPES)
    store = TieredStore(MemoryStore(1 << 20), back)
    _, kept = (store.read(block.name, 0, slice(0, 1)) for _ in range(2))
    assert kept.untyped_storage().nbytes() == kept.nbytes  # a part of a larger tensor does not keep it alive
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="2 KV heads"):  # those that another layer has
            store.read(block.name, 2, HIGH)
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
    back, blocks = stored(8)  # heads share the bound with whole blocks, and the oldest go first
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


class SlowStore(MemoryStore):
    """Writes only when the test allows it, and counts what is written together."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go, self.started, self.calls = threading.Event(), threading.Event(), list[int]()
        self.refused: set[bytes] = set()

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        self.started.set()
        assert self.go.wait(10)
        self.calls.append(len(blocks))
        if any(block.name in self.refused for block in blocks):
            raise StoreError("refused")
        return super().write_all(blocks)


NBYTES = sum(record.nbytes for record in make_block(1).records)


def test_blocks_and_makers_arrive_by_a_daemon_that_starts_with_the_first_and_wrong_use_is_refused() -> None:
    def mine() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "cacheblend-writer" and t.is_alive()]

    store, before = MemoryStore(1 << 20), len(mine())
    made, later, none = make_block(1), make_block(2), make_block(3)
    with WriteBehind(store) as writer:
        assert len(mine()) == before
        assert writer.submit(made)
        assert len(mine()) == before + 1 and all(thread.daemon for thread in mine())
        assert writer.submit_made(later.name, lambda: later, NBYTES)
        assert writer.submit_made(none.name, lambda: None)
        assert writer.flush(5)
        assert writer.submit(made)
        assert writer.flush(5)
        assert holds(store, made) and holds(store, later)
        assert store.stats().blocks == 2 and writer._bytes == 0
    assert len(mine()) == before


@pytest.mark.may_fail(NOT_WRITTEN)
def test_blocks_that_wait_are_dropped_withdrawn_or_written_together(caplog: pytest.LogCaptureFixture) -> None:
    already, store = failures(), SlowStore()
    writer = WriteBehind(store, max_bytes=2 * NBYTES)
    begun = time.perf_counter()
    assert [writer.submit(make_block(seed)) for seed in (1, 2, 1, 3, 2)] == [True, True, False, False, False]
    assert not writer.flush(0.05)
    assert time.perf_counter() - begun < 2
    assert not any(writer.submit(make_block(seed)) for seed in (3, 4)) and writer._bytes == 2 * NBYTES
    assert len(caplog.records) == 1 and f"{2 * NBYTES} bytes wait" in caplog.text  # once, until there is room again
    assert failed_since(already) == {NOT_WRITTEN: 3}
    store.go.set()
    assert writer.flush(5)
    assert writer.submit(make_block(3))
    assert writer.close(5)
    assert writer.close(5)
    assert not writer.submit(make_block(4))
    assert store.stats().blocks == 3
    store = SlowStore()  # withdrawn blocks
    writer = WriteBehind(store)
    being_written, waiting, other = make_block(1), make_block(2), make_block(3)
    for block in (being_written, waiting, other):
        writer.submit(block)
    assert store.started.wait(5)
    assert writer.withdraw(waiting.name)
    assert not writer.withdraw(waiting.name)
    assert writer._bytes == 2 * NBYTES
    threading.Timer(0.1, store.go.set).start()
    assert writer.withdraw(being_written.name)
    assert holds(store, being_written)  # it was waited for: a delete that follows finds it
    assert writer.close(5)
    assert holds(store, other) and store.find([waiting.name]) == [None]
    store = SlowStore()  # together with those that continue them
    first, chain, other, refused = make_block(90), make_chain(5), make_block(95), make_chain(4, seed=40)
    store.refused = {refused[1].name}
    with WriteBehind(store) as writer:
        writer.submit(first)
        assert store.started.wait(10)
        for block in [*chain[:3], other, *chain[3:]]:
            writer.submit(block)
        writer.submit_made(make_block(96).name, lambda: None)
        store.go.set()
        assert writer.flush(10)
        assert store.calls == [1, 3, 1, 2]
        assert store.stats().blocks == 7 and writer._bytes == 0
        writer.submit_all(refused)
        assert writer.flush(10)
        assert [holds(store, block) for block in refused] == [True, False, True, True]
    store = SlowStore()  # close gives up after its timeout; withdrawing one of several being written waits for them
    chain, behind = make_chain(3), make_block(90)
    writer = WriteBehind(store)
    with writer._lock:  # all of them wait before the first is taken
        for block in [*chain, behind]:
            writer.submit(block)
    assert store.started.wait(10)
    assert not writer.close(0.05)
    assert writer.is_waiting([chain[2].name]) and not writer.is_waiting([behind.name])
    threading.Timer(0.1, store.go.set).start()
    assert writer.withdraw(chain[2].name)
    assert holds(store, chain[2])
    assert writer.close(10)
    assert store.stats().blocks == 3
    assert failed_since(already) == {NOT_WRITTEN: 3 + 1 + 1}, "dropped, refused, and waiting when it was closed"


@pytest.mark.may_fail(NOT_WRITTEN)
def test_errors_are_reported_once_a_kind_and_all_of_them_counted(caplog: pytest.LogCaptureFixture) -> None:
    already, store = failures(), MemoryStore(NBYTES)
    store.pin([make_block(0).name])
    store.write(make_block(0))

    def broken() -> Block:
        raise ZeroDivisionError("a maker's own")

    with caplog.at_level(logging.WARNING, "cacheblend.store"), WriteBehind(store) as writer:
        for seed in range(1, 4):
            writer.submit(make_block(seed))
            writer.submit_made(make_block(seed + 10).name, broken)
        assert writer.flush(5)
        store.unpin([make_block(0).name])
        writer.submit(make_block(1))
        assert writer.flush(5)
        assert holds(store, make_block(1))
    assert sorted(r.getMessage().split(": ")[1] for r in caplog.records) == [
        StoreFullError.__name__,
        ZeroDivisionError.__name__,
    ]
    assert failed_since(already) == {NOT_WRITTEN: 6}


def test_what_lasts_is_the_farthest_that_answers_and_may_be_written(tmp_path: Path) -> None:
    """Else what it lacks would be computed for it again and again."""
    with disk(tmp_path / "near") as near, disk(tmp_path / "far") as far, CascadeStore([near, far]) as store:
        assert store.lasting is far and TieredStore(MemoryStore(), store).lasting is far
        far.read_only = True
        assert store.lasting is near
        near.read_only = True
        assert store.lasting is near


@pytest.mark.may_fail("store write")
def test_closing_waits_for_a_slow_store_and_not_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far, go = MemoryStore(), MemoryStore(), threading.Event()
    before(far, "write", lambda block: go.wait(30))
    store = CascadeStore([near, far])
    store.write_all([make_block(1), make_block(2)])
    monkeypatch.setattr(writer, "STUCK_S", 0.2)
    store.close()
    go.set()
    slow, written = MemoryStore(), list[BlockName]()
    before(slow, "write", lambda block: (time.sleep(0.05), written.append(block.name)))
    with CascadeStore([MemoryStore(), slow]) as store:
        for seed in range(10):
            store.write(make_block(seed))
    assert len(written) == 10


@pytest.mark.may_fail(NOT_WRITTEN)
def test_where_the_system_has_no_thread_blocks_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    already, store, block = failures(), MemoryStore(), make_block(1)
    with WriteBehind(store) as writer:
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refuse)
            assert not writer.submit(block) and not writer.is_waiting([block.name])
        assert failed_since(already) == {NOT_WRITTEN: 1}
        assert writer.submit(block) and writer.flush(5) and holds(store, block)
