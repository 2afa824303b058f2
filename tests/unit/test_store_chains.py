"""Files of several blocks: laid out by layer, under the name of each block, gone with the last."""

import errno
import itertools
import json
import logging
import os
import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cacheblend.core.errors import BlockDamagedError, BlockLostError, StoreError, StoreFullError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.store import DiskStore, MemoryStore, TieredStore, WriteBehind
from cacheblend.store.combined.cascade import CascadeStore
from cacheblend.store.combined.striped import StripedStore
from cacheblend.store.disk import block_files, block_writer
from cacheblend.store.format.block_file import encode_block, encode_chain
from store_blocks import ROOT, holds, make_block, make_chain, make_manifest, record_at, same_bits


def disk(path: Path, **options: Any) -> DiskStore:
    return DiskStore(path, durable=False, **options)


def inodes(store: DiskStore, blocks: list[Block]) -> set[int]:
    return {Path(store.file_of(block.name)).stat().st_ino for block in blocks}


def occupied(folder: Path) -> int:
    """Bytes of the block files that are there, each once."""
    found = {path.stat().st_ino: path.stat().st_size for path in (folder / "blocks").rglob("*.safetensors")}
    return sum(found.values())


def file_bytes(chain: list[Block]) -> int:
    return sum(len(part) for part in encode_chain(chain))


def header_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors through which headers are read from now on."""
    reads, real = list[int](), block_files.read_headers

    def counted(fd: int, nbytes: int, **options: Any) -> Any:
        reads.append(fd)
        return real(fd, nbytes, **options)

    monkeypatch.setattr(block_files, "read_headers", counted)
    return reads


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


# ---- damage, deletion, other processes --------------------------------------------------------------------


def test_damage_in_one_block_costs_that_block_and_no_other(tmp_path: Path) -> None:
    chain = make_chain(4)
    with disk(tmp_path) as store:
        store.write_all(chain)
        path = Path(store.file_of(chain[2].name))
        with path.open("r+b") as file:
            file.seek(record_at(path, chain[2], 1)[0])
            file.write(b"\xff\x00\xff")
        store._files.close()
        read = store.read_layers([block.name for block in chain], range(3))
        assert [isinstance(found, BlockDamagedError) for found in read] == [False, False, True, False]
        assert "layer 1" in str(read[2]) and store.stats().damaged == 1
        assert [entry is not None for entry in store.find([b.name for b in chain])] == [True, True, False, True]
        assert store.verify() == []
        assert store.write_all(chain) == [False, False, True, False]
        assert all(holds(store, block) for block in chain)


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_header_or_a_cut_file_costs_all_its_blocks(cut: bool, tmp_path: Path) -> None:
    chain, other = make_chain(3), make_chain(2, seed=10)
    with disk(tmp_path) as store:
        store.write_all([*chain, *other])
    path = Path(store.file_of(chain[0].name))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data[:-1] if cut else data)
    with disk(tmp_path) as store:
        assert store.find([block.name for block in chain]) == [None] * 3
        assert store.stats().damaged == 3 and all(holds(store, block) for block in other)
        assert occupied(tmp_path) == file_bytes(other)


def test_damage_that_cannot_be_removed_stays_a_miss(tmp_path: Path) -> None:
    chain = make_chain(3)
    with disk(tmp_path) as store:
        store.write_all(chain)
        path = Path(store.file_of(chain[1].name))
        with path.open("r+b") as file:
            file.seek(record_at(path, chain[1], 2)[0])
            file.write(b"\xff\x00\xff")
    with disk(tmp_path, read_only=True) as store:
        names = [block.name for block in chain]
        assert None not in store.find(names)
        assert isinstance(store.read_layers(names, range(3))[1], BlockDamagedError)
        for name in names:
            store._files.forget(name)  # so that the others' header is read again
        for _ in range(2):
            assert [entry is None for entry in store.find([names[0], names[1], names[2]])] == [False, True, False]
        assert store.stats().damaged == 1


def test_bytes_go_with_the_last_name(tmp_path: Path) -> None:
    chain = make_chain(3)
    with disk(tmp_path) as store, disk(tmp_path) as reader:
        store.write_all(chain)
        assert all(holds(reader, block) for block in chain)
        for left in (2, 1, 0):
            assert store.delete(chain[left].name)
            assert store.find([chain[left].name]) == reader.find([chain[left].name]) == [None]
            assert all(holds(reader, block) for block in chain[:left])
            assert store.stats().bytes == occupied(tmp_path) == (file_bytes(chain) if left else 0)


def test_a_block_of_a_file_is_replaced_by_another_process(tmp_path: Path) -> None:
    chain, bits = make_chain(3), make_block(99)
    changed = Block(chain[1].name, chain[1].parent, chain[1].token_ids, bits.records, chain[1].layout)
    with disk(tmp_path) as store, disk(tmp_path) as other:
        store.write_all(chain)
        assert all(holds(store, block) for block in chain)
        other.delete(chain[1].name)
        other.write(changed)
        assert [holds(store, block) for block in (chain[0], changed, chain[2])] == [True] * 3
        assert store.stats().damaged == other.stats().damaged == 0


def test_a_header_is_read_once_for_all_its_blocks_and_not_again_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, reads = make_chain(6), header_reads(monkeypatch)
    monkeypatch.setattr(block_files, "_TOUCH_EVERY_NS", 0)
    with disk(tmp_path) as store:
        store.write_all(chain)
    with disk(tmp_path) as store:
        names = [block.name for block in chain]
        for _ in range(3):
            assert None not in store.find(names)
            assert all(isinstance(found, list) for found in store.read_layers(names, range(3)))
        assert len(reads) == 1


def test_a_header_is_read_once_for_all_its_blocks_after_another_process_used_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, reads = make_chain(6), header_reads(monkeypatch)
    with disk(tmp_path) as store:
        store.write_all(chain)
        names = [block.name for block in chain]
        for uses in range(1, 4):
            assert None not in store.find(names)
            assert len(reads) == uses
            os.utime(store.file_of(names[0]), ns=(uses, time.time_ns()))
        assert all(holds(store, block) for block in chain)


def test_a_layer_of_a_chain_is_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, calls = make_chain(6), list[int]()
    real = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        calls.append(sum(len(buffer) for buffer in buffers))
        return real(fd, buffers, offset)

    with disk(tmp_path) as store:
        store.write_all(chain)
        names = [block.name for block in chain]
        store.find(names)
        monkeypatch.setattr(os, "preadv", counted)
        memory = torch.empty(1 << 16, dtype=torch.uint8)
        for layers in (range(1, 2), range(3)):
            calls.clear()
            for read in (
                store.read_layers(names, layers),
                store.read_layers(names, layers, None, lambda n: memory[:n]),
            ):
                for block, records in zip(chain, read, strict=True):
                    assert isinstance(records, list) and all(map(same_bits, records, block.records[layers.start :]))
            nbytes = sum(block.records[layer].nbytes for block in chain for layer in layers)
            assert calls == [nbytes, nbytes]


@pytest.mark.parametrize("failure", [errno.EIO, 0])
def test_a_read_of_a_chain_that_fails_names_the_block(
    failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# ---- the bound --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "worth"])
@pytest.mark.parametrize("seed", range(12))
def test_the_bound_holds_and_what_is_held_is_right(seed: int, eviction: str, tmp_path: Path) -> None:
    """Chains and single blocks are written, found, pinned, deleted, pruned; another store has the folder open, too."""
    draw = random.Random(f"{seed} {eviction}")
    chains = [make_chain(draw.randrange(1, 8), 10 * n, draw.choice([4, 40])) for n in range(12)]
    most = draw.choice([3, 6]) * max(map(file_bytes, chains))
    pinned: list[Block] = []
    with disk(tmp_path, max_bytes=most, eviction=eviction) as store, disk(tmp_path, max_bytes=None) as other:
        for _ in range(150):
            chain = draw.choice(chains)
            some = draw.sample(chain, draw.randrange(1, len(chain) + 1))
            match draw.choice(["write", "write", "write", "find", "delete", "pin", "prune", "other", "one"]):
                case "write":
                    try:
                        store.write_all(chain)
                        held = store.find([block.name for block in chain])
                        assert eviction == "worth" or None not in held  # which may prefer others to new blocks
                    except StoreFullError:
                        assert pinned
                case "one":
                    try:
                        store.write(some[0])
                    except StoreFullError:
                        assert pinned
                case "find":
                    store.find([block.name for block in some])
                case "delete":
                    other.delete(some[0].name)
                    pinned = [block for block in pinned if block is not some[0]]
                case "pin":
                    store.unpin([block.name for block in pinned])
                    pinned = some[:2]
                    store.pin([block.name for block in pinned])
                case "prune":
                    store.prune(draw.randrange(most))
                case "other":
                    assert other.stats().bytes == occupied(tmp_path)
            assert occupied(tmp_path) <= most
            assert abs(store.stats().bytes - occupied(tmp_path)) == 0
        for store_or_other in (store, other):
            for chain in chains:
                held = store_or_other.held([block.name for block in chain])
                assert [holds(store_or_other, block) for block in chain] == held
        assert store.stats().damaged == other.stats().damaged == 0


def test_a_small_need_evicts_a_whole_chain(tmp_path: Path) -> None:
    """A share of the file is all that is needed, and the file goes with its last name only."""
    old, new = make_chain(8), make_block(50)
    with disk(tmp_path) as store:
        store.write_all(old)
    with disk(tmp_path, max_bytes=file_bytes(old)) as store:
        assert store.write(new) and holds(store, new)
        assert store.stats().blocks == 1


@pytest.mark.parametrize("length", [1, 4])
def test_a_store_of_which_there_is_a_snapshot_of_links_is_not_emptied(length: int, tmp_path: Path) -> None:
    with disk(tmp_path / "store") as store:
        for seed in range(0, 40, length):
            store.write_all(make_chain(length, seed, 40))
    shutil.copytree(tmp_path / "store", tmp_path / "snapshot", copy_function=os.link)  # as by `cp -al`
    with disk(tmp_path / "store") as store:
        most = store.stats().bytes
    with disk(tmp_path / "store", max_bytes=most) as store:
        assert store.write(make_block(90)) and 30 <= store.stats().blocks <= 40


def test_a_pinned_block_keeps_its_file_and_the_others_go(tmp_path: Path) -> None:
    chain = make_chain(4)
    with disk(tmp_path) as store:
        store.write_all(chain)
        store.pin([chain[1].name])
        assert store.prune(0) == 0  # the file stays
        assert [holds(store, block) for block in chain] == [False, True, False, False]
        assert store.stats().bytes == occupied(tmp_path) == file_bytes(chain)
        store.unpin([chain[1].name])
        assert store.prune(0) == file_bytes(chain)


def test_what_cannot_fit_beside_pinned_blocks_evicts_nothing(tmp_path: Path) -> None:
    """A pinned block keeps the bytes of all blocks of its file, so that removing those is in vain."""
    chains = [make_chain(4, seed) for seed in (0, 10, 20)]
    with disk(tmp_path, max_bytes=sum(map(file_bytes, chains))) as store:
        for chain in chains:
            store.write_all(chain)
        store.pin([chain[0].name for chain in chains])
        with pytest.raises(StoreFullError, match="unpin blocks"):
            store.write(make_block(50))
        assert store.stats().blocks == 12 and store.stats().evictions == 0


def test_a_name_that_another_process_removed_has_freed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_chain(2, tokens=400), make_block(50, tokens=400)
    with disk(tmp_path) as store, disk(tmp_path, max_bytes=file_bytes(old) + 9000) as other:
        store.write_all(old)
        real = other._capacity._victims

        def victims(surplus: int) -> Any:
            found = real(surplus)
            if store.held([found[0].name]) == [True]:
                store.delete(found[0].name)
                return found[:1]
            return found

        monkeypatch.setattr(other._capacity, "_victims", victims)
        other.write(new)
        assert holds(other, new) and occupied(tmp_path) <= file_bytes(old) + 9000


def test_a_chain_larger_than_the_bound_is_stored_as_far_as_it_fits(tmp_path: Path) -> None:
    chain = make_chain(6, tokens=500)
    one = file_bytes(chain[:1])
    with disk(tmp_path, max_bytes=2 * one) as store:
        assert store.write_all(chain) == [True] * 6
        assert store.stats().blocks == 2 and occupied(tmp_path) <= 2 * one
    with disk(tmp_path / "tiny", max_bytes=one - 1) as store, pytest.raises(StoreFullError, match="raise max_bytes"):
        store.write_all(chain)


def test_time_to_live_removes_all_of_a_chain(tmp_path: Path) -> None:
    chain = make_chain(3)
    with disk(tmp_path) as store:
        store.write_all(chain)
        old = time.time_ns() - 100 * 10**9
        os.utime(store.file_of(chain[0].name), ns=(old, old))
    with disk(tmp_path, ttl=50) as store:
        assert store.find([block.name for block in chain]) == [None] * 3 and occupied(tmp_path) == 0


# ---- through other stores, and write-behind ----------------------------------------------------------------


def test_stores_made_of_others_pass_chains_on(tmp_path: Path) -> None:
    chain = make_chain(4)
    near, far = disk(tmp_path / "near"), disk(tmp_path / "far")
    with TieredStore(MemoryStore(1 << 20), CascadeStore([near, far])) as store:
        assert store.write_all(chain) == [True] * 4
        store.flush()
        assert [len(inodes(each, chain)) for each in (near, far)] == [1, 1]
        assert store.front.stats().blocks == 4
        assert store.write_all(chain) == [False] * 4


class _Gated(MemoryStore):
    """Counts what is written together, when the test allows it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go, self.started, self.calls = threading.Event(), threading.Event(), list[int]()
        self.refused: set[bytes] = set()

    def write_all(self, blocks: Any) -> list[bool]:
        self.started.set()
        assert self.go.wait(10)
        self.calls.append(len(blocks))
        if any(block.name in self.refused for block in blocks):
            raise StoreError("refused")
        return super().write_all(blocks)


def test_a_folder_of_chains_becomes_one_of_two_stripes(tmp_path: Path) -> None:
    """What the other folder is to hold is missed, and written there; the first one's files stay right."""
    chain = make_chain(8)
    with disk(tmp_path / "a") as alone:
        alone.write_all(chain)
        assert len(inodes(alone, chain)) == 1
    with StripedStore({label: disk(tmp_path / label) for label in "ab"}) as store:
        held = store.held([block.name for block in chain])
        assert 0 < sum(held) < len(chain)
        assert store.write_all(chain) == [not each for each in held]
        assert all(holds(store, block) for block in chain)
        for block, was_held in zip(chain, held, strict=True):
            assert store.members[0].delete(block.name)
            assert holds(store, block) is not was_held
        assert not list((tmp_path / "a" / "blocks").rglob("*.safetensors"))
        assert store.stats().damaged == 0 and not store.verify()


def test_blocks_that_wait_are_written_with_those_that_continue_them() -> None:
    store = _Gated()
    first, chain, other = make_block(90), make_chain(5), make_block(95)
    with WriteBehind(store) as writer:
        writer.submit(first)
        assert store.started.wait(10)
        for block in [*chain[:3], other, *chain[3:]]:
            writer.submit(block)
        writer.submit(lambda: None, make_block(96).name)
        store.go.set()
        assert writer.flush(10)
        assert store.calls == [1, 3, 1, 2]
        assert (writer.stats().written, writer.stats().waiting_bytes) == (7, 0)


def test_of_blocks_that_are_written_together_one_may_fail() -> None:
    store = _Gated()
    chain = make_chain(4)
    store.refused = {chain[1].name}
    with WriteBehind(store) as writer:
        writer.submit(make_block(90))
        assert store.started.wait(10)
        for block in chain:
            writer.submit(block)
        store.go.set()
        assert writer.flush(10)
        assert [holds(store, block) for block in chain] == [True, False, True, True]
        assert (writer.stats().written, writer.stats().failed) == (4, 1)


def test_withdrawing_one_of_several_that_are_being_written_waits_for_them() -> None:
    store = _Gated()
    chain, behind = make_chain(3), make_block(90)
    writer = WriteBehind(store)
    store.go.set()
    writer.submit(make_block(91))
    assert writer.flush(10)
    store.go.clear()
    with writer._changed:  # all of them wait before the first is taken
        for block in [*chain, behind]:
            writer.submit(block)
    store.started.clear()
    assert store.started.wait(10)
    assert not writer.close(0.05)
    assert (writer.stats().waiting, writer.stats().dropped) == (3, 1)
    threading.Timer(0.1, store.go.set).start()
    assert writer.withdraw(chain[2].name)
    assert holds(store, chain[2])
    assert writer.close(10)


def test_layouts_that_cannot_be_written_are_refused_before_anything_is(tmp_path: Path) -> None:
    shapes = (LayerShape(1, 2),)
    good = make_block(1, shapes=shapes)
    bad = Block(good.name, ROOT, good.token_ids, [good.records[0][..., :1]], KVLayout(shapes, torch.bfloat16))
    with disk(tmp_path) as store:
        with pytest.raises(ValueError, match="a record of 5 tokens"):
            store.write_all([make_block(2), bad])
        assert store.stats().blocks == 0
