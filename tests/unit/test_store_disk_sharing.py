"""Several processes on one folder, each as a store of its own: blocks deleted and replaced, use, locks, writes."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend.core.errors import BlockLostError
from cacheblend.store import DiskStore, open_store
from cacheblend.store.format.block_file import encode_block
from store_blocks import holds, make_block, same_bits
from store_folders import block_files, disk


def test_a_block_deleted_by_another_process_is_a_miss(tmp_path: Path) -> None:
    block = make_block(1)
    with disk(tmp_path) as store, disk(tmp_path) as other:
        store.write(block)
        assert holds(store, block)
        other.delete(block.name)
        assert store.find([block.name]) == [None]
        with pytest.raises(BlockLostError, match="No such file"):
            store.read(block.name, 0)
        assert store.stats().damaged == 0


def test_a_block_replaced_by_another_process_reads_as_the_new_one(tmp_path: Path) -> None:
    block, other_bits = make_block(1), make_block(2)
    replaced = replace(block, records=other_bits.records)
    with disk(tmp_path) as store, disk(tmp_path) as other:
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


def test_damage_in_a_file_that_has_been_replaced_does_not_cost_its_successor(tmp_path: Path) -> None:
    block = make_block(1)
    with disk(tmp_path) as store, disk(tmp_path) as other:
        store.write(block)
        assert holds(store, block)
        (path,) = block_files(tmp_path)
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"damage")
        other.delete(block.name)
        other.write(block)
        with pytest.raises(BlockLostError, match="layer 0, head 0 does not match"):
            store.read(block.name, 0)  # of the old file, which it has open
        assert holds(other, block)
        assert holds(store, block)


def test_use_by_one_process_counts_for_eviction_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.store.disk.block_files._TOUCH_EVERY_NS", 0)
    first, second = make_block(1), make_block(2)
    with disk(tmp_path) as store, disk(tmp_path) as other:
        store.write(first)
        store.write(second)
        other.find([first.name])
        store.prune(store.stats().bytes // 2)
        assert [holds(store, b) for b in (first, second)] == [True, False]


def test_a_find_touches_the_file_once_a_minute(tmp_path: Path) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
        (path,) = block_files(tmp_path)
        old = time.time_ns() - 61 * 10**9
        os.utime(path, ns=(old, old))
        store.find([block.name])
        touched = path.stat().st_mtime_ns
        assert touched > old + 60 * 10**9
        store.find([block.name])
        assert path.stat().st_mtime_ns == touched


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    disk(tmp_path).close()
    dead = tmp_path / "tmp" / "1-00000000000000aa"
    living = tmp_path / "tmp" / f"{os.getpid()}-00000000000000bb"
    for path in (dead, living):
        path.write_bytes(b"half a block")
    script = "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(living)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        disk(tmp_path).close()
        assert [path.exists() for path in (dead, living)] == [False, True]
        process.communicate(b"\n")
    disk(tmp_path).close()
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


def test_a_lock_that_another_holds_is_waited_for(tmp_path: Path) -> None:
    with disk(tmp_path) as store:
        store.write(make_block(1))
        fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            with store._folder.locked(), pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)


def test_a_store_opened_while_a_block_is_written_does_not_harm_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1)
    fsync = os.fsync

    def opening(fd: int) -> None:
        fsync(fd)
        DiskStore(tmp_path, durable=False).close()

    with DiskStore(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", opening)
        store.write(block)
        monkeypatch.undo()
        assert holds(store, block)


def test_another_process_writes_are_noticed(tmp_path: Path) -> None:
    with disk(tmp_path, max_bytes=400_000) as store, disk(tmp_path, max_bytes=400_000) as other:
        for seed in range(0, 400, 2):
            store.write(make_block(seed))
            other.write(make_block(seed + 1))
        assert store.stats().bytes <= 400_000 * 33 // 32
        assert store.stats().blocks > 80
        assert holds(store, make_block(398))
        assert holds(store, make_block(399))
