"""What stands in a store's folder that no store wrote: pipes, directories, format files, permissions."""

import os
import stat
from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.store import open_store
from cacheblend.store.disk import DiskStore
from cacheblend.store.documents import DocumentRecord
from store_blocks import make_block


def stored(folder: Path) -> tuple[DiskStore, bytes, Path]:
    """A store with a block: the store, the block's name and its file."""
    store = DiskStore(folder, durable=False)
    block = make_block(1)
    assert store.write(block)
    (file,) = (folder / "blocks").rglob("*.safetensors")
    return store, block.name, file


@pytest.mark.parametrize("what", ["pipe", "empty directory", "full directory"])
def test_what_is_no_file_is_reported_and_a_block_can_be_written_there_again(tmp_path: Path, what: str) -> None:
    store, name, file = stored(tmp_path)
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
        if what == "full directory":
            (file / "mine").write_text("kept")
    with store:
        (damage,) = store.verify()
        assert damage.name == name and damage.removed and "no regular file" in damage.reason
        assert store.find([name]) == [None] and store.verify() == []
        assert store.write(make_block(1)) and store.find([name]) != [None]
    kept = list(tmp_path.rglob("mine"))
    assert [each.read_text() for each in kept] == (["kept"] if what == "full directory" else [])


@pytest.mark.parametrize("version", ["1.5", "true", "0", "-1", '"1"', "null", "[]"])
def test_a_format_that_is_no_number_of_ours_is_refused(tmp_path: Path, version: str) -> None:
    stored(tmp_path)[0].close()
    (tmp_path / "cacheblend.json").write_text(f'{{"format": {version}}}')
    with pytest.raises(StoreError, match=r"damaged.*write"):
        DiskStore(tmp_path)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_deleted_format_file_is_named_with_the_way_out(tmp_path: Path, read_only: bool) -> None:
    stored(tmp_path)[0].close()
    text = (tmp_path / "cacheblend.json").read_text()
    (tmp_path / "cacheblend.json").unlink()
    with pytest.raises(StoreError) as error:
        DiskStore(tmp_path, read_only=read_only)
    assert repr(text) in str(error.value)  # what to write, to be taken as it is
    (tmp_path / "cacheblend.json").write_text(text)
    with DiskStore(tmp_path) as store:
        assert store.stats().blocks == 1


@pytest.mark.parametrize(("option", "file", "folder"), [("", 0o600, 0o700), ("?mode=0660", 0o660, 0o770)])
def test_permissions_of_files_and_folders(tmp_path: Path, option: str, file: int, folder: int) -> None:
    before = os.umask(0o022)
    try:
        with open_store(f"file://{tmp_path}/store{option}", ram_bytes=0) as store:
            block = make_block(1)
            store.write(block)
            store.pin([block.name])
            with store.documents.changing(block.name):
                store.documents.put(DocumentRecord(block.name, "c", "one", "0f" * 32, 3, ((block.name,),)))
            store.prune(0)
    finally:
        os.umask(before)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


@pytest.mark.parametrize("mode", ["0", "0444", "9", "rw", "0o600", "01777"])
def test_a_mode_that_is_none_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(InvalidInputError, match="octal"):
        open_store(f"file://{tmp_path}/store?mode={mode}")


def test_prune_says_how_far_it_is(tmp_path: Path) -> None:
    store, _, _ = stored(tmp_path)
    told: list[tuple[int, int]] = []
    with store:
        freed = store.prune(0, lambda done, total: told.append((done, total)))
    assert told == [(freed, freed)] and freed > 0
