"""Memory in front of a folder: layers gather in it as they are read, and what it loses meanwhile is read again."""

import os
from pathlib import Path

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName
from cacheblend.store import MemoryStore, TieredStore
from store_blocks import ROOT, make_block, same_bits
from store_folders import disk


def test_layers_gather_in_memory_without_a_second_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1)
    with disk(tmp_path) as store:
        store.write(block)
    preads: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: (preads.append(at), preadv(fd, parts, at))[1])
    with TieredStore(MemoryStore(10_000), disk(tmp_path)) as store:
        for layer in (2, 0, 2, 0):
            assert same_bits(store.read(block.name, layer), block.records[layer])
        assert len(preads) == 4  # a block that was never looked up does not gather
        assert [entry and entry.tier for entry in store.find([block.name])] == ["disk"]
        store.read(block.name, 1, slice(0, 1))
        for layer in (0, 2, 2, 1, 1, 0):
            assert same_bits(store.read(block.name, layer), block.records[layer])
            assert same_bits(store.read(block.name, layer, slice(0, 1)), block.records[layer][:1])
        assert len(preads) == 4 + 1 + 3
        assert [entry and entry.tier for entry in store.find([block.name, ROOT])] == ["memory", None]
        front, back = store.stats().tiers
        assert (front.tier, front.blocks, back.tier, back.blocks) == ("memory", 1, "disk", 1)


def test_what_is_evicted_from_memory_during_a_read_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1)
    front = MemoryStore(10_000)
    peek = front.peek

    def peek_and_lose(name: BlockName, layer: int) -> torch.Tensor | None:
        record = peek(name, layer)
        front.delete(name)  # as another thread's write may do
        return record

    with TieredStore(front, disk(tmp_path)) as store:
        monkeypatch.setattr(front, "peek", peek_and_lose)
        for layer, heads in ((0, None), (1, slice(1, 2)), (0, None)):
            store.write(block)
            front.write(block)
            assert same_bits(store.read(block.name, layer, heads), block.records[layer][heads or slice(None)])
        front.write(block)
        with pytest.raises(InvalidInputError, match="2 KV heads"):
            store.read(block.name, 0, slice(0, 3))
