"""The files that a store writes to its folder, of one block and of several, and what it makes of a folder that
has files already: other things, pipes, directories, format files, permissions."""

import errno
import itertools
import json
import logging
import os
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cacheblend.core.errors import InvalidInputError, StoreError, StoreFormatError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.names import as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.store import DiskStore, open_store
from cacheblend.store.disk import store as disk_store
from cacheblend.store.documents import DocumentRecord
from cacheblend.store.format.block_file import encode_block, encode_chain
from cacheblend.store.format.records import decode_manifest, encode_manifest
from store_blocks import ROOT, holds, make_block, make_chain, make_manifest, raw_block, record_at, same_bits
from store_folders import block_files, disk, everything, failing, file_bytes, inodes, occupied

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


# ---- what no store wrote -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        *(f'{{"format": {each}}}' for each in ('"x"', "1.5", "true", "0", "-1", '"1"', "null", "[]")),
    ],
)
def test_a_format_that_is_no_number_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    stored(tmp_path)[0].close()
    (tmp_path / "cacheblend.json").write_text(text)
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


# ---- files of several blocks -------------------------------------------------------------------------------


def test_blocks_that_follow_each_other_share_a_file_layer_by_layer(tmp_path: Path) -> None:
    chain = make_chain(4, tokens=6, last=3)
    with disk(tmp_path) as store:
        assert store.write_all(chain) == [True] * 4
        assert len(inodes(store, chain)) == 1
        assert store.stats().blocks == 4 and store.stats().bytes == occupied(tmp_path) == file_bytes(chain)
        assert all(holds(store, block) for block in chain)
        places = [record_at(Path(store.file_of(block.name)), block, layer) for layer in range(3) for block in chain]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert store.write_all(chain) == [False] * 4
    with disk(tmp_path) as store:
        assert all(holds(store, block) for block in reversed(chain))


def test_plain_safetensors_reads_it(tmp_path: Path) -> None:
    chain = make_chain(3, tokens=7)
    with disk(tmp_path) as store:
        store.write_all(chain)
        with safe_open(store.file_of(chain[1].name), "pt") as file:
            assert sorted(file.keys()) == [f"layer.{i:05d}.block.{n:05d}" for i in range(3) for n in range(3)]
            for n, block in enumerate(chain):
                for i, record in enumerate(block.records):
                    assert same_bits(file.get_tensor(f"layer.{i:05d}.block.{n:05d}"), record)


def test_a_file_of_one_block_is_what_it_was(tmp_path: Path) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write_all([block])
        assert Path(store.file_of(block.name)).read_bytes() == b"".join(encode_block(block))
        assert b'"format":"1"' in Path(store.file_of(block.name)).read_bytes()


def test_what_does_not_follow_or_is_large_lies_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_chain(2), make_chain(3, seed=10)
    other_layout = make_block(20, parent=second[-1].name, dtype=torch.float32)
    with disk(tmp_path) as store:
        store.write_all([*first, *second, other_layout, make_block(30)])
        assert [len(inodes(store, blocks)) for blocks in (first, second, [*first, *second])] == [1, 1, 2]
        assert len(list((tmp_path / "blocks").rglob("*"))) - len(list((tmp_path / "blocks").iterdir())) == 7
        assert len({path.stat().st_ino for path in (tmp_path / "blocks").rglob("*.safetensors")}) == 4
        record = make_block(0).records[0].nbytes
        monkeypatch.setattr(disk_store, "_READ_BYTES", 2 * record)
        chain = make_chain(5, seed=40)
        store.write_all(chain)
        assert [len(inodes(store, chain[at : at + 2])) for at in (0, 2, 4)] == [1, 1, 1] and len(
            inodes(store, chain)
        ) == 3


@pytest.mark.parametrize("shapes", [(LayerShape(4, 64),), (LayerShape(1, 8), LayerShape(4, 64))])
@pytest.mark.parametrize("first", [1, 64])
def test_the_largest_layer_bounds_a_file_however_small_its_first_block(
    first: int, shapes: tuple[LayerShape, ...]
) -> None:
    chain = [make_block(0, first, shapes)]
    for seed in range(1, 60):
        chain.append(make_block(seed, 64, shapes, parent=chain[-1].name))
    files = disk_store.chains_of(chain)
    sizes = [sum(block.records[-1].nbytes for block in file) for file in files]
    assert max(sizes) <= 512 << 10 and sum(map(len, files)) == 60 and len(files) <= 9


def test_a_deleted_passage_leaves_nothing_in_the_files_of_what_is_in_front_of_it(tmp_path: Path) -> None:
    """What is in front is shared by all passages, and stays for as long as they are used."""
    for number, tokens in enumerate((3, 40)):
        with disk(tmp_path / str(number)) as store:
            anchor = make_chain(1, tokens=tokens)
            own = make_chain(3, 10, 40, anchor[0].name)
            names = tuple(block.name for block in own)
            manifest = replace(make_manifest(own[-1]), block_names=names)
            ChunkKeeper(store).store(CapturedChunk([*anchor, *own], manifest))
            assert len(inodes(store, own)) == 1
            for name in names:
                store.delete(name)
            assert holds(store, anchor[0]) and occupied(store.path) == file_bytes(anchor)


def test_what_is_held_already_is_left_and_the_rest_shares_what_it_can(tmp_path: Path) -> None:
    chain = make_chain(5)
    with disk(tmp_path) as store:
        store.write(chain[2])
        assert store.write_all([*chain, chain[0]]) == [True, True, False, True, True, False]
        assert [len(inodes(store, blocks)) for blocks in (chain[:2], chain[3:], chain)] == [1, 1, 3]
        assert all(holds(store, block) for block in chain)


def test_an_older_folder_gets_only_files_that_older_versions_read(tmp_path: Path) -> None:
    disk(tmp_path).close()
    (tmp_path / "cacheblend.json").write_text(json.dumps({"format": 1}))
    chain = make_chain(3)
    with disk(tmp_path) as store:
        store.write_all(chain)
        assert len(inodes(store, chain)) == 3 and all(holds(store, block) for block in chain)
        assert json.loads((tmp_path / "cacheblend.json").read_text()) == {"format": 1}


def test_layouts_that_cannot_be_written_are_refused_before_anything_is(tmp_path: Path) -> None:
    shapes = (LayerShape(1, 2),)
    good = make_block(1, shapes=shapes)
    bad = Block(good.name, ROOT, good.token_ids, [good.records[0][..., :1]], KVLayout(shapes, torch.bfloat16))
    with disk(tmp_path) as store:
        with pytest.raises(ValueError, match="a record of 5 tokens"):
            store.write_all([make_block(2), bad])
        assert store.stats().blocks == 0


# ---- file systems, and what is copied ---------------------------------------------------------------------


def test_without_links_each_block_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first, second = make_chain(3), make_chain(3, seed=10)
    with disk(tmp_path) as store, caplog.at_level(logging.WARNING, "cacheblend.store"):
        assert store.write_all(first) == store.write_all(second) == [True] * 3
        assert all(holds(store, block) for block in [*first, *second]) and len(inodes(store, first)) == 3
        assert store.stats().write_failures == 0 and list((tmp_path / "tmp").iterdir()) == []
    assert [("without links" in record.getMessage()) for record in caplog.records] == [True]


def test_a_failure_that_is_not_for_links_leaves_files_of_several_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(3)
    with disk(tmp_path) as store, caplog.at_level(logging.WARNING, "cacheblend.store"):
        (tmp_path / "tmp").rename(tmp_path / "away")
        with pytest.raises(StoreError, match="No such file"):
            store.write_all(chain)
        (tmp_path / "away").rename(tmp_path / "tmp")
        store.write_all(chain)
        assert len(inodes(store, chain)) == 1 and caplog.records == []


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_fills_up_between_two_names_leaves_nothing(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, calls, real = make_chain(4), [0], os.link

    def link(source: str, target: str) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    with disk(tmp_path) as store:
        with pytest.raises(OSError, match="No space"):
            store._folder.publish(store.file_of(chain[0].name), encode_chain(chain), None, [
                store.file_of(block.name) for block in chain[1:]
            ])  # fmt: skip
        assert occupied(tmp_path) == 0 and list((tmp_path / "tmp").iterdir()) == []
        calls[0] = 0
        assert store.write_all(chain) == [True] * 4  # each alone, which takes no links
        assert all(holds(store, block) for block in chain)


def test_a_copy_without_links_is_larger_and_as_good(tmp_path: Path) -> None:
    chain = make_chain(3)
    with disk(tmp_path / "a") as store:
        store.write_all(chain)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with disk(tmp_path / "b") as store:
        assert all(holds(store, block) for block in chain) and store.verify() == []
        assert store.stats().bytes == occupied(tmp_path / "b") == 3 * file_bytes(chain)
        store.prune(file_bytes(chain))
        assert store.stats().blocks == 1
