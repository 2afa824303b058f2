"""Reading a folder's records: any layers, heads and memory, by several threads, beside damaged and missing blocks."""

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
from store_blocks import ROOT, make_block, record_at, same_bits

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
