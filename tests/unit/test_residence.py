"""Where memory stores keep records: page-locked memory and GPUs, tested on a CPU with what stands in for CUDA."""

import errno
import gc
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.errors import StoreFullError
from cacheblend.store import MemoryStore, TieredStore
from cacheblend.store.residence import OnDevice, PageLocked, _register, _unregister
from store_blocks import holds, make_block, same_bits
from store_folders import disk, failing

PAGE = 4096


class Locks:
    """What CUDA would have locked: bytes by address."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.held: dict[int, int] = {}
        self.most = most
        self.times = 0

    def lock(self, address: int, nbytes: int) -> None:
        if nbytes + sum(self.held.values()) > self.most:
            raise torch.OutOfMemoryError(f"{nbytes} bytes cannot be locked")
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes
        assert all(address + nbytes <= at or at + n <= address for at, n in self.held.items()), "pages are shared"
        self.held[address] = nbytes
        self.times += 1

    def unlock(self, address: int) -> None:
        assert is_mapped(address), "memory was unmapped before it was unlocked"
        del self.held[address]

    def covers(self, record: torch.Tensor) -> bool:
        return any(
            at <= record.data_ptr() and record.data_ptr() + record.nbytes <= at + n for at, n in self.held.items()
        )


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


class NoRoom(OnDevice):
    """A device that is full after some records."""

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"))
        self.room = room

    def keep(self, records: Any) -> Any:
        self.room -= len(records)
        return None if self.room < 0 else super().keep(records)


def locked(locks: Locks, max_bytes: int = 1 << 24, **options: Any) -> MemoryStore:
    return MemoryStore(max_bytes, residence=PageLocked(locks.lock, locks.unlock, **options))


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


def test_memory_that_cannot_be_locked_is_a_full_store_and_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, block = Locks(most=0), make_block(1)
    with pytest.raises(StoreFullError, match="no memory left"):
        locked(locks).write(block)
    with TieredStore(locked(locks), disk(tmp_path)) as store:
        assert store.write(block)
        store.find([block.name])
        for _ in range(2):
            assert all(same_bits(store.read(block.name, layer), block.records[layer]) for layer in range(3))
    ordinary = locked(locks, is_required=False)  # locking that was not asked for gives way to ordinary memory
    for each in [make_block(seed) for seed in range(3)]:
        assert ordinary.write(each) and holds(ordinary, each)
    assert not locks.held
    monkeypatch.setattr("mmap.mmap", failing(errno.ENOMEM, lambda *_, **__: True, mmap.mmap))
    with pytest.raises(StoreFullError, match="no memory left"):  # what the system does not map is no memory
        locked(Locks()).write(block)


def test_memory_that_became_free_stays_locked_for_the_next_records_of_its_size() -> None:
    locks, blocks = Locks(), [make_block(seed) for seed in range(8)]
    nbytes = PageLocked(locks.lock, locks.unlock).taken(blocks[0].records)
    store = locked(locks, 2 * nbytes, spare_bytes=1 << 20)
    for block in blocks:  # evicts those before
        store.write(block)
        gc.collect()
    assert len(locks.held) <= 3 and locks.times == len(locks.held)
    assert all(holds(store, block) for block in blocks[-2:])
    locks = Locks()
    store, read = locked(locks, nbytes, spare_bytes=1 << 20), list[torch.Tensor]()
    for block in blocks:  # what is read is not given to others before it is dropped
        store.write(block)
        read.append(store.read(block.name, 1))
        gc.collect()
    assert all(same_bits(record, block.records[1]) for record, block in zip(read, blocks, strict=True))
    read.clear()
    gc.collect()
    assert sum(locks.held.values()) <= (1 << 20) + 2 * PAGE * 64
    locks, most = Locks(), 4 * PAGE
    store = locked(locks, spare_bytes=most)  # what is spare is bounded
    for seed, tokens in enumerate((5, 64, 300, 300, 5)):
        store.write(make_block(seed, tokens))
    store.close()
    gc.collect()
    assert sum(locks.held.values()) <= most


@pytest.mark.parametrize("spare_bytes", [0, 4 * PAGE, 1 << 20])
def test_nothing_stays_locked_behind_a_store(spare_bytes: int) -> None:
    """Memory that is unmapped while it is locked makes CUDA refuse the next of its address: here `Locks.lock` does."""
    locks = Locks()
    for round_ in range(4):
        store = locked(locks, spare_bytes=spare_bytes)
        blocks = [make_block(seed + 7 * round_, 5) for seed in range(7)]
        for block in blocks:
            assert store.write(block)
        record = store.read(blocks[3].name, 1)
        if round_ % 2:
            store.close()
        del store
        gc.collect()
        assert locks.covers(record) and same_bits(record, blocks[3].records[1])
        del record
        gc.collect()
        assert not locks.held


def test_memory_that_cuda_refuses_to_lock_is_ordinary_memory(caplog: pytest.LogCaptureFixture) -> None:
    locks, blocks, refused = Locks(), [make_block(seed) for seed in range(4)], [True, False, True, False]

    def lock(address: int, nbytes: int) -> None:
        if refused.pop():
            raise RuntimeError("CUDA error 712")
        locks.lock(address, nbytes)

    residence = PageLocked(lock, locks.unlock)
    store = MemoryStore(1 << 24, residence=residence)
    for block in blocks:
        assert store.write(block) and holds(store, block)
    assert [locks.covers(store.read(block.name, 0)) for block in blocks] == [True, False, True, False]
    assert residence.not_locked == 2 and caplog.text.count("cannot be page-locked") == 1


def test_memory_that_cannot_be_unlocked_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    locks, stuck = Locks(), list[Any]()
    monkeypatch.setattr("cacheblend.store.residence._stuck", stuck)

    def unlock(address: int) -> None:
        raise RuntimeError("CUDA error 713")

    store = MemoryStore(1 << 24, residence=PageLocked(locks.lock, unlock))
    store.write(make_block(1))
    store.close()
    gc.collect()
    assert len(stuck) == 1 and all(map(is_mapped, locks.held))


class Driver:
    """CUDA's runtime, as torch gives it: each call fails with an error that is then also the thread's last."""

    def __init__(self, code: int) -> None:
        self.code, self.last = code, 0

    def fail(self, *_: int) -> int:
        self.last = self.code
        return self.code

    def arange(self, *_: object, **__: object) -> None:
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error: {last}")


@pytest.mark.parametrize(
    ("code", "kind"), [(2, torch.OutOfMemoryError), (304, torch.OutOfMemoryError), (712, RuntimeError)]
)
def test_a_lock_that_fails_leaves_no_error_to_others(
    code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(code)
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=driver.fail, cudaHostUnregister=driver.fail)
    )
    monkeypatch.setattr(torch, "arange", driver.arange)
    with pytest.raises(RuntimeError) as refused:
        _register(PAGE, PAGE)
    assert refused.type is kind and not driver.last
    with pytest.raises(RuntimeError):
        _unregister(PAGE)
    assert not driver.last


FRONTS: dict[str, Callable[[int, random.Random], MemoryStore]] = {
    "here": lambda bound, draw: MemoryStore(bound),
    "locked": lambda bound, draw: locked(Locks(), bound),
    "device": lambda bound, draw: MemoryStore(bound, residence=OnDevice(torch.device("cpu"))),
    "full device": lambda bound, draw: MemoryStore(bound, residence=NoRoom(draw.randrange(12))),
}


@pytest.mark.parametrize("kind", FRONTS)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_front_keeps_is_a_cache_and_never_in_the_readers_memory(
    seed: int, kind: str, tmp_path: Path
) -> None:
    """Whatever is asked; the reader's memory is overwritten after each read, as slabs are."""
    draw = random.Random(f"{seed} {kind}")
    blocks = [make_block(number, draw.choice([5, 40])) for number in range(8)]
    small, whole = (blocks[0].layout.block_bytes(tokens) for tokens in (5, 40))
    front = FRONTS[kind](draw.choice([0, small, whole, 3 * whole, 1 << 30]), draw)
    tier, taken = "cuda" if "device" in kind else "memory", list[torch.Tensor]()

    def memory(nbytes: int) -> torch.Tensor:
        taken.append(torch.empty(nbytes, dtype=torch.uint8))
        return taken[-1]

    with TieredStore(front, disk(tmp_path)) as store:
        for block in blocks:
            store.back.write(block)
        assert store.tier_names == (tier, "disk")
        for _ in range(12):
            asked = draw.sample(blocks, draw.randrange(1, 8))
            entries = store.find([block.name for block in asked if draw.random() < 0.7])
            assert all(entry is not None and entry.tier in (tier, "disk") for entry in entries)
            first = draw.randrange(3)
            layers = range(first, draw.randrange(first, 3) + 1)
            heads = draw.choice([None, slice(0, 1)])
            read = store.read_layers([block.name for block in asked], layers, heads, draw.choice([None, memory]))
            for block, records in zip(asked, read, strict=True):
                assert isinstance(records, list)
                for layer, record in zip(layers, records, strict=True):
                    assert same_bits(record, block.records[layer][heads or slice(None)])
            for slab in taken:
                slab.fill_(255)
            taken.clear()
        assert front.stats().bytes <= front.max_bytes and front.stats().tier == tier


@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
def test_what_is_not_kept_is_read_into_the_readers_memory(max_bytes: int, tmp_path: Path) -> None:
    """Blocks that nobody looked for, and all of them in front of which nothing is kept."""
    blocks, taken = [make_block(number) for number in range(4)], list[int]()

    def memory(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    with TieredStore(MemoryStore(max_bytes), disk(tmp_path)) as store:
        for block in blocks:
            store.back.write(block)
        store.find([block.name for block in blocks[:2]])
        store.read_layers([block.name for block in blocks], range(3), None, memory)
    record = blocks[0].records[0].nbytes
    assert sum(taken) == (12 if not max_bytes else 6) * record


def test_locked_pages_count_whole_and_where_fewer_can_be_locked_the_least_used_blocks_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = [make_block(seed, 5) for seed in range(6)]
    taken = PageLocked(Locks().lock, Locks().unlock).taken(blocks[0].records)
    assert taken % PAGE == 0 and taken >= sum(record.nbytes for record in blocks[0].records)
    store = locked(Locks(), max_bytes=3 * taken)
    for block in blocks:
        store.write(block)
    assert [store.held([block.name])[0] for block in blocks] == [False] * 3 + [True] * 3
    short = locked(Locks(most=2 * taken), max_bytes=100 * taken)
    for block in blocks:
        store.read_layers([], range(1))
        assert short.write(block)
        gc.collect()
    assert [short.held([block.name])[0] for block in blocks] == [False] * 4 + [True] * 2
    assert all(holds(short, block) for block in blocks[-2:])
    assert len([record for record in caplog.records if "cannot be page-locked" in record.message]) == 1
