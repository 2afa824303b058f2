"""Measures how fast a store is read, layer by layer as requests read it: throughput and latency of each tier."""

import contextlib
import os
import secrets
import statistics
import time

import torch

from cacheblend.core.cost.cost_model import TierSpeed
from cacheblend.core.errors import BlockLostError, StoreError
from cacheblend.core.names import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout
from cacheblend.store.base import KVStore
from cacheblend.store.disk import DiskStore

FEW, MANY = 1, 8  # numbers of blocks in the two measurements; their difference separates throughput from latency


def measure(store: KVStore, layout: KVLayout, *, block_tokens: int = 256, rounds: int = 3) -> tuple[str, TierSpeed]:
    """The tier's own name and its speed, the median of some rounds. Writes random blocks under unique names, reads them
    uncached and removes them. `store`: one tier; see `KVStore.tiers`, which has the name that it has beside others of
    its kind. Raises `StoreError`: the store cannot be written or read."""
    root = root_name(f"a measurement {secrets.token_hex(8)}", "float32")
    names: list[BlockName] = []
    try:
        for number in range(MANY):
            ids, records = as_token_ids([number, *range(block_tokens - 1)]), []
            for layer in range(len(layout.layers)):
                shape, dtype = layout.record_shape(layer, block_tokens), layout.record_dtype
                size = int(torch.Size(shape).numel()) * dtype.itemsize
                records.append(torch.randint(0, 255, (size,), dtype=torch.uint8).view(dtype).view(shape))
            block = Block(block_name(root, ids), root, ids, records, layout)
            store.write(block)
            names.append(block.name)
        entries = store.find(names)
        few_s, many_s = (_layer_seconds(store, names[:count], len(layout.layers), rounds) for count in (FEW, MANY))
    finally:
        for name in names:
            with contextlib.suppress(StoreError):
                store.delete(name)
    block_s = max((many_s - few_s) / (MANY - FEW), 1e-9)
    record_bytes = layout.block_bytes(block_tokens) / len(layout.layers)
    tier = next((entry.tier for entry in entries if entry is not None), "unknown")
    return tier, TierSpeed(record_bytes / block_s, max(0.0, few_s - block_s))


def _layer_seconds(store: KVStore, names: list[BlockName], layers: int, rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        for name in names:
            _drop_cached_pages(store, name)
        started = time.perf_counter()
        for layer in range(layers):
            for record in store.read_many(names, layer):
                if isinstance(record, BlockLostError):
                    raise StoreError(f"the store cannot be measured: {record.reason}")
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) / layers


def _drop_cached_pages(store: KVStore, name: BlockName) -> None:
    """Asks the kernel to drop the block's file from the page cache."""
    if isinstance(store, DiskStore):
        with contextlib.suppress(OSError):
            fd = os.open(store.file_of(name), os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
