"""What the store's tests run in other processes, and starting those cheaply (they are forked, torch loaded)."""

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from cacheblend.core.errors import BlockLostError
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.store import DiskStore
from store_blocks import make_block, make_manifest, same_bits

WARM_BLOCKS = 60
CHURN_BLOCK_BYTES = 8192 + 6 * 2 * 2 * 40 * 64 * 2
CHURN_MAX_BYTES = 30 * CHURN_BLOCK_BYTES


def killable_block(seed: int) -> Any:
    """0.3 MB."""
    return make_block(seed, 50, [LayerShape(2, 64)] * 12)


def shared_block(seed: int) -> Any:
    return make_block(seed, 40, [LayerShape(2, 64)] * 6)


def context() -> ForkServerContext:
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["cacheblend.store"])  # and torch with it
    return forking


def write_until_killed(acknowledge: Connection, folder: Path, first: int) -> None:
    store = DiskStore(folder)
    acknowledge.send_bytes(b"ready")
    for seed in range(first, first + 1000):
        block = killable_block(seed)
        store.write(block)
        store.put_manifest(make_manifest(block))
        acknowledge.send_bytes(b"%d" % seed)


def warm(store: DiskStore, seed: int) -> list[int]:
    """Blocks that were new, and damaged ones."""
    new = 0
    for block in map(shared_block, range(WARM_BLOCKS)):
        new += store.write(block)
        store.put_manifest(make_manifest(block))
    return [new, store.stats().damaged]


def churn(store: DiskStore, seed: int) -> list[int]:
    """Reads, reads whose block was lost, wrong reads, damaged blocks."""
    rng = random.Random(seed)
    blocks = [shared_block(i) for i in range(WARM_BLOCKS)]
    reads = lost = wrong = 0
    for step in range(400):
        store.write(rng.choice(blocks))
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
