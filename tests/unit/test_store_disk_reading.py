"""Reading a folder's records: any layers, heads and memory, by several threads and processes, from files of one block
or several, beside damaged, missing and replaced blocks."""

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError, InvalidInputError
from cacheblend.core.load.staging_buffers import StagingMemory
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, LayerShape
from cacheblend.store import DiskStore, open_store
from cacheblend.store.disk import block_files as disk_files
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.folder import Folder
from cacheblend.store.format.block_file import encode_block
from store_blocks import ROOT, holds, make_block, make_chain, record_at, same_bits
from store_folders import block_files, disk, file_bytes, occupied

ALIKE = (LayerShape(4, 8),) * 5
MIXED = (LayerShape(4, 8), LayerShape(4, 8), LayerShape(2, 16), LayerShape(4, 24), LayerShape(4, 8))


def taking(sizes: list[int]) -> Callable[[int], torch.Tensor]:
    """A reader's memory; the sizes that were asked for."""

    def memory(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    return memory


def filled(path: Path, draw: random.Random) -> tuple[DiskStore, list[Block]]:
    """A folder with files of one block and of several."""
    store = DiskStore(path, durable=False)
    blocks: list[Block] = []
    shapes, codec, dtype, parent = ALIKE, "raw", torch.bfloat16, ROOT
    for seed in range(draw.randrange(1, 14)):
        if draw.random() < 0.4:  # another chunk
            shapes, codec = draw.choice([ALIKE, MIXED]), draw.choice(["raw", "raw", "int8"])
            dtype, parent = draw.choice([torch.bfloat16, torch.float32]), ROOT
        blocks.append(make_block(seed, draw.choice([5, 5, 32, 64]), shapes, dtype, parent, codec))
        parent = blocks[-1].name
    first = 0
    while first < len(blocks):
        last = first + draw.randrange(1, 8)
        assert all(store.write_all(blocks[first:last]))
        first = last
    return store, blocks


@pytest.mark.parametrize("seed", range(40))
def test_records_are_what_was_written(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in any order and more than once; layers of one shape and of several; parts of one thread each."""
    draw = random.Random(seed)
    monkeypatch.setattr(disk_files, "_BYTES_AT_ONCE", draw.choice([1, 20_000, 1 << 30]))
    store, blocks = filled(tmp_path / "store", draw)
    store._reads_at_once = draw.choice([1, 2, 5])
    monkeypatch.setattr("cacheblend.store.disk.store._BYTES_A_THREAD", draw.choice([1, 5000, 1 << 30]))
    with store:
        for _ in range(6):
            asked = [draw.choice(blocks) for _ in range(draw.randrange(1, 20))]
            first = draw.randrange(5)
            layers = range(first, draw.randrange(first, 5) + 1)
            heads = draw.choice([None, None, slice(0, 1), slice(1, 2), slice(0, 2)])
            lease = StagingMemory(1 << 20, 1 << 16).lease()
            memory = draw.choice([None, lease.take])
            read = store.read_layers([block.name for block in asked], layers, heads, memory)
            assert len(read) == len(asked)
            for block, records in zip(asked, read, strict=True):
                assert isinstance(records, list) and len(records) == len(layers)
                for layer, record in zip(layers, records, strict=True):
                    assert same_bits(record, block.records[layer][heads or slice(None)]), (layer, heads)


def test_many_readers_hold_no_more_files_open_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [make_block(seed, 5) for seed in range(60)]
    with disk(tmp_path) as store:
        for block in blocks:
            store.write(block)
    files = BlockFiles(Folder(tmp_path, read_only=True, durable=False, locks=False), max_open=4)
    at_once, most, lock = [0], [0], threading.Lock()
    real = disk_files.read_blocks

    def counted(known: Any, *args: Any, **options: Any) -> Any:
        with lock:
            at_once[0] += len(known)
            most[0] = max(most[0], at_once[0])
        time.sleep(0.001)
        try:
            return real(known, *args, **options)
        finally:
            with lock:
                at_once[0] -= len(known)

    monkeypatch.setattr(disk_files, "read_blocks", counted)
    names = [block.name for block in blocks]
    with ThreadPoolExecutor(3) as pool:
        reads = list(pool.map(lambda _: files.read(names, range(2), None, None), range(3)))
    files.close()
    for found in reads:
        for block, records in zip(blocks, found, strict=True):
            assert isinstance(records, list) and all(map(same_bits, records, block.records[:2]))
    assert most[0] <= 4 + 3 - 1  # each reader may have one


def test_damage_in_one_block_costs_that_block_and_no_other(tmp_path: Path) -> None:
    chain, single = make_chain(4), make_block(9, 64, ALIKE)
    names = [block.name for block in chain]
    with disk(tmp_path) as store:
        store.write_all([*chain, single])
        assert store.verify() == []
        path = Path(store.file_of(single.name))
        path.write_bytes(path.read_bytes()[:-5] + bytes([path.read_bytes()[-5] ^ 1]) + path.read_bytes()[-4:])
        (damage,) = store.verify()
        assert damage.name == single.name and "layer 4" in damage.reason and damage.removed
        path = Path(store.file_of(names[2]))
        with path.open("r+b") as file:
            file.seek(record_at(path, chain[2], 1)[0])
            file.write(b"\xff\x00\xff")
    for read_only in (True, False):  # damage that cannot be removed stays a miss
        with disk(tmp_path, read_only=read_only) as store:
            assert None not in store.find(names)
            read = store.read_layers(names, range(3))
            assert [isinstance(found, BlockDamagedError) for found in read] == [False, False, True, False]
            assert "layer 1" in str(read[2])
            for name in names:
                store._files.forget(name)  # so that the others' header is read again
            for _ in range(2):
                assert [entry is None for entry in store.find(names)] == [False, False, True, False]
            assert store.stats().damaged == 1
            assert read_only or store.verify() == []
    with disk(tmp_path) as store:
        assert store.write_all(chain) == [False, False, True, False]
        assert all(holds(store, block) for block in chain)


def test_headers_are_read_once_and_bounds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, reads, real = make_chain(6), list[int](), disk_files.read_headers

    def counted(fd: int, nbytes: int, **options: Any) -> Any:
        reads.append(fd)
        return real(fd, nbytes, **options)

    monkeypatch.setattr(disk_files, "read_headers", counted)
    names = [block.name for block in chain]
    with disk(tmp_path) as store:
        store.write_all(chain)
        for uses in range(1, 4):
            assert None not in store.find(names)
            assert len(reads) == uses
            os.utime(store.file_of(names[0]), ns=(uses, time.time_ns()))
        assert all(holds(store, block) for block in chain)
    reads.clear()
    monkeypatch.setattr(disk_files, "_TOUCH_EVERY_NS", 0)
    with disk(tmp_path) as store:
        for _ in range(3):
            assert None not in store.find(names)
            assert all(isinstance(found, list) for found in store.read_layers(names, range(3)))
        assert len(reads) == 1  # and not again when they are used
    # a reader that never looked blocks up, as a tensor-parallel rank: another process finds the blocks
    monkeypatch.setattr(disk_files, "_BYTES_AT_ONCE", 10_000)
    blocks, pieces = [make_block(seed, 32, ALIKE) for seed in range(12)], list[int]()
    with disk(tmp_path / "b") as store:
        for block in blocks:
            store.write(block)
    with disk(tmp_path / "b") as store:
        names = [BlockName(bytes(32)), *(block.name for block in blocks)]
        read = store.read_layers(names, range(1), None, taking(pieces))
        assert isinstance(read[0], BlockLostError)
        assert all(same_bits(records[0], block.records[0]) for records, block in zip(read[1:], blocks, strict=True))  # type: ignore[index]
        for layers, heads in ((range(4, 6), None), (range(-1, 1), None), (range(2), slice(3, 9))):
            with pytest.raises(InvalidInputError):
                store.read_layers(names, layers, heads)
        assert store.read_layers([], range(2)) == []
        assert store.read_layers(names[1:2], range(0)) == [[]]
    record = blocks[0].records[0].nbytes
    assert sum(pieces) == 12 * record and max(pieces) <= max(10_000, record)


@pytest.mark.parametrize("is_chain", [False, True])
def test_neighbouring_layers_are_one_read(is_chain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of several blocks for all of them together."""
    reads, pieces, real = list[int](), list[int](), os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        reads.append(sum(len(buffer) for buffer in buffers))
        return real(fd, buffers, offset)

    blocks = make_chain(6) if is_chain else [make_block(seed, 5, ALIKE) for seed in range(6)]
    with disk(tmp_path) as store:
        store.write_all(blocks)
        names, record = [block.name for block in blocks], blocks[0].records[0].nbytes
        store.find(names)
        monkeypatch.setattr(os, "preadv", counted)
        for layers in (range(1, 2), range(3)):
            for memory in (None, taking(pieces)):
                reads.clear(), pieces.clear()
                for block, records in zip(blocks, store.read_layers(names, layers, None, memory), strict=True):
                    assert isinstance(records, list) and all(map(same_bits, records, block.records[layers.start :]))
                each = [sum(block.records[layer].nbytes for layer in layers) for block in blocks]
                assert reads == ([sum(each)] if is_chain else each)
                assert pieces == ([] if memory is None else [sum(each)])
        if not is_chain:
            reads.clear(), pieces.clear()
            store.read_layers(names, range(1, 5), slice(1, 3), taking(pieces))  # heads lie apart
            assert reads == [record // 2] * 4 * 6 and pieces == [6 * 2 * record]


@pytest.mark.parametrize("failure", [errno.EIO, 0])
def test_a_failed_read_names_its_block(failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot read one place (`EIO`), or gives less than was asked for (0)."""
    chain = make_chain(4)
    with disk(tmp_path) as store:
        store.write_all(chain)
        names = [block.name for block in chain]
        store.find(names)
        bad = range(*record_at(Path(store.file_of(names[2])), chain[2], 1))
        real = os.preadv

        def failing(fd: int, buffers: Any, offset: int) -> int:
            end = offset + sum(len(buffer) for buffer in buffers)
            if failure and offset < bad.stop and bad.start < end:
                raise OSError(failure, os.strerror(failure))
            return real(fd, [buffers[0][:7]] if not failure and len(buffers) > 1 else buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        read = store.read_layers(names, range(1, 2))
        lost = [isinstance(found, BlockLostError) for found in read]
        assert lost == [False, False, bool(failure), False]
        for block, found in zip(chain, read, strict=True):
            assert isinstance(found, BlockLostError) or same_bits(found[0], block.records[1])


def test_blocks_and_parts_of_files_that_another_process_deletes_and_replaces(tmp_path: Path) -> None:
    block, other_bits = make_block(1), make_block(2)
    replaced = replace(block, records=other_bits.records)
    with disk(tmp_path) as store, disk(tmp_path) as other:
        store.write(block)
        assert holds(store, block)
        other.delete(block.name)
        assert store.find([block.name]) == [None]
        with pytest.raises(BlockLostError, match="No such file"):
            store.read(block.name, 0)
        store.write(block)
        assert holds(store, block)
        other.delete(block.name)
        other.write(replaced)
        assert same_bits(store.read(block.name, 0), block.records[0])  # the file that is open, whole
        assert holds(store, replaced)
        store._files.close_idle(0)
        other.delete(block.name)
        other.write(block)
        assert holds(store, block)
        assert store.stats().damaged == other.stats().damaged == 0
        (path,) = block_files(tmp_path)
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"damage")
        other.delete(block.name)
        other.write(block)
        with pytest.raises(BlockLostError, match="layer 0, head 0 does not match"):
            store.read(block.name, 0)  # of the old file, which it has open: that does not cost its successor
        assert holds(other, block) and holds(store, block)
    chain, bits = make_chain(3), make_block(99)  # of a file of several, whose bytes go with the last name
    changed = replace(chain[1], records=bits.records)
    with disk(tmp_path / "b") as store, disk(tmp_path / "b") as other:
        store.write_all(chain)
        assert all(holds(each, block) for each in (store, other) for block in chain)
        for left in (2, 1, 0):
            assert store.delete(chain[left].name)
            assert store.find([chain[left].name]) == other.find([chain[left].name]) == [None]
            assert all(holds(other, block) for block in chain[:left])
            assert store.stats().bytes == occupied(tmp_path / "b") == (file_bytes(chain) if left else 0)
        store.write_all(chain)
        assert all(holds(store, block) for block in chain)
        other.delete(chain[1].name)
        other.write(changed)
        assert [holds(store, block) for block in (chain[0], changed, chain[2])] == [True] * 3
        assert store.stats().damaged == other.stats().damaged == 0


def test_use_and_death_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_block(1), make_block(2)
    with disk(tmp_path) as store:
        store.write(first)
        (path,) = block_files(tmp_path)
        old = time.time_ns() - 61 * 10**9
        os.utime(path, ns=(old, old))
        store.find([first.name])
        touched = path.stat().st_mtime_ns
        assert touched > old + 60 * 10**9
        store.find([first.name])
        assert path.stat().st_mtime_ns == touched
    monkeypatch.setattr("cacheblend.store.disk.block_files._TOUCH_EVERY_NS", 0)
    with disk(tmp_path) as store, disk(tmp_path) as other:
        store.write(second)
        other.find([first.name])
        store.prune(store.stats().bytes // 2)
        assert [holds(store, b) for b in (first, second)] == [True, False]
    disk(tmp_path / "b").close()  # temporary files of the dead and of the living
    dead = tmp_path / "b" / "tmp" / "1-00000000000000aa"
    living = tmp_path / "b" / "tmp" / f"{os.getpid()}-00000000000000bb"
    for path in (dead, living):
        path.write_bytes(b"half a block")
    script = "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(living)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        disk(tmp_path / "b").close()
        assert [path.exists() for path in (dead, living)] == [False, True]
        process.communicate(b"\n")
    disk(tmp_path / "b").close()
    assert not living.exists()


@pytest.mark.parametrize("turned_off", [True, False], ids=["turned off", "refused by the file system"])
def test_without_locks(tmp_path: Path, turned_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: everything works except locks, and no call waits for one."""
    calls: list[int] = []

    def refuse(fd: int, how: int) -> None:
        calls.append(fd)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    size = sum(len(part) for part in encode_block(make_block(0)))
    url = f"file://{tmp_path}?max_bytes={3 * size + size // 2}&locks={'false' if turned_off else 'true'}"
    with open_store(url) as store:
        young, old = (tmp_path / "tmp" / f"1-00000000000000{end}" for end in ("aa", "bb"))
        for path in (young, old):
            path.write_bytes(b"half a block")
        os.utime(old, (1, 1))
        for seed in range(6):
            assert store.write(make_block(seed))
        assert holds(store, make_block(5)) and store.stats().blocks == 3
    open_store(url).close()
    assert (young.exists(), old.exists()) == (True, False)
    assert bool(calls) != turned_off


def test_a_store_opened_while_another_writes_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, fsync = make_block(1), os.fsync

    def opening(fd: int) -> None:
        fsync(fd)
        DiskStore(tmp_path, durable=False).close()

    with DiskStore(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", opening)
        store.write(block)
        monkeypatch.undo()
        assert holds(store, block)
        fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            with store._folder.locked(), pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)


def test_a_descriptor_that_went_stale_costs_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system, where another host has written the block anew."""
    with disk(tmp_path) as store:
        block = make_block(1)
        store.write(block)
        assert holds(store, block)

        def stale(*_: Any) -> int:
            raise OSError(errno.ESTALE, "Stale file handle")

        with monkeypatch.context() as network:
            network.setattr(os, "preadv", stale)
            with pytest.raises(BlockLostError, match="Stale"):
                store.read(block.name, 0)
        assert block.name not in store._files._open
        assert holds(store, block)


def test_files_that_others_deleted_are_not_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep their place on the disk, whatever bound the folder has."""
    blocks = [make_block(seed) for seed in range(6)]
    with disk(tmp_path) as store, disk(tmp_path) as other:
        for block in blocks:
            store.write(block)
            assert holds(store, block)
        for block in blocks[:4]:
            other.delete(block.name)
        assert len(store._files._open) == 6
        monkeypatch.setattr(store._files, "_next_search", 0.0)
        assert store.find([blocks[5].name])[0] is not None
        assert set(store._files._open) == {block.name for block in blocks[4:]}


def test_a_use_of_the_future_ends_with_the_next_one(tmp_path: Path) -> None:
    """As of a clock that has been set back since: the block would be the newest one, whatever is used after it."""
    block, ahead = make_block(1), time.time() + 1e6
    with disk(tmp_path) as store:
        store.write(block)
        (path,) = tmp_path.rglob(f"*{block.name.hex()}*")
        os.utime(path, (ahead, ahead))
        assert store.find([block.name])[0] is not None
        assert path.stat().st_mtime < ahead - 1000
        assert holds(store, block)
