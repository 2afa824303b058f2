"""Write-behind: bounded, without duplicates, and never delaying a request."""

import logging
import threading
import time

import pytest

from cacheblend.core.errors import InvalidInputError, StoreError, StoreFullError
from cacheblend.core.plan.blocks import Block
from cacheblend.store import MemoryStore, WriteBehind
from store_blocks import holds, make_block


class SlowStore(MemoryStore):
    """Writes only when the test allows it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go = threading.Event()
        self.started = threading.Event()

    def write(self, block: Block) -> bool:
        self.started.set()
        assert self.go.wait(10)
        return super().write(block)


NBYTES = sum(record.nbytes for record in make_block(1).records)


def test_blocks_and_makers_arrive() -> None:
    store = MemoryStore(1 << 20)
    made, later, none = make_block(1), make_block(2), make_block(3)
    with WriteBehind(store) as writer:
        assert writer.submit(made)
        assert writer.submit(lambda: later, later.name, NBYTES)
        assert writer.submit(lambda: None, none.name)
        assert writer.flush(5)
        assert writer.submit(made)
        assert writer.flush(5)
        assert holds(store, made)
        assert holds(store, later)
        stats = writer.stats()
        assert (stats.written, stats.held, stats.failed, stats.waiting, stats.waiting_bytes) == (2, 1, 0, 0, 0)


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


def test_close_gives_up_after_its_timeout() -> None:
    store = SlowStore()
    writer = WriteBehind(store)
    for seed in range(4):
        writer.submit(make_block(seed))
    assert store.started.wait(5)
    assert not writer.close(0.05)
    assert (writer.stats().waiting, writer.stats().dropped) == (1, 3)
    store.go.set()
    assert writer.close(5)
    assert store.stats().blocks == 1


def test_the_thread_starts_with_the_first_block_and_is_a_daemon() -> None:
    def mine() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "cacheblend-writer" and t.is_alive()]

    before = len(mine())
    store = SlowStore()
    writer = WriteBehind(store)
    assert len(mine()) == before
    writer.submit(make_block(1))
    assert len(mine()) == before + 1
    assert all(thread.daemon for thread in mine())
    store.go.set()
    writer.close(5)
    assert len(mine()) == before


def test_wrong_use() -> None:
    with pytest.raises(InvalidInputError, match="above 0, got 0"):
        WriteBehind(MemoryStore(), max_bytes=0)
    with pytest.raises(InvalidInputError, match="needs the name"):
        WriteBehind(MemoryStore()).submit(lambda: None)
    assert not issubclass(InvalidInputError, StoreError)
