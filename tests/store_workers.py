"""What the store's tests run in other processes, and starting those cheaply (they are forked, torch loaded)."""

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from cacheblend.core.errors import BlockLostError
from cacheblend.core.plan.blocks import Block, LayerShape
from cacheblend.store import DiskStore
from store_blocks import ROOT, make_block, make_manifest, same_bits

WARM_BLOCKS = 60
CHURN_BLOCK_BYTES = 8192 + 6 * 2 * 2 * 40 * 64 * 2
CHURN_MAX_BYTES = 30 * CHURN_BLOCK_BYTES


def killable_chain(seed: int) -> list[Block]:
    """0.3 MB: one block, or two or three in one file."""
    blocks: list[Block] = []
    for number in range(1 + seed % 3):
        parent = blocks[-1].name if blocks else ROOT
        blocks.append(make_block(3 * seed + number, 50 // (1 + seed % 3), [LayerShape(2, 64)] * 12, parent=parent))
    return blocks


def shared_block(seed: int) -> Block:
    """Of three that follow each other."""
    parent = shared_block(seed - 1).name if seed % 3 else ROOT
    return make_block(seed, 40, [LayerShape(2, 64)] * 6, parent=parent)


def context() -> ForkServerContext:
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["cacheblend.store"])  # and torch with it
    return forking


def write_until_killed(acknowledge: Connection, folder: Path, first: int) -> None:
    store = DiskStore(folder)
    acknowledge.send_bytes(b"ready")
    for seed in range(first, first + 1000):
        chain = killable_chain(seed)
        store.write_all(chain)
        store.put_manifest(make_manifest(chain[-1]))
        acknowledge.send_bytes(b"%d" % seed)


def warm(store: DiskStore, seed: int) -> list[int]:
    """Blocks that were new, and damaged ones."""
    new = 0
    for first in range(0, WARM_BLOCKS, 3):
        chain = [shared_block(number) for number in range(first, first + 3)]
        new += sum(store.write_all(chain))
        for block in chain:
            store.put_manifest(make_manifest(block))
    return [new, store.stats().damaged]


def churn(store: DiskStore, seed: int) -> list[int]:
    """Reads, reads whose block was lost, wrong reads, damaged blocks."""
    rng = random.Random(seed)
    blocks = [shared_block(i) for i in range(WARM_BLOCKS)]
    reads = lost = wrong = 0
    for step in range(400):
        first = rng.randrange(0, WARM_BLOCKS, 3)
        store.write_all(blocks[first : first + rng.randrange(1, 4)])
        if step % 3 == 0:
            store.delete(rng.choice(blocks).name)
        if step % 25 == 0:
            store.prune(10 * CHURN_BLOCK_BYTES)
        chosen = rng.sample(blocks, 8)
        found = store.find([block.name for block in chosen])
        if step % 2:
            store._files.close_idle(0)  # so that the file is opened again, if it is still there
        for block in [b for b, entry in zip(chosen, found, strict=True) if entry is not None]:
            try:
                wrong += not same_bits(store.read(block.name, 5), block.records[5])
                reads += 1
            except BlockLostError:
                lost += 1
    return [reads, lost, wrong, store.stats().damaged]


def _together(barrier: Any, results: Any, work: Callable[..., list[int]], folder: Path, seed: int) -> None:
    barrier.wait(60)
    with DiskStore(folder, max_bytes=CHURN_MAX_BYTES if work is churn else None) as store:
        results.put(work(store, seed))


def run_together(work: Callable[..., list[int]], folder: Path, count: int) -> list[list[int]]:
    """What `work` returns in each of `count` processes that open `folder` and begin at the same time."""
    forking = context()
    barrier, results = forking.Barrier(count), forking.Queue()
    processes = [
        forking.Process(target=_together, args=(barrier, results, work, folder, seed)) for seed in range(count)
    ]
    for process in processes:
        process.start()
    returned = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return returned
