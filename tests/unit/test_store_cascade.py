"""Stores in order, nearest first: reads that fall through, promotion, and writes to farther stores."""

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, RecordMemory
from cacheblend.store import DiskStore, KVStore, MemoryStore, open_store
from cacheblend.store.base import Progress
from cacheblend.store.combined import CascadeStore, TieredStore
from lab.speed.throttle import ThrottledStore
from store_blocks import holds, make_block, make_manifest


def tiers_of(store: KVStore, seed: int) -> str:
    (entry,) = store.find([make_block(seed).name])
    return entry.tier if entry else ""


class Broken(MemoryStore):
    """A store that finds all blocks and cannot read them from one layer on."""

    from_layer = 0

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        if layers[-1] >= self.from_layer:
            return [BlockLostError([name], "broken") for name in names]
        return super().read_layers(names, layers, heads, memory)


def test_a_write_goes_to_all_of_them_and_the_nearest_has_it_at_once() -> None:
    near, middle, far = MemoryStore(), MemoryStore(), MemoryStore()
    with CascadeStore([near, middle, far]) as store:
        block = make_block(1)
        assert store.write(block)
        assert holds(near, block)
        store.flush()
        assert holds(middle, block) and holds(far, block)
        assert not store.write(block)


def test_what_is_read_from_afar_comes_nearer(tmp_path: Path) -> None:
    far = MemoryStore()
    block = make_block(1)
    far.write(block)
    with DiskStore(tmp_path / "near") as near, CascadeStore([near, far]) as store:
        assert tiers_of(store, 1) == "memory"
        for layer in (1, 2):  # as a pass that checks at layer 1
            store.read(block.name, layer)
        store.flush()
        assert holds(near, block)
        assert tiers_of(store, 1) == "disk"


class Slow(MemoryStore):
    """A store whose writes take a while."""

    def write(self, block: Block) -> bool:
        time.sleep(0.02)
        return super().write(block)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_deleted_stays_deleted(seed: int) -> None:
    """Writes and promotions that were queued before do not bring a block back."""
    draw = random.Random(seed)
    blocks = [make_block(number) for number in range(6)]
    gone = draw.sample(blocks, 3)
    promoted = make_block(7)
    near, far = Slow(), Slow()
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


def test_what_is_pruned_is_not_written_afterwards() -> None:
    """By writes and promotions that were queued before."""
    near, far = Slow(), Slow()
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


class Refusing(MemoryStore):
    """A store that takes nothing and cannot be pruned."""

    def write(self, block: Block) -> bool:
        raise StoreError("gone")

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        raise StoreError("gone")


def test_a_cascade_is_pruned_beside_a_store_that_is_gone() -> None:
    """What waits for it fails, and is waited for no longer."""
    near = MemoryStore()
    with CascadeStore([near, Refusing()]) as store:
        for number in range(4):
            store.write(make_block(number))
        assert store.prune(0) > 0
        assert near.stats().blocks == 0


def test_some_heads_do_not_make_a_block(tmp_path: Path) -> None:
    far = MemoryStore()
    block = make_block(1)
    far.write(block)
    with DiskStore(tmp_path / "near") as near, CascadeStore([near, far]) as store:
        store.find([block.name])
        for layer in range(3):
            store.read(block.name, layer, slice(0, 1))
        store.flush()
        assert near.find([block.name]) == [None]


def test_what_the_nearest_lost_is_read_from_the_next() -> None:
    near, far = Broken(), MemoryStore()
    near.from_layer = 1
    with CascadeStore([near, far]) as store:
        block = make_block(1)
        store.write(block)
        store.flush()
        assert tiers_of(store, 1) == "memory"
        assert holds(store, block)
        far.delete(block.name)
        with pytest.raises(BlockLostError):
            store.read(block.name, 2)


def test_a_block_too_large_for_the_nearest_is_kept_farther() -> None:
    near, far = MemoryStore(100), MemoryStore()
    with CascadeStore([near, far]) as store:
        with pytest.raises(StoreFullError):
            store.write(make_block(1))
        store.flush()
        assert holds(store, make_block(1))


def test_manifests_and_pins_are_in_all_and_found_in_any(tmp_path: Path) -> None:
    near, far = MemoryStore(), MemoryStore()
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


class Waiting(MemoryStore):
    """A store whose writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, block: Block) -> bool:
        assert self.go.wait(30)
        return super().write(block)


def test_a_manifest_reaches_a_slow_store_behind_its_blocks() -> None:
    """Before them it would list an empty chunk, which a store may take off its list at any time."""
    near, far = MemoryStore(), Waiting()
    with CascadeStore([near, far]) as store:
        block = make_block(1)
        store.write(block)
        store.put_manifest(make_manifest(block))
        assert store.has_manifest(block.name)
        far.prune(0)
        far.go.set()
        store.flush()
        assert holds(far, block) and far.has_manifest(block.name)


def test_a_manifest_that_waits_is_deleted_with_the_others() -> None:
    near, far = MemoryStore(), Waiting()
    with CascadeStore([near, far]) as store:
        block = make_block(1)
        store.write(block)
        store.put_manifest(make_manifest(block))
        assert store.delete_manifest(block.name)
        far.go.set()
        store.flush()
        assert holds(far, block) and not store.has_manifest(block.name)


def kinds_of(store: KVStore, *seeds: int) -> list[str]:
    return [entry.tier if entry else "" for entry in store.find([make_block(seed).name for seed in seeds])]


def test_two_disks_have_names_of_their_own(tmp_path: Path) -> None:
    url = ", ".join(f"file://{tmp_path}/{name}" for name in ("near", "middle", "far"))
    for seed, name in enumerate(("near", "middle", "far"), start=1):
        with DiskStore(tmp_path / name) as part:
            part.write(make_block(seed))
    for given, memory in ((url, ()), (f"memory://?max_bytes=1MiB, {url}", ("memory",))):
        with open_store(given) as store:
            assert store.tier_names == (*memory, "disk", "disk-2", "disk-3")
            assert kinds_of(store, 1, 2, 3, 4) == ["disk", "disk-2", "disk-3", ""]
            assert list(store.tiers()) == list(store.tier_names)
            for name, part in store.tiers().items():
                assert name == "memory" or part.find([make_block(int(f"0{name[5:]}") or 1).name]) != [None]
    with open_store(url) as store:
        assert [part.tier for part in store.stats().tiers] == ["disk", "disk-2", "disk-3"]


def test_stores_of_one_kind_have_the_plain_name(tmp_path: Path) -> None:
    for url, names in (
        ("memory", ("memory",)),
        (f"file://{tmp_path}/a", ("disk",)),
        (f"file://{tmp_path}/c?ram_bytes=1MiB", ("memory", "disk")),
    ):
        with open_store(url) as store:
            assert store.tier_names == names and list(store.tiers()) == list(names)


def test_names_of_combined_stores_inside_of_others() -> None:
    slow = [ThrottledStore(1e12, tier=tier) for tier in ("s3", "a-b", "s3", "a-b", "x-2")]
    inner = [TieredStore(MemoryStore(), CascadeStore(part)) for part in (slow[:2], slow[2:])]
    for seed, part in enumerate(slow):
        part.write(make_block(seed))
    with CascadeStore(inner) as store:
        assert store.tier_names == ("memory", "s3", "a-b", "memory-2", "s3-2", "a-b-2", "x-2")
        assert kinds_of(store, *range(5)) == ["s3", "a-b", "s3-2", "a-b-2", "x-2"]
        for layer in range(3):
            store.read(make_block(2).name, layer)
        assert kinds_of(store, 2) in (["memory-2"], ["memory"])  # the nearest gets a copy of it in the background
        assert set(store.tiers()) == set(store.tier_names)


def test_any_nesting_gives_each_tier_a_name() -> None:
    def slow(*tiers: str) -> list[KVStore]:
        return [ThrottledStore(1e12, tier=tier) for tier in tiers]

    inner = CascadeStore(slow("d", "d", "d-3"))
    with CascadeStore([*slow("d-2"), inner, *slow("d"), CascadeStore(slow("d", "e"))]) as store:
        assert inner.tier_names == ("d", "d-2", "d-3")
        assert store.tier_names == ("d-2", "d", "d-3", "d-4", "d-5", "d-6", "e")
        assert len(store.tiers()) == 7


def test_urls_with_commas(tmp_path: Path) -> None:
    url = f"memory://?max_bytes=1MiB, file://{tmp_path}/near?max_bytes=1MiB,file://{tmp_path}/far"
    with open_store(url) as store:
        store.write(make_block(1))
        assert tiers_of(store, 1) == "memory"
        store.flush()
    for name in ("near", "far"):
        with DiskStore(tmp_path / name) as part:
            assert holds(part, make_block(1))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///tmp/no-such-a,memory://", "only stand in front"),
        ("file:///tmp/no-such-a,gs://b", "unknown scheme 'gs'"),
    ],
)
def test_what_cannot_be_cascaded(url: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_store(url)
    with pytest.raises(InvalidInputError, match="two stores at least"):
        CascadeStore([MemoryStore()])
    with pytest.raises(InvalidInputError, match="a bound of its own"):
        open_store("file:///tmp/no-such-a,file:///tmp/no-such-b", max_bytes=1)
