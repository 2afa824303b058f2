"""Reading a folder's records: any layers, heads and memory, by several threads, from files of one block and of several,
beside damaged, missing and replaced blocks."""

import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError, InvalidInputError
from cacheblend.core.load.staging_buffers import StagingMemory
from cacheblend.core.plan.blocks import Block, LayerShape
from cacheblend.store import DiskStore
from cacheblend.store.disk import block_files
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.folder import Folder
from store_blocks import ROOT, holds, make_block, make_chain, record_at, same_bits
from store_folders import disk, file_bytes, occupied

ALIKE = (LayerShape(4, 8),) * 5
MIXED = (LayerShape(4, 8), LayerShape(4, 8), LayerShape(2, 16), LayerShape(4, 24), LayerShape(4, 8))


def filled(path: Path, draw: random.Random, direct: bool = False) -> tuple[DiskStore, list[Block]]:
    """A folder with files of one block and of several."""
    store = DiskStore(path, durable=False, direct=direct)
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


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_records_are_what_was_written(seed: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in any order and more than once; layers of one shape and of several; parts of one thread each."""
    draw = random.Random(f"{seed} {direct}")
    monkeypatch.setattr(block_files, "_BYTES_AT_ONCE", draw.choice([1, 20_000, 1 << 30]))
    store, blocks = filled(tmp_path / "store", draw, direct)
    store._reads_at_once, store._bytes_a_thread = draw.choice([1, 2, 5]), draw.choice([1, 5000, 1 << 30])
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


@pytest.mark.parametrize("seed", range(8))
def test_a_block_that_is_damaged_or_gone_is_lost_and_no_other(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    store, blocks = filled(tmp_path / "store", draw)
    store._reads_at_once, store._bytes_a_thread = 3, draw.choice([1, 1 << 30])
    names = [block.name for block in blocks]
    with store:
        store.find(names)
        damaged, gone = draw.choice(blocks), draw.choice(blocks)
        layer = draw.randrange(5)
        path = Path(store.file_of(damaged.name))
        data = bytearray(path.read_bytes())
        data[record_at(path, damaged, layer)[1] - 1] ^= 4
        path.write_bytes(data)
        Path(store.file_of(gone.name)).unlink()
        store._files.close()
        read = store.read_layers(names, range(5), None, StagingMemory(1 << 20, 1 << 16).lease().take)
        for block, records in zip(blocks, read, strict=True):
            if block is gone:
                assert isinstance(records, BlockLostError)
            elif block is damaged:
                assert isinstance(records, BlockDamagedError) and f"layer {layer}" in str(records)
            else:
                assert isinstance(records, list)
                assert all(same_bits(found, record) for found, record in zip(records, block.records, strict=True))


@pytest.mark.parametrize("direct", [False, True])
def test_verify_finds_damage_however_the_folder_is_read(direct: bool, tmp_path: Path) -> None:
    block = make_block(1, 64, ALIKE)
    with DiskStore(tmp_path, durable=False, direct=direct) as store:
        store.write(block)
        assert store.verify() == []
        path = Path(store.file_of(block.name))
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        (damage,) = store.verify()
        assert damage.name == block.name and "layer 4" in damage.reason and damage.removed


def test_a_reader_that_never_looked_blocks_up_keeps_to_the_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tensor-parallel rank does: another process finds the blocks."""
    monkeypatch.setattr(block_files, "_BYTES_AT_ONCE", 10_000)
    blocks, pieces = [make_block(seed, 32, ALIKE) for seed in range(12)], list[int]()

    def memory(nbytes: int) -> torch.Tensor:
        pieces.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    with DiskStore(tmp_path, durable=False) as store:
        for block in blocks:
            store.write(block)
    with DiskStore(tmp_path, durable=False) as store:
        read = store.read_layers([bytes(32), *(block.name for block in blocks)], range(1), None, memory)  # type: ignore[list-item]
        assert isinstance(read[0], BlockLostError)
        assert all(same_bits(records[0], block.records[0]) for records, block in zip(read[1:], blocks, strict=True))  # type: ignore[index]
    record = blocks[0].records[0].nbytes
    assert sum(pieces) == 12 * record and max(pieces) <= max(10_000, record)


def test_neighbouring_layers_are_one_read_and_one_piece_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, pieces, real = [], [], block_files._pread_all

    def counted(fd: int, view: memoryview, offset: int, least: int) -> None:
        reads.append(least)
        real(fd, view, offset, least)

    monkeypatch.setattr(block_files, "_pread_all", counted)

    def memory(nbytes: int) -> torch.Tensor:
        pieces.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    with DiskStore(tmp_path, durable=False) as store:
        blocks = [make_block(seed, 5, ALIKE) for seed in range(3)]
        for block in blocks:
            store.write(block)
        names, record = [block.name for block in blocks], blocks[0].records[0].nbytes
        store.find(names)
        for heads, each in ((None, [4 * record]), (slice(1, 3), [record // 2] * 4)):  # heads lie apart
            reads.clear(), pieces.clear()
            store.read_layers(names, range(1, 5), heads, memory)
            assert reads == each * 3
            assert pieces == [3 * sum(each)]


@pytest.mark.parametrize(("layers", "heads"), [(range(4, 6), None), (range(-1, 1), None), (range(2), slice(3, 9))])
def test_there_is_no_such_layer_or_head(layers: range, heads: slice | None, tmp_path: Path) -> None:
    with DiskStore(tmp_path, durable=False) as store:
        block = make_block(1, 5, ALIKE)
        store.write(block)
        with pytest.raises(InvalidInputError):
            store.read_layers([block.name], layers, heads)
        assert store.read_layers([], range(2)) == []
        assert store.read_layers([block.name], range(0)) == [[]]


def test_many_readers_hold_no_more_files_open_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [make_block(seed, 5) for seed in range(60)]
    with DiskStore(tmp_path, durable=False) as store:
        for block in blocks:
            store.write(block)
    files = BlockFiles(Folder(tmp_path, read_only=True, durable=False, locks=False), max_open=4)
    at_once, most, lock = [0], [0], threading.Lock()
    real = block_files.read_blocks

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

    monkeypatch.setattr(block_files, "read_blocks", counted)
    names = [block.name for block in blocks]
    with ThreadPoolExecutor(3) as pool:
        reads = list(pool.map(lambda _: files.read(names, range(2), None, None), range(3)))
    files.close()
    for found in reads:
        for block, records in zip(blocks, found, strict=True):
            assert isinstance(records, list) and all(map(same_bits, records, block.records[:2]))
    assert most[0] <= 4 + 3 - 1  # each reader may have one


# ---- files of several blocks: damage, deletion, other processes --------------------------------------------


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


# ---- how often a file is read -----------------------------------------------------------------------------


def header_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors through which headers are read from now on."""
    reads, real = list[int](), block_files.read_headers

    def counted(fd: int, nbytes: int, **options: Any) -> Any:
        reads.append(fd)
        return real(fd, nbytes, **options)

    monkeypatch.setattr(block_files, "read_headers", counted)
    return reads


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
