"""Reads from files of several blocks, and their number; damage, deletion and other processes' changes to them."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError
from cacheblend.core.plan.blocks import Block
from cacheblend.store.disk import block_files
from store_blocks import holds, make_block, make_chain, record_at, same_bits
from store_folders import disk, file_bytes, occupied

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
