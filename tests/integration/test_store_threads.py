"""Sixteen threads on one store that is too small for what they write: what is read is right, what is pinned stays,
and the bound holds."""

import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from cacheblend.core.errors import StoreFullError
from cacheblend.core.plan.blocks import Block
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore, open_store
from cacheblend.store.format.block_file import encode_block, encode_chain
from campaign import rotating, share
from redis_server import needs_redis, redis_server
from store_blocks import make_block, make_chain, same_bits

THREADS, WRITTEN, PINNED = 16, 60, 3
BOUND = 12 * sum(len(part) for part in encode_block(make_block(0, tokens=9)))
SECONDS = share(30)
WANTED = ("new", "read", "missed", "deleted")
"""A run goes on until each of these happened more than ten times: a busy machine needs longer for them."""
AT_MOST_S = 120.0
LOOKS = 3
"""A folder is listed while others remove and write: a busy machine may see files beside those that took their place."""


class Load:
    """What the threads do, and what they saw that must not be."""

    def __init__(self, store: KVStore, together: int) -> None:
        self.store = store
        self.chains = [make_chain(together, seed, tokens=9) for seed in range(0, WRITTEN, together)]
        self.blocks = [block for chain in self.chains for block in chain]
        self.pinned = self.blocks[:PINNED]
        one = self.blocks[0]
        self.file_bytes = sum(len(part) for part in encode_chain(self.chains[0]))
        self.record_bytes = one.layout.block_bytes(len(one.token_ids))
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        self.store.pin([block.name for block in self.pinned])
        self.store.write_all(self.pinned)
        threads = [threading.Thread(target=self._guarded, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while not self.wrong and (elapsed := time.monotonic() - began) < seconds + AT_MOST_S:
            if elapsed >= seconds and self.is_varied():
                break
            over = [found for found in (self._over() for _ in range(LOOKS)) if found]
            if len(over) == LOOKS:
                self.wrong += over[0]
            self.done["looked"] += 1
            time.sleep(0.01)
        self._stop.set()
        for thread in threads:
            thread.join()

    def _over(self) -> list[str]:
        """The tiers that are over their bounds by more than one file."""
        held = self.store.stats()
        return [
            f"{tier.tier} has {tier.bytes} bytes, its bound is {tier.max_bytes}"
            for tier in held.tiers or (held,)
            if tier.bytes > (tier.max_bytes or 0) + (self.record_bytes if tier.tier == "memory" else self.file_bytes)
        ]

    def is_varied(self) -> bool:
        return min(self.done[what] for what in WANTED) > 10

    def _guarded(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._stop.is_set() and not self.wrong:
                self._step(rng)
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _step(self, rng: random.Random) -> None:
        what, block = rng.random(), rng.choice(self.blocks)
        if what < 0.35:
            try:
                for new in self.store.write_all(rng.choice(self.chains)):
                    self.done["new" if new else "held"] += 1
            except StoreFullError:
                self.done["full"] += 1  # blocks that other threads write now take the capacity
        elif what < 0.9:
            self._read(rng.choice([block, *self.pinned]), rng)
        elif what < 0.97 and block not in self.pinned:
            self.done["deleted"] += self.store.delete(block.name)
        elif what > 0.995:
            self.store.prune(BOUND // 2)
            self.done["pruned"] += 1

    def _read(self, block: Block, rng: random.Random) -> None:
        (entry,) = self.store.find([block.name])
        if entry is None:
            if block in self.pinned:
                self.wrong.append("a pinned block is gone")
            self.done["missed"] += 1
            return
        layer = rng.randrange(len(block.records))
        (record,) = self.store.read_many([block.name], layer)
        if isinstance(record, Exception):
            if block in self.pinned:
                self.wrong.append(f"a pinned block cannot be read: {record}")
            self.done["lost meanwhile"] += 1
        elif not same_bits(record, block.records[layer]):
            self.wrong.append(f"wrong bytes of {block.name.hex()}")
        else:
            self.done["read"] += 1


def check(store: KVStore, capsys: pytest.CaptureFixture[str], together: int = 1) -> None:
    load = Load(store, together)
    load.run(SECONDS)
    with capsys.disabled():
        print(f"\n{THREADS} threads, {SECONDS:g} s: {dict(load.done)}")
    assert load.wrong == []
    assert store.stats().damaged == 0
    assert load.is_varied()


@pytest.mark.parametrize(
    ("kind", "together"), rotating([("memory", 1), ("disk", 1), ("tiered", 3)], core=[("tiered", 3)])
)
def test_sixteen_threads(kind: str, together: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks in files of their own, or as many as `together` in one."""
    store: KVStore = MemoryStore(BOUND // 4)  # it counts records without their headers
    if kind != "memory":
        disk = DiskStore(tmp_path, max_bytes=BOUND, durable=False)
        store = disk if kind == "disk" else TieredStore(MemoryStore(BOUND // 8), disk)
    with store:
        check(store, capsys, together)


@needs_redis
@pytest.mark.slow
def test_sixteen_threads_on_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server() as server, open_store(f"{server.url}?max_bytes={BOUND}") as store:
        check(store, capsys)
