"""How fast a store is read: by layer, a few blocks and many, as requests read it."""

import contextlib
import os
import secrets
import statistics
import time

import torch

from cacheblend.core.cost.cost_model import TierSpeed
from cacheblend.core.errors import BlockLostError, StoreError
from cacheblend.core.naming import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout
from cacheblend.store.base import KVStore
from cacheblend.store.combined.cascade import CascadeStore
from cacheblend.store.combined.striped import StripedStore
from cacheblend.store.combined.tiered import TieredStore
from cacheblend.store.disk.disk import DiskStore

FEW, MANY = 1, 8
"""Blocks of the two measurements."""


def tiers_of(store: KVStore) -> list[KVStore]:
    """The stores that a store is made of, as its entries name them; a striped one counts as one."""
    if isinstance(store, TieredStore):
        return [store.front, *tiers_of(store.back)]
    return [part for each in store.stores for part in tiers_of(each)] if isinstance(store, CascadeStore) else [store]


def measure(store: KVStore, layout: KVLayout, *, block_tokens: int = 256, rounds: int = 3) -> tuple[str, TierSpeed]:
    """The tier's name, and how long it takes.

    Writes random blocks under names that nobody else has, reads them past the page cache where there is one, and
    removes them.

    Args:
        store: one tier; see `tiers_of`.
        layout: of the records.
        block_tokens: of a block.
        rounds: the median of so many.

    Raises:
        StoreError: it cannot be written to, or read.
    """
    layers = range(len(layout.layers))
    root = root_name(f"a measurement {secrets.token_hex(8)}", "float32")
    names: list[BlockName] = []
    try:
        for number in range(MANY):
            names.append(_write(store, root, layout, number, block_tokens))
        entries = store.find(names)
        times: dict[int, float] = {}
        for count in (FEW, MANY):
            taken = []
            for _ in range(rounds):
                for name in names[:count]:
                    _forget_pages(store, name)
                started = time.perf_counter()
                for layer in layers:
                    for record in store.read_many(names[:count], layer):
                        if isinstance(record, BlockLostError):
                            raise StoreError(f"the store cannot be measured: {record.reason}")
                taken.append(time.perf_counter() - started)
            times[count] = statistics.median(taken) / len(layers)
    finally:
        for name in names:
            with contextlib.suppress(StoreError):
                store.delete(name)
    block_s = max((times[MANY] - times[FEW]) / (MANY - FEW), 1e-9)
    tier = next((entry.tier for entry in entries if entry is not None), "unknown")
    return tier, TierSpeed(layout.block_bytes(block_tokens) / len(layers) / block_s, max(0.0, times[FEW] - block_s))


def _write(store: KVStore, root: BlockName, layout: KVLayout, number: int, tokens: int) -> BlockName:
    ids = as_token_ids([number, *range(tokens - 1)])
    records = []
    for layer in range(len(layout.layers)):
        shape, dtype = layout.record_shape(layer, tokens), layout.record_dtype
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        records.append(torch.randint(0, 255, (size,), dtype=torch.uint8).view(dtype).view(shape))
    block = Block(block_name(root, ids), root, ids, records, layout)
    store.write(block)
    return block.name


def _forget_pages(store: KVStore, name: BlockName) -> None:
    """Asks the kernel to drop a block's file from its page cache."""
    for disk in store.stores if isinstance(store, StripedStore) else [store]:
        if isinstance(disk, DiskStore):
            with contextlib.suppress(OSError):
                fd = os.open(disk.file_of(name), os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
