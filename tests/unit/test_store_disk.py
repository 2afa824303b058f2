"""A folder as a store: its files, other versions, other processes, full and read-only disks."""

import errno
import fcntl
import json
import logging
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cacheblend.core.errors import (
    BlockLostError,
    InvalidInputError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreReadOnlyError,
)
from cacheblend.core.naming import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import ChunkManifest, LayerShape
from cacheblend.store import DiskStore, MemoryStore, TieredStore, open_store
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.folder import Folder
from cacheblend.store.documents import DocumentRecord
from cacheblend.store.format.block_file import encode_block
from cacheblend.store.format.manifest_file import decode_manifest, encode_manifest
from store_blocks import ROOT, holds, make_block, make_manifest, raw_block, same_bits


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/*/*.safetensors"))


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def disk(path: Path, **options: Any) -> DiskStore:
    """Without fsync, which takes long here and changes nothing that these tests see."""
    return DiskStore(path, durable=False, **options)


# The files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_safetensors_reads_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    block = make_block(1, tokens=7, dtype=dtype)
    with disk(tmp_path / "s") as store:
        store.write(block)
    (path,) = block_files(tmp_path / "s")
    assert path.parent.name == block.name.hex()[:2]
    assert path.name == f"{block.name.hex()}.safetensors"
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == [f"layer.{i:05d}" for i in range(3)]
        assert all(same_bits(file.get_tensor(f"layer.{i:05d}"), r) for i, r in enumerate(block.records))
        assert file.metadata()["name"] == block.name.hex()
        assert file.metadata()["layers"] == "2*2x4,1*1x8"


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_plain_safetensors_reads_a_compressed_file(tmp_path: Path, codec: str) -> None:
    block = make_block(1, tokens=7, codec=codec)
    with disk(tmp_path / "s") as store:
        store.write(block)
    (path,) = block_files(tmp_path / "s")
    with safe_open(path, "pt") as file:
        assert all(same_bits(file.get_tensor(f"layer.{i:05d}"), r) for i, r in enumerate(block.records))
        assert (file.metadata()["codec"], file.metadata()["dtype"]) == (codec, "BF16")


def test_the_format_s_example_is_what_is_written(tmp_path: Path) -> None:
    root = root_name("example", "float16")
    ids = as_token_ids([101, 7, 42])
    records = [torch.arange(12).add(start).reshape(1, 2, 3, 2).half() for start in (0, 100)]
    block = raw_block(block_name(root, ids), root, ids, records)
    with disk(tmp_path) as store:
        store.write(block)
    (path,) = block_files(tmp_path)
    content = path.read_bytes()
    shown = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    rows = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})", shown, re.MULTILINE)
    assert len(rows) == 34
    for at, row in rows:
        assert content[int(at, 16) : int(at, 16) + 16] == bytes.fromhex(row), at
    assert len(content) == 0x1030
    assert f"{path.relative_to(tmp_path)}" in shown


def test_blocks_pins_and_manifests_survive_a_restart(tmp_path: Path) -> None:
    made = [make_block(seed) for seed in range(4)]
    with disk(tmp_path) as store:
        for block in made:
            store.write(block)
        store.pin([made[1].name])
        store.put_manifest(make_manifest(made[0]))
    with disk(tmp_path) as store:
        assert all(holds(store, block) for block in made)
        assert [m.chunk_id for m in store.manifests()] == [made[0].name]
        store.prune(0)
        assert [store.find([b.name])[0] is not None for b in made] == [False, True, False, False]


def test_a_dtype_the_format_does_not_know(tmp_path: Path) -> None:
    with disk(tmp_path) as store, pytest.raises(InvalidInputError, match=r"float64.*bfloat16"):
        store.write(make_block(1, dtype=torch.float64))


# What is in the folder already


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    (tmp_path / "cacheblend.json").write_text(json.dumps({"format": 7}))
    before = everything(tmp_path)
    with pytest.raises(StoreFormatError, match=r"format 7.*reads formats up to 2.*upgrade cacheblend"):
        DiskStore(tmp_path)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}', "{}"])
def test_a_damaged_format_file_is_refused(tmp_path: Path, text: str) -> None:
    disk(tmp_path).close()
    (tmp_path / "cacheblend.json").write_text(text)
    with pytest.raises(StoreFormatError, match="is damaged"):
        disk(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "tmp/notes.txt", "blocks/notes.txt"])
def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match="not a store and not empty"):
        disk(tmp_path)
    assert everything(tmp_path) == {name}


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a folder"):
        disk(tmp_path / "file")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cacheblend.json").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "loop", "symbolic links")):
        for read_only in (False, True):
            with pytest.raises(StoreError) as caught:
                disk(path, read_only=read_only)
            assert f"the store in {path} cannot be read" in str(caught.value)
            assert reason in str(caught.value)
            assert "use another folder" in str(caught.value)
    monkeypatch.setattr(Path, "read_text", failing(errno.EACCES, lambda *a, **k: True, Path.read_text))
    with pytest.raises(StoreError, match="cannot be read: Permission denied; check what is there and its permissions"):
        disk(tmp_path / "other")


def test_a_part_of_the_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with disk(tmp_path) as store:
        store.write(make_block(1))
    for part, calls in (
        ("pins", (DiskStore.pinned, DiskStore.stats, DiskStore.verify)),
        ("manifests", (DiskStore.manifests, DiskStore.stats, DiskStore.verify)),
    ):
        (tmp_path / part).rmdir()
        (tmp_path / part).write_text("a file")
        with disk(tmp_path, read_only=True) as store:
            for call in calls:
                with pytest.raises(StoreError, match=rf"cannot be read: .*{part}: Not a directory"):
                    call(store)
        (tmp_path / part).unlink()
        (tmp_path / part).mkdir()


def test_a_fresh_mount_and_a_store_half_made_are_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "123-0123456789abcdef").write_text("")
    disk(tmp_path).close()
    assert everything(tmp_path) == {"cacheblend.json"}


def test_foreign_files_among_the_blocks_are_left_alone(tmp_path: Path) -> None:
    with disk(tmp_path) as store:
        store.write(make_block(1))
        for name in ("blocks/readme.txt", "blocks/ab/readme.txt", f"blocks/ab/{'g' * 64}.safetensors", "tmp/x"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
        before = everything(tmp_path)
        assert store.verify() == []
        assert store.stats().blocks == 1
    disk(tmp_path).close()
    assert everything(tmp_path) == before


# Other processes (as a second store on the folder)


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


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    made = [make_block(seed) for seed in range(30)]
    with disk(tmp_path) as store:
        for block in made:
            store.write(block)
        store._files = BlockFiles(Folder(tmp_path), max_open=4)
        before = len(descriptors())
        assert all(holds(store, block) for block in made)
        assert len(descriptors()) <= before + 4
        store._files.close()
        store._files = BlockFiles(Folder(tmp_path), max_open=1000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(descriptors())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
            assert all(holds(store, block) for block in made)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(descriptors()) <= before


def failing(number: int, when: Callable[..., bool], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call


# Read-only and failing disks


@pytest.mark.parametrize("how", ["asked", errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str | int) -> None:
    block, new = make_block(1), make_block(2)
    with disk(tmp_path) as store:
        store.write(block)
        store.put_manifest(make_manifest(block))
    (path,) = block_files(tmp_path)
    os.utime(path, ns=(10**9, 10**9))
    before = everything(tmp_path)
    if isinstance(how, int):
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        monkeypatch.setattr(os, "open", failing(how, lambda _, flags, *a: bool(flags & writes), os.open))
        for name in ("utime", "unlink", "rename", "mkdir", "writev"):
            monkeypatch.setattr(os, name, failing(how, lambda *a, **k: True, getattr(os, name)))
    with disk(tmp_path, read_only=how == "asked") as store:
        assert store.read_only
        assert holds(store, block)
        assert len(store.manifests()) == 1
        assert path.stat().st_mtime_ns == 10**9
        for write in (
            lambda: store.write(new),
            lambda: store.delete(block.name),
            lambda: store.pin([block.name]),
            lambda: store.unpin([block.name]),
            lambda: store.put_manifest(make_manifest(new)),
            lambda: store.delete_manifest(block.name),
            lambda: store.prune(0),
        ):
            with pytest.raises(StoreReadOnlyError, match="read-only or cannot be written"):
                write()
    assert everything(tmp_path) == before


def test_damage_in_a_read_only_folder_is_a_miss_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
    (path,) = block_files(tmp_path)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with disk(tmp_path, read_only=True) as store, caplog.at_level(logging.WARNING):
        with pytest.raises(BlockLostError, match="layer 2, head 0 does not match"):
            store.read(block.name, 2)
        assert [store.find([block.name]) for _ in range(3)] == [[None]] * 3
        assert store.stats().damaged == 1
        assert len(caplog.records) == 1
        assert "read-only" in caplog.text
    assert path.exists()


@pytest.mark.parametrize(("number", "stays"), [(errno.EIO, False), (errno.ENOMEM, True)])
def test_only_the_disk_s_own_error_counts_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, stays: bool
) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
        monkeypatch.setattr(os, "preadv", failing(number, lambda *a: True, os.preadv))
        with pytest.raises(BlockLostError, match=os.strerror(number)):
            store.read(block.name, 0)
        monkeypatch.undo()
        assert holds(store, block) == stays
        assert store.stats().damaged == (not stays)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    block = make_block(1)
    with disk(tmp_path / "s", max_bytes=10_000) as store:
        store.write(block)
        shutil.rmtree(tmp_path / "s")
        assert store.find([block.name]) == [None]
        assert store.manifests() == []
        for _ in range(2):
            with pytest.raises(StoreError, match="No such file"):
                store.write(make_block(2))
        assert (store.stats().write_failures, store.stats().blocks) == (2, 0)


def test_no_store_to_open_read_only(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store in"):
        disk(tmp_path / "typo", read_only=True)
    assert not (tmp_path / "typo").exists()


def test_a_mount_that_turns_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk(tmp_path) as store:
        monkeypatch.setattr(os, "rename", failing(errno.EROFS, lambda *a: True, os.rename))
        with pytest.raises(StoreReadOnlyError, match="mount"):
            store.write(make_block(1))
        assert store.stats().write_failures == 1


# Full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_full_disk_evicts_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    made = [make_block(seed) for seed in range(4)]
    new = make_block(9)
    with DiskStore(tmp_path) as store:
        for block in made:
            store.write(block)
        store.pin([made[0].name])
        free = len(made) - 1  # the disk holds this many blocks besides the one being written

        def is_full(first: int | str, *_: object) -> bool:
            is_folder = isinstance(first, int) and stat.S_ISDIR(os.fstat(first).st_mode)
            return not is_folder and len(block_files(tmp_path)) > free

        full = failing(number, is_full, getattr(os, call))
        monkeypatch.setattr(os, call, full)
        assert store.write(new)
        monkeypatch.undo()
        assert [holds(store, b) for b in [*made, new]] == [True, False, True, True, True]
        assert list((tmp_path / "tmp").iterdir()) == []
        assert (store.stats().evictions, store.stats().write_failures) == (1, 0)


def test_a_full_disk_with_nothing_to_evict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, new = make_block(1), make_block(2)
    with disk(tmp_path) as store:
        store.write(block)
        store.pin([block.name])
        before = everything(tmp_path)
        monkeypatch.setattr(os, "writev", failing(errno.ENOSPC, lambda *a: True, os.writev))
        with pytest.raises(StoreFullError, match=r"No space left.*free some space"):
            store.write(new)
        with pytest.raises(StoreFullError, match="No space left"):
            store.put_manifest(make_manifest(new))
        monkeypatch.undo()
        assert everything(tmp_path) == before | {"lock"}
        assert holds(store, block)
        assert store.write(new)


def test_a_block_whose_folder_cannot_be_synced_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as store:
        in_folder = failing(errno.EIO, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), os.fsync)
        for _ in range(2):  # with its sub-folder, and with the sub-folder there already
            monkeypatch.setattr(os, "fsync", in_folder)
            with pytest.raises(StoreError, match="Input/output error"):
                store.write(make_block(1))
            monkeypatch.undo()
            assert everything(tmp_path) - {"lock"} == {"cacheblend.json"}
            (tmp_path / "blocks" / make_block(1).name.hex()[:2]).mkdir(exist_ok=True)
        assert store.write(make_block(1))


def test_a_limit_on_file_sizes_leaves_nothing_behind(tmp_path: Path) -> None:
    script = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from store_blocks import make_block, holds
from cacheblend.core.errors import StoreFullError
from cacheblend.store import DiskStore
store = DiskStore(sys.argv[1])
small, large = make_block(1), make_block(2, tokens=400)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store.write(small)
try:
    store.write(large)
except StoreFullError as error:
    print("ulimit" in str(error), store.find([large.name]) == [None], holds(store, small))
"""
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s"), str(tests)], capture_output=True, text=True
    )
    assert run.stdout.split() == ["True"] * 3, run.stderr
    assert list((tmp_path / "s" / "tmp").iterdir()) == []
    assert len(block_files(tmp_path / "s")) == 1


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1, tokens=50, shapes=[LayerShape(2, 8)] * 600)  # more buffers than one writev takes
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [memoryview(parts[0])[:777]]))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:100]], at))
    with disk(tmp_path) as store:
        store.write(block)
        assert holds(store, block)
        monkeypatch.undo()
        store.delete(block.name)
        store.write(block)
        assert holds(store, block)


@pytest.mark.parametrize("how", ["asked", errno.EROFS])
def test_verify_says_what_was_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str | int
) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
        store.put_manifest(make_manifest(block))
    damaged = [*block_files(tmp_path), *(tmp_path / "manifests").iterdir()]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1])
    if isinstance(how, int):
        monkeypatch.setattr(os, "unlink", failing(how, lambda *a, **k: True, os.unlink))
    with disk(tmp_path, read_only=how == "asked") as store:
        for _ in range(2):
            assert [(d.kind, d.removed) for d in store.verify()] == [("block", False), ("manifest", False)]
    assert all(path.exists() for path in damaged)
    assert "; removed" not in caplog.text
    monkeypatch.undo()
    with disk(tmp_path) as store:
        assert [(d.kind, d.removed) for d in store.verify()] == [("block", True), ("manifest", True)]
    assert not any(path.exists() for path in damaged)


def test_a_manifest_that_cannot_be_opened_is_left_out_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.put_manifest(make_manifest(block))
    with disk(tmp_path) as store:
        read = failing(errno.EMFILE, lambda *a, **k: True, store._manifests.read)
        monkeypatch.setattr(store._manifests, "read", read)
        assert store.manifests() == store.verify() == []
        assert "Too many open files; left out" in caplog.text
        monkeypatch.undo()
        assert [m.chunk_id for m in store.manifests()] == [block.name]
        assert store.stats().damaged == 0


# The bound


def test_another_process_writes_are_noticed(tmp_path: Path) -> None:
    with disk(tmp_path, max_bytes=400_000) as store, disk(tmp_path, max_bytes=400_000) as other:
        for seed in range(0, 400, 2):
            store.write(make_block(seed))
            other.write(make_block(seed + 1))
        assert store.stats().bytes <= 400_000 * 33 // 32
        assert store.stats().blocks > 80
        assert holds(store, make_block(398))
        assert holds(store, make_block(399))


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


# Memory in front


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


def test_a_label_that_was_stored_with_a_lone_surrogate_can_be_shown() -> None:
    manifest = make_manifest(make_block(1), "bad \ud800 x")
    assert decode_manifest(encode_manifest(manifest), manifest.chunk_id).label == "bad ? x"


def occupied(folder: Path) -> int:
    """Bytes of all files: blocks as they are, small files in whole pages."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.parent != folder]
    return sum(_size(file) for file in files)


def _size(file: Path) -> int:
    size = file.stat().st_size
    return size if file.suffix == ".safetensors" else -(-size // 4096) * 4096


@pytest.mark.parametrize("blocks", [1, 3])
def test_manifests_and_records_count_against_the_bound(tmp_path: Path, blocks: int) -> None:
    """Many chunks of a few tokens in a small store: nothing stays of those whose blocks were evicted."""
    bound, count = 1 << 20, 700
    with DiskStore(tmp_path / "s", max_bytes=bound, durable=False) as store:
        for seed in range(count):
            chain = [make_block(seed)]
            for _ in range(blocks - 1):
                chain.append(make_block(seed, parent=chain[-1].name))
            for block in chain:
                store.write(block)
            names = tuple(block.name for block in chain)
            ids = as_token_ids([seed, 1, 2])
            store.put_manifest(ChunkManifest(names[-1], ROOT, as_token_ids([]), ids, names))
            if seed % 7 == 0:
                store.documents.put(DocumentRecord(ROOT, "c", str(seed), "", 3, (names,)))
            if seed % 50 == 0:
                assert occupied(tmp_path / "s") <= bound
        assert occupied(tmp_path / "s") <= bound
        assert store.stats().bytes == occupied(tmp_path / "s")
        last = store.manifests()
        assert 20 < len(last) < count
        assert sum(all(store.held(each.block_names)) for each in last) > len(last) // 2
        assert len(store.documents.all(ROOT)) == count // 7  # nothing asked for is dropped without a word
        store.prune(0)
        assert store.manifests() == [] and store.stats().blocks == 0


def test_a_bound_that_records_of_documents_fill_is_named(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "s", max_bytes=10 * 4096, durable=False) as store:
        with pytest.raises(StoreFullError, match="records of documents"):
            for number in range(20):
                store.documents.put(DocumentRecord(ROOT, "c", str(number), "", 0, ()))
        assert len(store.documents.all(ROOT)) == 10
