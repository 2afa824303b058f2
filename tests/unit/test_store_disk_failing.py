"""Folders that cannot be written, disks that fail, and calls that do a part of what was asked."""

import errno
import logging
import os
import resource
import shutil
import stat
from pathlib import Path

import pytest

from cacheblend.core.errors import BlockLostError, StoreError, StoreReadOnlyError
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.store import DiskStore
from cacheblend.store.disk import sealed_files
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.folder import Folder
from store_blocks import holds, make_block, make_manifest
from store_folders import block_files, disk, everything, failing

# ---- read-only --------------------------------------------------------------------------------------------


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


def test_a_mount_that_turns_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk(tmp_path) as store:
        monkeypatch.setattr(os, "rename", failing(errno.EROFS, lambda *a: True, os.rename))
        with pytest.raises(StoreReadOnlyError, match="mount"):
            store.write(make_block(1))
        assert store.stats().write_failures == 1


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


# ---- errors of the system ---------------------------------------------------------------------------------


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


def test_a_manifest_that_cannot_be_opened_is_left_out_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.put_manifest(make_manifest(block))
    with disk(tmp_path) as store:
        monkeypatch.setattr(sealed_files, "open", failing(errno.EMFILE, lambda *a, **k: True, open), raising=False)
        assert store.manifests() == store.verify() == []
        assert "Too many open files; left out" in caplog.text
        monkeypatch.undo()
        assert [m.chunk_id for m in store.manifests()] == [block.name]
        assert store.stats().damaged == 0


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


def descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


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
