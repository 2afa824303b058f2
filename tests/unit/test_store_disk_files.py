"""The files that a store writes to its folder, and what it makes of a folder that has files already."""

import errno
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cacheblend.core.errors import InvalidInputError, StoreError, StoreFormatError
from cacheblend.core.names import as_token_ids, block_name, root_name
from cacheblend.store import DiskStore
from cacheblend.store.format.manifest_file import decode_manifest, encode_manifest
from store_blocks import holds, make_block, make_manifest, raw_block, same_bits
from store_folders import block_files, disk, everything, failing

# ---- what is written --------------------------------------------------------------------------------------


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


def test_a_label_that_was_stored_with_a_lone_surrogate_can_be_shown() -> None:
    manifest = make_manifest(make_block(1), "bad \ud800 x")
    assert decode_manifest(encode_manifest(manifest), manifest.chunk_id).label == "bad ? x"


# ---- what is in the folder already ------------------------------------------------------------------------


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


def test_no_store_to_open_read_only(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store in"):
        disk(tmp_path / "typo", read_only=True)
    assert not (tmp_path / "typo").exists()
