"""Where memory stores keep records: page-locked memory and GPUs, tested on a CPU with what stands in for CUDA."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.errors import InvalidInputError, StoreFullError
from cacheblend.store import DiskStore, MemoryStore, TieredStore, check_store_url, open_store
from cacheblend.store.open import parse_store_url
from cacheblend.store.places import CascadePlace, DevicePlace, FolderPlace, MemoryPlace, TieredPlace
from cacheblend.store.residence import OnDevice, PageLocked
from store_blocks import holds, make_block, same_bits

PAGE = 4096


class Locks:
    """What CUDA would have locked: bytes by address."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.held: dict[int, int] = {}
        self.most = most

    def lock(self, address: int, nbytes: int) -> None:
        if nbytes + sum(self.held.values()) > self.most:
            raise torch.OutOfMemoryError(f"{nbytes} bytes cannot be locked")
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes
        assert all(address + nbytes <= at or at + n <= address for at, n in self.held.items()), "pages are shared"
        self.held[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.held[address]

    def covers(self, record: torch.Tensor) -> bool:
        return any(
            at <= record.data_ptr() and record.data_ptr() + record.nbytes <= at + n for at, n in self.held.items()
        )


class NoRoom(OnDevice):
    """A device that is full after some records."""

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"))
        self.room = room

    def keep(self, records: Any) -> Any:
        self.room -= len(records)
        return None if self.room < 0 else super().keep(records)


def locked(locks: Locks, max_bytes: int = 1 << 24) -> MemoryStore:
    return MemoryStore(max_bytes, residence=PageLocked(locks.lock, locks.unlock))


def test_a_block_lies_in_locked_memory_of_its_own_for_as_long_as_somebody_reads_it() -> None:
    locks = Locks()
    store = locked(locks)
    blocks = [make_block(seed, tokens) for seed, tokens in enumerate((5, 64, 300))]
    for block in blocks:
        assert store.write(block) and holds(store, block)
    assert len(locks.held) == 3
    record = store.read(blocks[1].name, 2)
    assert locks.covers(record)
    for block in blocks:
        store.delete(block.name)
    gc.collect()
    assert len(locks.held) == 1 and locks.covers(record)
    assert same_bits(record, blocks[1].records[2])
    del record
    gc.collect()
    assert not locks.held


def test_memory_that_cannot_be_locked_is_a_full_store_and_costs_no_answer(tmp_path: Path) -> None:
    locks, block = Locks(most=0), make_block(1)
    with pytest.raises(StoreFullError, match="no memory left"):
        locked(locks).write(block)
    with TieredStore(locked(locks), DiskStore(tmp_path, durable=False)) as store:
        assert store.write(block)
        store.find([block.name])
        for _ in range(2):
            assert all(same_bits(store.read(block.name, layer), block.records[layer]) for layer in range(3))


@pytest.mark.parametrize("seed", range(6))
def test_a_device_in_front_of_a_folder_is_a_cache_of_it(seed: int, tmp_path: Path) -> None:
    """Whatever is asked, in front of whatever: with room for a few records the rest comes from behind."""
    draw = random.Random(seed)
    blocks = [make_block(number, draw.choice([5, 40])) for number in range(8)]
    whole = blocks[0].layout.block_bytes(40)
    residence = draw.choice([OnDevice(torch.device("cpu")), NoRoom(draw.randrange(12))])
    front = MemoryStore(draw.choice([whole, 3 * whole, 1 << 30]), residence=residence)
    with TieredStore(front, DiskStore(tmp_path, durable=False)) as store:
        for block in blocks:
            store.back.write(block)
        assert store.tier_names == ("cuda", "disk")
        for _ in range(12):
            asked = draw.sample(blocks, draw.randrange(1, 8))
            entries = store.find([block.name for block in asked])
            assert all(entry is not None and entry.tier in ("cuda", "disk") for entry in entries)
            first = draw.randrange(3)
            layers = range(first, draw.randrange(first, 3) + 1)
            heads = draw.choice([None, slice(0, 1)])
            for block, read in zip(asked, store.read_layers([b.name for b in asked], layers, heads), strict=True):
                assert isinstance(read, list)
                for layer, record in zip(layers, read, strict=True):
                    assert same_bits(record, block.records[layer][heads or slice(None)])
        assert front.stats().bytes <= front.max_bytes
        assert front.stats().tier == "cuda"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("cuda://?max_bytes=1GiB", DevicePlace(1 << 30)),
        ("cuda://3?max_bytes=1GiB&ttl=1h&evict=worth", DevicePlace(1 << 30, 3, 3600.0, "worth")),
        ("memory://?page_locked=true", MemoryPlace(page_locked=True)),
        ("cuda://?max_bytes=1KiB, memory://?max_bytes=2KiB", TieredPlace(DevicePlace(1024), MemoryPlace(2048))),
        (
            "cuda://1?max_bytes=1KiB, memory://?max_bytes=2KiB&page_locked=true, file:///a, file:///b",
            TieredPlace(
                DevicePlace(1024, 1),
                TieredPlace(
                    MemoryPlace(2048, page_locked=True),
                    CascadePlace((FolderPlace((Path("/a"),)), FolderPlace((Path("/b"),)))),
                ),
            ),
        ),
        ("cuda://?max_bytes=1KiB, file:///a", TieredPlace(DevicePlace(1024), FolderPlace((Path("/a"),)))),
    ],
)
def test_urls_name_places(url: str, place: object) -> None:
    assert parse_store_url(url) == place


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("cuda://", "a cuda store needs a bound.*max_bytes=8GiB"),
        ("cuda://a?max_bytes=1GiB", "must name a GPU by its number"),
        ("cuda://0/folder?max_bytes=1GiB", "must name a GPU by its number"),
        ("cuda://-1?max_bytes=1GiB", "must name a GPU by its number"),
        ("cuda://?max_bytes=1GiB&ram_bytes=1", "no option 'ram_bytes'"),
        ("cuda://?max_bytes=1GiB&ttl=1h, file:///a", "in front of other stores has no option 'ttl'"),
        ("file:///a, cuda://?max_bytes=1GiB", "cuda:// can only stand in front"),
        ("memory://, cuda://?max_bytes=1GiB", "cuda:// can only stand in front"),
        ("cuda://?max_bytes=1, cuda://1?max_bytes=1, file:///a", "cuda:// can only stand in front"),
        ("cuda://?max_bytes=1, file:///a, memory://", "memory:// can only stand in front"),
        ("memory://, memory://", "memory:// can only stand in front"),
        ("memory://?page_locked=yes", "page_locked must be true or false"),
        ("cuda://?max_bytes=1GiB&page_locked=true", "no option 'page_locked'"),
    ],
)
def test_urls_that_name_nothing(url: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_store_url(url)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("url", ["cuda://?max_bytes=1GiB", "cuda://2?max_bytes=1GiB", "memory://?page_locked=true"])
def test_without_a_gpu_the_message_says_so(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"there are 0 GPUs here|needs a GPU, and there is none"):
        open_store(url)
