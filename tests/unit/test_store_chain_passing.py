"""Chains that reach a folder through other stores or write-behind, which writes what waits together."""

import threading
from pathlib import Path
from typing import Any

from cacheblend.core.errors import StoreError
from cacheblend.store import MemoryStore, TieredStore, WriteBehind
from cacheblend.store.combined import CascadeStore
from store_blocks import holds, make_block, make_chain
from store_folders import disk, inodes


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
