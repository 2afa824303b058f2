"""The files that a store writes to its folder, of one block and of several, what it makes of a folder that has files
already or cannot be written, and of disks that fail."""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreFormatError, StoreReadOnlyError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.names import as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.store import DiskStore, open_store
from cacheblend.store.disk import folder
from cacheblend.store.disk import store as disk_store
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.folder import Folder
from cacheblend.store.documents import DocumentRecord
from cacheblend.store.format.block_file import encode_block, encode_chain
from cacheblend.store.format.records import decode_manifest, encode_manifest
from store_blocks import ROOT, holds, make_block, make_chain, make_manifest, raw_block, record_at, same_bits
from store_folders import block_files, disk, everything, failing, file_bytes, inodes, occupied


@pytest.mark.parametrize(
    ("count", "dtype", "codec"),
    [
        *((1, dtype, "raw") for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *((count, torch.bfloat16, codec) for count, codec in ((1, "int8"), (1, "int4"), (3, "raw"))),
    ],
)
def test_plain_safetensors_reads_the_file(tmp_path: Path, count: int, dtype: torch.dtype, codec: str) -> None:
    chain = make_chain(count, tokens=7) if count > 1 else [make_block(1, tokens=7, dtype=dtype, codec=codec)]
    with disk(tmp_path / "s") as store:
        store.write_all(chain)
    path = next(path for path in block_files(tmp_path / "s") if path.name == f"{chain[0].name.hex()}.safetensors")
    assert path.parent.name == chain[0].name.hex()[:2]
    with safe_open(path, "pt") as file:
        expected = {
            f"layer.{layer:05d}" + (f".block.{number:05d}" if count > 1 else ""): record
            for number, block in enumerate(chain)
            for layer, record in enumerate(block.records)
        }
        assert set(file.keys()) == set(expected)
        assert all(same_bits(file.get_tensor(key), record) for key, record in expected.items())
        metadata = file.metadata()
    assert metadata["name"] == ",".join(block.name.hex() for block in chain)
    assert (metadata["layers"], metadata["format"]) == ("2*2x4,1*1x8", "1" if count == 1 else "2")
    assert metadata.get("codec", "raw") == codec and (codec == "raw" or metadata["dtype"] == "BF16")
    if count == 1:  # it is what it was before there were files of several
        assert path.read_bytes() == b"".join(encode_block(chain[0]))


def test_what_was_written_is_that_of_the_format_and_survives_a_restart(tmp_path: Path) -> None:
    root = root_name("example", "float16")
    ids = as_token_ids([101, 7, 42])
    records = [torch.arange(12).add(start).reshape(1, 2, 3, 2).half() for start in (0, 100)]
    block = raw_block(block_name(root, ids), root, ids, records)
    with disk(tmp_path / "f") as store:
        store.write(block)
    (path,) = block_files(tmp_path / "f")
    content = path.read_bytes()
    shown = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    rows = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})", shown, re.MULTILINE)
    assert len(rows) == 34
    for at, row in rows:
        assert content[int(at, 16) : int(at, 16) + 16] == bytes.fromhex(row), at
    assert len(content) == 0x1030
    assert f"{path.relative_to(tmp_path / 'f')}" in shown
    made = [make_block(seed) for seed in range(4)]  # a restart
    with disk(tmp_path / "r") as store:
        for block in made:
            store.write(block)
        store.pin([made[1].name])
        store.put_manifest(make_manifest(made[0]))
    told: list[tuple[int, int]] = []
    with disk(tmp_path / "r") as store:
        assert all(holds(store, block) for block in made)
        assert [m.chunk_id for m in store.manifests()] == [made[0].name]
        store.prune(0, lambda done, total: told.append((done, total)))
        assert [store.find([b.name])[0] is not None for b in made] == [False, True, False, False]
    assert len(told) == 3 and sorted(told) == told and 0 < told[-1][0] <= told[-1][1]
    shapes = (LayerShape(1, 2),)  # what cannot be written
    good = make_block(1, shapes=shapes)
    bad = Block(good.name, ROOT, good.token_ids, [good.records[0][..., :1]], KVLayout(shapes, torch.bfloat16))
    with disk(tmp_path / "r" / "b") as store:
        with pytest.raises(InvalidInputError, match=r"float64.*bfloat16"):
            store.write(make_block(1, dtype=torch.float64))
        with pytest.raises(ValueError, match="a record of 5 tokens"):
            store.write_all([make_block(2), bad])
        assert store.stats().blocks == 0
    manifest = make_manifest(make_block(1), "bad \ud800 x")
    assert decode_manifest(encode_manifest(manifest), manifest.chunk_id).label == "bad ? x"


@pytest.mark.parametrize("name", ["notes.txt", "tmp/notes.txt", "blocks/notes.txt"])
def test_a_folder_that_is_no_store_of_ours_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match="not a store and not empty"):
        disk(tmp_path)
    with pytest.raises(StoreError, match="not a folder"):
        disk(tmp_path / name)
    with pytest.raises(StoreError, match="no store in"):
        disk(tmp_path / "typo", read_only=True)
    assert everything(tmp_path) == {name} and not (tmp_path / "typo").exists()
    disk(tmp_path / "newer").close()
    (tmp_path / "newer" / "cacheblend.json").write_text(json.dumps({"format": 7}))
    before = everything(tmp_path)
    with pytest.raises(StoreFormatError, match=r"format 7.*reads formats up to 2.*upgrade cacheblend"):
        disk(tmp_path / "newer")
    assert everything(tmp_path) == before


def test_folders_that_are_fresh_foreign_damaged_or_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "123-0123456789abcdef").write_text("")  # of a store half made
    with disk(tmp_path) as store:
        assert everything(tmp_path) == {"cacheblend.json"}
        store.write(make_block(1))
        for name in ("blocks/readme.txt", "blocks/ab/readme.txt", f"blocks/ab/{'g' * 64}.safetensors", "tmp/x"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
        before = everything(tmp_path)
        assert store.verify() == []
        assert store.stats().blocks == 1
    disk(tmp_path).close()
    assert everything(tmp_path) == before
    stored(tmp_path / "b")[0].close()  # a format file that is wrong or deleted
    file = tmp_path / "b" / "cacheblend.json"
    good = file.read_text()
    numbers = ('"x"', "1.5", "true", "0", "-1", '"1"', "null", "[]")
    for text in ("", "{", "[]", "{}", *(f'{{"format": {each}}}' for each in numbers)):
        file.write_text(text)
        with pytest.raises(StoreError, match=r"damaged.*write"):
            DiskStore(tmp_path / "b")
    file.unlink()
    for read_only in (True, False):
        with pytest.raises(StoreError) as error:
            DiskStore(tmp_path / "b", read_only=read_only)
        assert repr(good) in str(error.value)  # what to write, to be taken as it is
    file.write_text(good)
    with DiskStore(tmp_path / "b") as store:
        assert store.stats().blocks == 1
    with disk(tmp_path / "u" / "s") as store:  # what cannot be read
        store.write(make_block(1))
    for part, calls in (
        ("pins", (DiskStore.pinned, DiskStore.stats, DiskStore.verify)),
        ("manifests", (DiskStore.manifests, DiskStore.stats, DiskStore.verify)),
    ):
        (tmp_path / "u" / "s" / part).rmdir()
        (tmp_path / "u" / "s" / part).write_text("a file")
        with disk(tmp_path / "u" / "s", read_only=True) as store:
            for call in calls:
                with pytest.raises(StoreError, match=rf"cannot be read: .*{part}: Not a directory"):
                    call(store)
        (tmp_path / "u" / "s" / part).unlink()
        (tmp_path / "u" / "s" / part).mkdir()
    (tmp_path / "u" / "cacheblend.json").mkdir()
    (tmp_path / "u" / "loop").symlink_to("loop")
    for path, reason in ((tmp_path / "u", "Is a directory"), (tmp_path / "u" / "loop", "symbolic links")):
        for read_only in (False, True):
            with pytest.raises(StoreError) as caught:
                disk(path, read_only=read_only)
            said = str(caught.value)
            assert f"the store in {path} cannot be read" in said and reason in said and "use another folder" in said
    monkeypatch.setattr(Path, "read_text", failing(errno.EACCES, lambda *a, **k: True, Path.read_text))
    with pytest.raises(StoreError, match="cannot be read: Permission denied; check what is there and its permissions"):
        disk(tmp_path / "u" / "other")


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


def test_blocks_that_follow_each_other_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(4, tokens=6, last=3)
    with disk(tmp_path / "new") as store:
        assert store.write_all(chain) == [True] * 4
        assert len(inodes(store, chain)) == 1
        assert store.stats().blocks == 4 and store.stats().bytes == occupied(store.path) == file_bytes(chain)
        assert all(holds(store, block) for block in chain)
        places = [record_at(Path(store.file_of(block.name)), block, layer) for layer in range(3) for block in chain]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert store.write_all(chain) == [False] * 4
    with disk(tmp_path / "new") as store:
        assert all(holds(store, block) for block in reversed(chain))
    chain = make_chain(5)
    with disk(tmp_path / "has one") as store:  # what is held already is left, and the rest shares what it can
        store.write(chain[2])
        assert store.write_all([*chain, chain[0]]) == [True, True, False, True, True, False]
        assert [len(inodes(store, blocks)) for blocks in (chain[:2], chain[3:], chain)] == [1, 1, 3]
        assert all(holds(store, block) for block in chain)
    disk(tmp_path / "older").close()
    (tmp_path / "older" / "cacheblend.json").write_text(json.dumps({"format": 1}))
    with disk(tmp_path / "older") as store:  # only files that older versions read
        store.write_all(chain)
        assert len(inodes(store, chain)) == 5 and all(holds(store, block) for block in chain)
        assert json.loads((store.path / "cacheblend.json").read_text()) == {"format": 1}
    first, second = make_chain(2), make_chain(3, seed=10)  # what does not follow or is large
    other_layout = make_block(20, parent=second[-1].name, dtype=torch.float32)
    with disk(tmp_path / "apart") as store:
        store.write_all([*first, *second, other_layout, make_block(30)])
        assert [len(inodes(store, blocks)) for blocks in (first, second, [*first, *second])] == [1, 1, 2]
        paths = list((tmp_path / "apart" / "blocks").rglob("*.safetensors"))
        assert (len(paths), len({path.stat().st_ino for path in paths})) == (7, 4)
        record = make_block(0).records[0].nbytes
        monkeypatch.setattr(disk_store, "_READ_BYTES", 2 * record)
        chain = make_chain(5, seed=40)
        store.write_all(chain)
        assert [len(inodes(store, chain[at : at + 2])) for at in (0, 2, 4)] == [1, 1, 1] and len(
            inodes(store, chain)
        ) == 3
    monkeypatch.undo()
    # what is in front is shared by all passages, and stays for as long as they are used
    for number, tokens in enumerate((3, 40)):
        with disk(tmp_path / "own" / str(number)) as store:
            anchor = make_chain(1, tokens=tokens)
            own = make_chain(3, 10, 40, anchor[0].name)
            names = tuple(block.name for block in own)
            manifest = replace(make_manifest(own[-1]), block_names=names)
            ChunkKeeper(store).store(CapturedChunk([*anchor, *own], manifest))
            assert len(inodes(store, own)) == 1
            for name in names:
                store.delete(name)
            assert holds(store, anchor[0]) and occupied(store.path) == file_bytes(anchor)


@pytest.mark.parametrize("shapes", [(LayerShape(4, 64),), (LayerShape(1, 8), LayerShape(4, 64))])
@pytest.mark.parametrize("first", [1, 64])
def test_the_largest_layer_bounds_a_file(first: int, shapes: tuple[LayerShape, ...]) -> None:
    chain = [make_block(0, first, shapes)]
    for seed in range(1, 60):
        chain.append(make_block(seed, 64, shapes, parent=chain[-1].name))
    files = list(disk_store.chains_of(chain))
    sizes = [sum(block.records[-1].nbytes for block in file) for file in files]
    assert max(sizes) <= 512 << 10 and sum(map(len, files)) == 60 and len(files) <= 9


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_full_between_two_names(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    chain = make_chain(3)
    with disk(tmp_path / "a") as store:
        store.write_all(chain)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with disk(tmp_path / "b") as store:
        assert all(holds(store, block) for block in chain) and store.verify() == []
        assert store.stats().bytes == occupied(tmp_path / "b") == 3 * file_bytes(chain)
        store.prune(file_bytes(chain))
        assert store.stats().blocks == 1
    first, second = make_chain(3), make_chain(3, seed=10)  # a file system without links
    with disk(tmp_path / "c") as store:  # another failure is not for links
        (tmp_path / "c" / "tmp").rename(tmp_path / "away")
        with pytest.raises(StoreError, match="No such file"):
            store.write_all(first)
        (tmp_path / "away").rename(tmp_path / "c" / "tmp")
        store.write_all(first)
        assert len(inodes(store, first)) == 1 and caplog.records == []
    monkeypatch.setattr(os, "link", failing(errno.EPERM, lambda *_: True, os.link))
    with disk(tmp_path / "d") as store:
        assert store.write_all(first) == store.write_all(second) == [True] * 3
        assert all(holds(store, block) for block in [*first, *second]) and len(inodes(store, first)) == 3
        assert store.stats().write_failures == 0 and list((tmp_path / "d" / "tmp").iterdir()) == []
    assert [("without links" in record.getMessage()) for record in caplog.records] == [True]


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


@pytest.mark.parametrize("how", ["asked", errno.EROFS])
def test_damage_that_cannot_be_removed_is_a_miss_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str | int
) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
        store.put_manifest(make_manifest(block))
    (path,), (manifest,) = block_files(tmp_path), (tmp_path / "manifests").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    manifest.write_bytes(manifest.read_bytes()[:-1])
    if isinstance(how, int):
        monkeypatch.setattr(os, "unlink", failing(how, lambda *a, **k: True, os.unlink))
    with disk(tmp_path, read_only=how == "asked") as store:
        with pytest.raises(BlockLostError, match="layer 2, head 0 does not match"):
            store.read(block.name, 2)
        assert [store.find([block.name]) for _ in range(3)] == [[None]] * 3
        assert (store.stats().damaged, len(caplog.records)) == (1, 1)
        assert "read-only" in caplog.text
        for _ in range(2):
            assert [(d.kind, d.removed) for d in store.verify()] == [("block", False), ("manifest", False)]
    assert path.exists() and manifest.exists() and "; removed" not in caplog.text
    monkeypatch.undo()
    with disk(tmp_path) as store:
        assert [(d.kind, d.removed) for d in store.verify()] == [("block", True), ("manifest", True)]
    assert not path.exists() and not manifest.exists()


@pytest.mark.parametrize(("number", "stays"), [(errno.EIO, False), (errno.ENOMEM, True)])
def test_only_the_disk_s_own_error_counts_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, stays: bool
) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
        store.put_manifest(make_manifest(block))
        monkeypatch.setattr(os, "preadv", failing(number, lambda *a: True, os.preadv))
        with pytest.raises(BlockLostError, match=os.strerror(number)):
            store.read(block.name, 0)
        if stays:  # it is not counted as checked
            (unread,) = store.verify()
            assert (unread.kind, unread.name, unread.removed) == ("block", block.name, False)
            assert os.strerror(number) in unread.reason
        monkeypatch.undo()
        assert holds(store, block) == stays
        assert store.stats().damaged == (not stays)
    with disk(tmp_path) as store:  # a manifest that cannot be opened is left out
        monkeypatch.setattr(folder, "open", failing(errno.EMFILE, lambda *a, **k: True, open), raising=False)
        assert store.manifests() == store.verify() == []
        assert "Too many open files; left out" in caplog.text
        monkeypatch.undo()
        assert [m.chunk_id for m in store.manifests()] == [block.name]
        assert store.stats().damaged == 0


def test_folders_that_cannot_be_synced_or_written_or_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as store:
        in_folder = failing(errno.EIO, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), os.fsync)
        for _ in range(2):  # with its sub-folder, and with the sub-folder there already
            monkeypatch.setattr(os, "fsync", in_folder)
            with pytest.raises(StoreError, match="Input/output error"):
                store.write(make_block(1))
            monkeypatch.undo()
            assert everything(tmp_path) - {"lock"} == {"cacheblend.json"}
            (tmp_path / "blocks" / make_block(1).name.hex()[:2]).mkdir(exist_ok=True)
        has_none = failing(errno.EINVAL, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), os.fsync)
        monkeypatch.setattr(os, "fsync", has_none)  # a file system that syncs no folders
        assert store.write(make_block(1))
        monkeypatch.undo()
    block = make_block(1)  # a mount that turns read-only, and a folder that vanishes
    with disk(tmp_path / "s", max_bytes=10_000) as store:
        monkeypatch.setattr(os, "rename", failing(errno.EROFS, lambda *a: True, os.rename))
        with pytest.raises(StoreReadOnlyError, match="mount"):
            store.write(block)
        assert store.stats().write_failures == 1
        monkeypatch.undo()
        store.write(block)
        shutil.rmtree(tmp_path / "s")
        assert store.find([block.name]) == [None]
        assert store.manifests() == []
        for _ in range(2):
            with pytest.raises(StoreError, match="No such file"):
                store.write(make_block(2))
        assert (store.stats().write_failures, store.stats().blocks) == (3, 0)


def test_short_writes_are_continued_by_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    made = [make_block(seed) for seed in range(30)]  # few descriptors
    with disk(tmp_path / "b") as store:
        for block in made:
            store.write(block)
        store._files = BlockFiles(Folder(tmp_path / "b"), max_open=4)
        before = len(descriptors())
        assert all(holds(store, block) for block in made)
        assert len(descriptors()) <= before + 4
        store._files.close()
        store._files = BlockFiles(Folder(tmp_path / "b"), max_open=1000)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(descriptors())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
            assert all(holds(store, block) for block in made)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(descriptors()) <= before


def descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def test_a_folder_that_is_gone_is_not_half_made_again(tmp_path: Path) -> None:
    """What would be left of it is no store to whoever opens it next."""
    place = tmp_path / "store"
    with DiskStore(place) as store:
        shutil.rmtree(place)
        with pytest.raises(StoreError, match="is gone"), store.documents.changing(ROOT):
            pass
        assert not place.exists()
    with DiskStore(place) as store:
        assert store.write(make_block(1))
