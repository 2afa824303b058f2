"""Files of several blocks: which blocks share one, how it is laid out, and folders and copies without links."""

import errno
import itertools
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cacheblend.core.errors import StoreError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.store.disk import block_writer
from cacheblend.store.format.block_file import encode_block, encode_chain
from store_blocks import ROOT, holds, make_block, make_chain, make_manifest, record_at, same_bits
from store_folders import disk, file_bytes, inodes, occupied

# ---- what lies together ---------------------------------------------------------------------------------


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
        monkeypatch.setattr(block_writer, "_READ_BYTES", 2 * record)
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
    files = block_writer.chains_of(chain)
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


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    chain = make_chain(3)
    with disk(tmp_path) as store:
        store.write_all(chain)
    with disk(tmp_path, read_only=True) as store:
        assert all(holds(store, block) for block in chain)
