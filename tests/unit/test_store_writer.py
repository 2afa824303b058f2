"""Write-behind: what waits, what is dropped, withdrawn or written together, and errors."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError, StoreError, StoreFullError
from cacheblend.core.plan.blocks import Block
from cacheblend.store import MemoryStore, TieredStore, WriteBehind
from cacheblend.store.combined import CascadeStore
from store_blocks import holds, make_block, make_chain
from store_folders import disk, inodes


class SlowStore(MemoryStore):
    """Writes only when the test allows it, and counts what is written together."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go, self.started, self.calls = threading.Event(), threading.Event(), list[int]()
        self.refused: set[bytes] = set()

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        self.started.set()
        assert self.go.wait(10)
        self.calls.append(len(blocks))
        if any(block.name in self.refused for block in blocks):
            raise StoreError("refused")
        return super().write_all(blocks)


NBYTES = sum(record.nbytes for record in make_block(1).records)


def test_blocks_and_makers_arrive_by_a_daemon_that_starts_with_the_first() -> None:
    def mine() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "cacheblend-writer" and t.is_alive()]

    store, before = MemoryStore(1 << 20), len(mine())
    made, later, none = make_block(1), make_block(2), make_block(3)
    with WriteBehind(store) as writer:
        assert len(mine()) == before
        assert writer.submit(made)
        assert len(mine()) == before + 1 and all(thread.daemon for thread in mine())
        assert writer.submit(lambda: later, later.name, NBYTES)
        assert writer.submit(lambda: None, none.name)
        assert writer.flush(5)
        assert writer.submit(made)
        assert writer.flush(5)
        assert holds(store, made) and holds(store, later)
        stats = writer.stats()
        assert (stats.written, stats.held, stats.failed, stats.waiting, stats.waiting_bytes) == (2, 1, 0, 0, 0)
    assert len(mine()) == before


def test_a_full_queue_drops_and_a_waiting_name_is_not_queued_twice() -> None:
    store = SlowStore()
    writer = WriteBehind(store, max_bytes=2 * NBYTES)
    begun = time.perf_counter()
    assert [writer.submit(make_block(seed)) for seed in (1, 2, 1, 3, 2)] == [True, True, False, False, False]
    assert not writer.flush(0.05)
    assert time.perf_counter() - begun < 2
    stats = writer.stats()
    assert (stats.waiting, stats.waiting_bytes, stats.duplicates, stats.dropped) == (2, 2 * NBYTES, 2, 1)
    store.go.set()
    assert writer.flush(5)
    assert writer.submit(make_block(3))
    assert writer.close(5)
    assert writer.close(5)
    assert not writer.submit(make_block(4))
    assert store.stats().blocks == 3
    assert writer.stats().dropped == 2


def test_a_withdrawn_block_does_not_arrive() -> None:
    store = SlowStore()
    writer = WriteBehind(store)
    being_written, waiting, other = make_block(1), make_block(2), make_block(3)
    for block in (being_written, waiting, other):
        writer.submit(block)
    assert store.started.wait(5)
    assert writer.withdraw(waiting.name)
    assert not writer.withdraw(waiting.name)
    assert (writer.stats().waiting, writer.stats().waiting_bytes) == (2, 2 * NBYTES)
    threading.Timer(0.1, store.go.set).start()
    assert writer.withdraw(being_written.name)
    assert holds(store, being_written)  # it was waited for: a delete that follows finds it
    assert writer.close(5)
    assert holds(store, other) and store.find([waiting.name]) == [None]


def test_errors_are_counted_and_reported_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(NBYTES)
    store.pin([make_block(0).name])
    store.write(make_block(0))

    def broken() -> Block:
        raise ZeroDivisionError("a maker's own")

    with caplog.at_level(logging.WARNING, "cacheblend.store"), WriteBehind(store) as writer:
        for seed in range(1, 4):
            writer.submit(make_block(seed))
            writer.submit(broken, make_block(seed + 10).name)
        assert writer.flush(5)
        assert writer.stats().failed == 6
        store.unpin([make_block(0).name])
        writer.submit(make_block(1))
        assert writer.flush(5)
        assert holds(store, make_block(1))
    assert sorted(r.getMessage().split(": ")[1] for r in caplog.records) == [
        StoreFullError.__name__,
        ZeroDivisionError.__name__,
    ]


def test_wrong_use() -> None:
    with pytest.raises(InvalidInputError, match="above 0, got 0"):
        WriteBehind(MemoryStore(), max_bytes=0)
    with pytest.raises(InvalidInputError, match="needs the name"):
        WriteBehind(MemoryStore()).submit(lambda: None)
    assert not issubclass(InvalidInputError, StoreError)


# ---- chains ------------------------------------------------------------------------------------------------


def test_stores_made_of_others_pass_chains_on(tmp_path: Path) -> None:
    chain = make_chain(4)
    near, far = disk(tmp_path / "near"), disk(tmp_path / "far")
    with TieredStore(MemoryStore(1 << 20), CascadeStore([near, far])) as store:
        assert store.write_all(chain) == [True] * 4
        store.flush()
        assert [len(inodes(each, chain)) for each in (near, far)] == [1, 1]
        assert store.front.stats().blocks == 4
        assert store.write_all(chain) == [False] * 4


def test_blocks_that_wait_are_written_with_those_that_continue_them_and_one_may_fail() -> None:
    store = SlowStore()
    first, chain, other, refused = make_block(90), make_chain(5), make_block(95), make_chain(4, seed=40)
    store.refused = {refused[1].name}
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
        writer.submit_all(refused)
        assert writer.flush(10)
        assert [holds(store, block) for block in refused] == [True, False, True, True]
        assert (writer.stats().written, writer.stats().failed) == (10, 1)


def test_close_gives_up_after_its_timeout_and_withdrawing_one_of_several_being_written_waits_for_them() -> None:
    store = SlowStore()
    chain, behind = make_chain(3), make_block(90)
    writer = WriteBehind(store)
    with writer._changed:  # all of them wait before the first is taken
        for block in [*chain, behind]:
            writer.submit(block)
    assert store.started.wait(10)
    assert not writer.close(0.05)
    assert (writer.stats().waiting, writer.stats().dropped) == (3, 1)
    threading.Timer(0.1, store.go.set).start()
    assert writer.withdraw(chain[2].name)
    assert holds(store, chain[2])
    assert writer.close(10)
    assert store.stats().blocks == 3
