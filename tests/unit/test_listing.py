"""What an engine does between requests: it keeps its list of a store's chunks up to date, captures chunks, works in the
background.
"""

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from cacheblend.core.errors import StoreError, StoreFullError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.names import BlockName, as_token_ids, root_name
from cacheblend.core.plan.blocks import Block, ChunkManifest
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines import chunk_index as module
from cacheblend.engines import keeper as keeper_module
from cacheblend.engines.chunk_index import ChunkListing, ListChanges
from cacheblend.engines.hf.background import Background
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.store import KVStore, MemoryStore, open_store
from store_blocks import ROOT, before, make_block, make_manifest


def manifests(count: int) -> list[ChunkManifest]:
    return [make_manifest(make_block(seed), token_count=80 + seed) for seed in range(count)]


def open_listing(store: KVStore, refresh_s: float) -> ChunkListing:
    return ChunkListing(store, as_token_ids([1]), 64, refresh_s, keeps_changes=True)


def opened(refresh_s: float = 0, stored: int = 1) -> tuple[MemoryStore, ChunkListing, list[ChunkManifest]]:
    """A store, its listing, and two chunks, of which so many are listed there."""
    store, chunks = MemoryStore(1 << 20), manifests(2)
    for chunk in chunks[:stored]:
        store.put_manifest(chunk)
    return store, open_listing(store, refresh_s), chunks


def found(listing: ChunkListing, root: BlockName = ROOT) -> set[BlockName]:
    """The chunks that prompts of this root find."""
    longest = as_token_ids(np.arange(100) % 977)
    listing.match(root, Prompt.of([text(longest)]))
    return set(listing._index(root)._numbers)


def refreshed(listing: ChunkListing, is_done: Callable[[], bool]) -> None:
    """What is read in a thread is there some time."""
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end
        listing.refresh()


def let_age(folder: Path) -> None:
    """As if the last change were a while ago."""
    long_ago = time.time() - 60
    os.utime(folder / "manifests", (long_ago, long_ago))


def test_what_others_list_and_take_off_is_carried_over_for_each_root() -> None:
    store = MemoryStore(1 << 20)
    first, second, third = manifests(3)
    third = replace(third, anchor_ids=as_token_ids([2]))
    listing = open_listing(store, refresh_s=0)
    assert not listing.refresh()
    store.put_manifest(first)
    store.put_manifest(third)
    listing.update()
    assert found(listing) == {first.chunk_id}  # the other has another anchor
    listing.add([second])  # captured here
    store.put_manifest(second)
    store.delete_manifest(first.chunk_id)
    listing.update()
    assert found(listing) == {second.chunk_id}
    changes = listing.take_changes(64)
    assert [m.chunk_id for m in changes.added] == [first.chunk_id, second.chunk_id]
    assert changes.removed == []  # else it could not be told which of the two came first
    assert [m.chunk_id for m in listing.take_changes(64).removed] == [first.chunk_id]
    assert listing.take_changes(64) == ListChanges()
    listing.close()
    # each root finds its own chunks
    store = MemoryStore(1 << 20)
    chunks = manifests(40)
    roots = [root_name("model", "float32", salt=str(number)) for number in range(4)]
    chunks = [replace(chunk, root=roots[number % 4]) for number, chunk in enumerate(chunks)]
    listing = open_listing(store, refresh_s=0)
    for at in range(0, 40, 10):
        for chunk in chunks[at : at + 10]:
            store.put_manifest(chunk)
        listing.update()
        for root in roots:
            assert found(listing, root) == {c.chunk_id for c in chunks[: at + 10] if c.root == root}
        assert found(listing, root_name("another", "float32")) == set()


def test_the_list_is_read_in_a_thread_and_no_refresh_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, let_go, (first, second) = MemoryStore(1 << 20), Event(), manifests(2)
    store.put_manifest(first)
    read = store.manifests
    monkeypatch.setattr(store, "manifests", lambda: let_go.wait(30) and read())
    listing = open_listing(store, refresh_s=1e-9)
    assert not listing.refresh()  # and it came back at once
    let_go.set()
    listing.update()
    assert found(listing) == {first.chunk_id}
    refreshed(listing, lambda: listing._reading is None or listing._reading.done())
    let_go.clear()
    store.put_manifest(second)
    refreshed(listing, lambda: listing._reading is not None and not listing._reading.done())
    listing.update()  # waits a little
    assert listing.refresh()  # the old list serves while the new one is read: nobody waits for that one again
    assert found(listing) == {first.chunk_id}
    let_go.set()
    refreshed(listing, lambda: second.chunk_id in found(listing))
    listing.close()


def test_what_is_stored_in_a_pause_or_captured_while_the_list_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store, listing, (first, second) = opened(refresh_s=0.05)
    listing.update()
    store.put_manifest(second)
    time.sleep(0.1)  # no request came
    assert not listing.refresh()
    listing.update()
    assert found(listing) == {first.chunk_id, second.chunk_id}
    listing.close()
    # captured while it is read
    store, listing, (first, second) = opened()
    read = store.manifests

    def manifests_then_captured() -> list[ChunkManifest]:
        before = read()
        listing.add([second])
        return before

    monkeypatch.setattr(store, "manifests", manifests_then_captured)
    listing.update()
    assert found(listing) == {first.chunk_id, second.chunk_id}


def test_a_list_whose_reading_takes_long_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was not changed, and quickly asked for, in between."""
    store, let_go = MemoryStore(1 << 20), Event()
    (first,) = manifests(1)
    store.put_manifest(first)
    stamp, read = ["one"], store.manifests
    monkeypatch.setattr(store, "listing_stamp", lambda: stamp[0])
    listing = ChunkListing(store, as_token_ids([1]), 64, 0.01, fresh_s=0.05)
    listing.update()
    monkeypatch.setattr(store, "manifests", lambda: let_go.wait(30) and read())

    def read_again() -> bool:
        """Whether a look-up waits for the reading that is due."""
        time.sleep(0.02)
        is_waited_for = not listing.refresh()
        listing.update()
        assert listing.refresh()  # not again
        return is_waited_for

    stamp[0] = "two"
    assert read_again()
    let_go.set()
    refreshed(listing, lambda: listing._reading is None)
    let_go.clear()
    for _ in range(3):  # unchanged
        time.sleep(0.02)
        listing.refresh()
        listing.update()
    stamp[0] = "three"
    time.sleep(0.02)
    assert listing.refresh()
    let_go.set()
    listing.close()


def test_evicted_chunks_are_announced_once_and_again_when_they_are_back() -> None:
    """Their manifests stay, and with them their place in the list."""

    def changed() -> tuple[set[BlockName], set[BlockName]]:
        changes = listing.take_changes(9)
        added, removed = ([chunk.chunk_id for chunk in each] for each in (changes.added, changes.removed))
        assert len({*added, *removed}) == len(added) + len(removed)
        return {*added}, {*removed}

    store, listing, (one, other) = opened(stored=2)
    listing.update()
    assert changed() == ({one.chunk_id, other.chunk_id}, set())
    for _ in range(2):
        listing.observe({one.chunk_id: False, other.chunk_id: True, make_block(7).name: False})
    assert changed() == (set(), {one.chunk_id})
    listing.add([one, other])
    assert changed() == ({one.chunk_id}, set())
    listing.observe({one.chunk_id: False})
    listing.observe({one.chunk_id: True})  # another server captured it again
    assert changed() == (set(), {one.chunk_id})
    assert changed() == ({one.chunk_id}, set())
    listing.observe({one.chunk_id: False})
    store.delete_manifest(one.chunk_id)
    listing.update()
    assert changed() == (set(), {one.chunk_id})
    assert found(listing) == {other.chunk_id}
    listing.close()


@pytest.mark.may_fail("list of chunks")
def test_a_list_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store, (first,) = MemoryStore(1 << 20), manifests(1)
    store.put_manifest(first)
    read, fails = store.manifests, True

    def manifests_or_not() -> list[ChunkManifest]:
        if fails:
            raise StoreError("gone")
        return read()

    monkeypatch.setattr(store, "manifests", manifests_or_not)
    listing = open_listing(store, refresh_s=1e-9)
    with pytest.raises(StoreError, match="gone"):
        listing.update()
    fails = False
    refreshed(listing, lambda: listing.has_read)
    assert found(listing) == {first.chunk_id}
    fails = True
    refreshed(listing, lambda: "gone" in caplog.text)
    listing.update()  # the old list serves
    assert found(listing) == {first.chunk_id}
    listing.close()


def test_a_folder_that_did_not_change_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(f"file://{tmp_path}") as store:
        first, second = manifests(2)
        store.put_manifest(first)
        assert store.listing_stamp() is None  # a change may still come unseen
        let_age(tmp_path)
        listing = open_listing(store, refresh_s=0)
        listing.update()
        read = store.manifests
        monkeypatch.setattr(store, "manifests", lambda: pytest.fail("was listed again"))
        listing.update()
        monkeypatch.setattr(store, "manifests", read)
        store.put_manifest(second)
        listing.update()
        assert len(found(listing)) == 2
        let_age(tmp_path)
        before = store.listing_stamp()
        store.delete_manifest(first.chunk_id)
        assert store.listing_stamp() != before
        listing.close()


def test_an_index_is_made_once_and_no_change_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, made = Event(), []

    class SlowIndex(ChunkIndex):
        def __init__(self, min_tokens: int) -> None:
            super().__init__(min_tokens)
            made.append(self)
            assert let_go.wait(30)

    monkeypatch.setattr(module, "ChunkIndex", SlowIndex)
    _, listing, (first, second) = opened()
    listing.update()
    threads = [Thread(target=found, args=(listing,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    listing.add([second])  # and it came back, while the index is being made
    assert [m.chunk_id for m in listing.take_changes(64).added] == [first.chunk_id, second.chunk_id]
    let_go.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found(listing) == {first.chunk_id, second.chunk_id}


def test_nobody_waits_while_a_long_list_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler matches, and takes changes, between two steps; look-ups of tenants whose index is made only now
    match, too, and say which chunks are lost."""
    store, listing, (first, second) = opened()
    another = root_name("another", "float32")
    third, fourth = (replace(chunk, root=another) for chunk in manifests(4)[2:])
    store.put_manifest(third)
    is_applied, let_go = Event(), Event()
    listing.update()
    assert found(listing) == {first.chunk_id}
    copy = ChunkIndex.copy

    def slow(self: ChunkIndex) -> ChunkIndex:
        is_applied.set()
        assert let_go.wait(60)
        return copy(self)

    monkeypatch.setattr(ChunkIndex, "copy", slow)
    store.put_manifest(second)
    store.put_manifest(fourth)
    reader = Thread(target=listing.update)
    reader.start()
    assert is_applied.wait(30)
    answers: list[object] = []

    def step() -> None:
        answers.append(found(listing))
        answers.append({chunk.chunk_id for chunk in listing.take_changes(64).added})
        answers.append(list(listing.names(another)))
        answers.append(found(listing, root_name("nobody", "float32")))
        answers.append(found(listing, another))
        listing.observe({first.chunk_id: False})

    scheduler = Thread(target=step, daemon=True)
    scheduler.start()
    scheduler.join(20)
    let_go.set()
    assert answers == [{first.chunk_id}, {first.chunk_id, third.chunk_id}, [third.chunk_id], set(), {third.chunk_id}]
    reader.join()
    assert found(listing) == {first.chunk_id, second.chunk_id}
    assert found(listing, another) == {third.chunk_id, fourth.chunk_id}
    changes = listing.take_changes(64)
    assert [chunk.chunk_id for chunk in changes.removed] == [first.chunk_id]
    assert [chunk.chunk_id for chunk in changes.added] == [second.chunk_id, fourth.chunk_id]
    listing.close()


@pytest.mark.parametrize("seed", range(5))
def test_tenants_without_chunks_take_no_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_INDEXES", 8)
    rng, store = random.Random(seed), MemoryStore(1 << 20)
    roots = [root_name("model", "float32", salt=str(number)) for number in range(20)]
    for root, chunk in zip(roots, manifests(20), strict=True):
        store.put_manifest(replace(chunk, root=root))
    listing = open_listing(store, refresh_s=0)
    listing.update()
    used: list[BlockName] = []
    for number in range(200):
        nobody = root_name("model", "float32", salt=f"nobody {number}")
        root = rng.choice([rng.choice(roots), nobody, nobody])
        assert len(found(listing, root)) == (root in roots)
        used = [each for each in used if each != root] + [root] * (root in roots)
        assert len(listing._indexes) <= 8 and all(map(listing.has_index, used[-8:]))
    listing.add([replace(make_manifest(make_block(77), token_count=90), root=nobody)])
    assert len(found(listing, nobody)) == 1
    # One that loses its place while a list is applied is made again
    one, other = (chunk.root for chunk in [*listing._listed.values()][:2])
    new = [
        replace(make_manifest(make_block(78 + at), token_count=90), root=root) for at, root in enumerate((one, other))
    ]
    assert len(found(listing, one)) == len(found(listing, other)) == 1
    copy = ChunkIndex.copy

    def evicting(index: ChunkIndex) -> ChunkIndex:
        listing._indexes.pop(one if index is listing._indexes.get(other) else other, None)
        return copy(index)

    monkeypatch.setattr(ChunkIndex, "copy", evicting)
    listing.add(new)
    assert len(found(listing, one)) == len(found(listing, other)) == 2
    listing.close()


@pytest.mark.parametrize("seed", range(4))
def test_threads_that_read_add_forget_and_match_at_once_leave_what_the_store_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tenants than indexes are kept, so that each thread takes others' away."""
    monkeypatch.setattr(module, "MOST_INDEXES", 3)
    copy = ChunkIndex.copy

    def slow_copy(index: ChunkIndex) -> ChunkIndex:
        time.sleep(0.001)  # others go on meanwhile
        return copy(index)

    monkeypatch.setattr(ChunkIndex, "copy", slow_copy)
    rng, store = random.Random(seed), MemoryStore(1 << 20)
    roots = [root_name("model", "float32", salt=str(number)) for number in range(6)]
    chunks = [replace(chunk, root=roots[number % 6]) for number, chunk in enumerate(manifests(48))]
    listing = open_listing(store, refresh_s=1000)
    announced: list[ListChanges] = []

    def store_and_drop(own: list[ChunkManifest], draw: random.Random) -> None:
        for chunk in own:
            store.put_manifest(chunk)
            if draw.random() < 0.3:  # else a reading finds it, with those of other tenants
                listing.add([chunk])
            if draw.random() < 0.4:
                store.delete_manifest(chunk.chunk_id)
                listing.forget([chunk.chunk_id])
            time.sleep(0.002)

    def read_and_match(draw: random.Random) -> None:
        for _ in range(60):
            listing._read() if draw.random() < 0.2 else listing.match(draw.choice(roots), Prompt.of([text([7] * 99)]))

    with ThreadPoolExecutor(4) as pool:
        draws = [random.Random(rng.random()) for _ in range(4)]
        work = [pool.submit(store_and_drop, chunks[at::2], draws[at]) for at in range(2)]
        work += [pool.submit(read_and_match, draw) for draw in draws[2:]]
        while not all(each.done() for each in work):
            announced.append(listing.take_changes(4))
    for each in work:
        each.result()
    listing._read()
    held = {chunk.chunk_id: chunk for chunk in store.manifests()}
    assert listing._listed.keys() == held.keys()
    for root in roots:
        assert found(listing, root) == {name for name, chunk in held.items() if chunk.root == root}
    while changes := [*(last := listing.take_changes(64)).added, *last.removed]:
        announced.append(last)
    told = Counter(chunk.chunk_id for each in announced for chunk in each.added)
    told.subtract(chunk.chunk_id for each in announced for chunk in each.removed)
    assert +told == Counter(held.keys()) and min(told.values()) >= 0 and not changes
    listing.close()


# ---- keeping captured chunks ----------------------------------------------------------------------------------


FIRST = make_block(1)
BLOCKS = [FIRST, make_block(2, parent=FIRST.name)]
CHUNK = CapturedChunk(BLOCKS, make_manifest(BLOCKS[1]))


def test_a_chunk_is_held_with_all_blocks_and_its_manifest_which_is_written_last() -> None:
    store = MemoryStore()
    keeper = ChunkKeeper(store)
    assert not keeper.is_held(CHUNK.manifest)
    for block in BLOCKS:
        store.write(block)
    assert not keeper.is_held(CHUNK.manifest)  # not listed
    store.put_manifest(CHUNK.manifest)
    assert keeper.is_held(CHUNK.manifest)

    other = MemoryStore()
    other.write(BLOCKS[0])
    other.put_manifest(CHUNK.manifest)
    assert not ChunkKeeper(other).is_held(CHUNK.manifest)  # a block is missing

    written, order = MemoryStore(), list[str]()
    before(written, "write", lambda block: order.append("block"))
    before(written, "put_manifest", lambda manifest: order.append("manifest"))
    assert ChunkKeeper(written).keep(CHUNK)
    assert order == ["block", "block", "manifest"]
    assert ChunkKeeper(written).is_held(CHUNK.manifest)


@pytest.mark.may_fail("store write")
def test_a_store_error_pauses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, is_full, store = 100.0, True, MemoryStore()
    monkeypatch.setattr(keeper_module.time, "monotonic", lambda: now)

    def refuse(block: Block) -> None:
        if is_full:
            raise StoreFullError("the store is full: 3 of 3 bytes")

    before(store, "write", refuse)
    keeper = ChunkKeeper(store)
    with pytest.raises(StoreFullError):  # storing for `warm` raises, and does not pause
        keeper.store(CHUNK)
    assert not keeper.is_paused
    with caplog.at_level(logging.WARNING):
        assert not keeper.keep(CHUNK)
    assert keeper.is_paused
    assert caplog.messages == ["missed chunks are not stored for 60 s: the store is full: 3 of 3 bytes"]

    now += keeper_module.PAUSE_S - 0.5
    assert keeper.is_paused
    now += 1
    assert not keeper.is_paused
    is_full = False
    assert keeper.keep(CHUNK)
    assert not keeper.is_paused


# ---- background work between requests -------------------------------------------------------------------------


SOON = 5.0  # seconds: only a failing test waits that long


@contextmanager
def request_on(background: Background) -> Iterator[None]:
    """A request under way."""
    background.begin_request()
    try:
        yield
    finally:
        background.end_request()


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background(limit=3)
    yield made
    made.close()


def test_jobs_run_in_order_on_another_thread_and_flush_works_them_off(background: Background) -> None:
    done: list[tuple[int, str]] = []
    for i in range(3):
        assert background.submit(i, lambda i=i: done.append((i, threading.current_thread().name)))
    assert background.flush(SOON)
    assert done == [(i, "cacheblend-background") for i in range(3)]
    end = time.monotonic() + SOON
    while any(t.name == "cacheblend-background" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(t.name == "cacheblend-background" for t in threading.enumerate())
    # during a request, too, or it gives up after its timeout
    ran, go_on = threading.Event(), threading.Event()
    with request_on(background):
        background.submit("a", ran.set)
        assert background.flush(SOON)
        assert ran.is_set()
        background.submit("b", ran.clear)
        time.sleep(0.05)
        assert ran.is_set()  # the flush is over: a request holds the queue again
    assert background.flush(SOON) and background.flush(0)
    background.submit("a", lambda: go_on.wait(SOON))
    started = time.monotonic()
    assert not background.flush(0.05)
    assert time.monotonic() - started < SOON / 2
    go_on.set()
    assert background.flush(SOON)


def test_no_job_is_begun_while_a_request_is_under_way_and_few_wait(background: Background) -> None:
    ran, begun, go_on, second = (threading.Event() for _ in range(4))
    with pytest.raises(KeyError), request_on(background):  # also by one that fails
        with request_on(background):
            background.submit("a", ran.set)
        assert not ran.wait(0.05)
        raise KeyError
    assert ran.wait(SOON)
    background.submit("long", lambda: (begun.set(), go_on.wait(SOON)))
    assert begun.wait(SOON)
    background.submit("next", second.set)
    with request_on(background):
        go_on.set()
        assert not second.wait(0.05)
    assert second.wait(SOON)
    # what waits is not queued twice, and more than the limit is dropped and counted
    runs: list[int] = []
    with request_on(background):
        assert background.submit("a", lambda: runs.append(1))
        assert background.submit("a", lambda: runs.append(2))
    assert background.flush(SOON) and runs == [1]
    background.submit("a", lambda: runs.append(3))
    assert background.flush(SOON) and runs == [1, 3]
    assert background.given_up["queue full"] == 0
    runs.clear()
    with request_on(background):
        taken = [background.submit(i, lambda i=i: runs.append(i)) for i in range(5)]
    assert taken == [True] * 3 + [False] * 2
    assert background.given_up["queue full"] == 2
    assert background.flush(SOON) and runs == [0, 1, 2]
    none = Background(limit=0)
    assert not none.submit("a", lambda: None) and none.given_up["queue full"] == 1
    none.close()


@pytest.mark.may_fail("background work")
def test_a_failing_job_does_not_end_the_thread(background: Background, caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()
    with request_on(background):
        background.submit("bad", lambda: 1 / 0)
        background.submit("good", ran.set)
    assert background.flush(SOON)
    assert ran.is_set()
    assert background.given_up["failed"] == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_caller_that_is_never_idle_catches_up_and_close_drops_what_waits() -> None:
    # patient jobs do not take all places
    background, done = Background(limit=4), list[tuple[object, str]]()

    def note(name: object) -> None:
        done.append((name, threading.current_thread().name))

    with request_on(background):
        background.submit("patient", lambda: note("patient"), patient=True)
        background.submit("a", lambda: note("a"))
        assert not background.catch_up(60.0)
        assert background.catch_up(0.0)
        assert not background.catch_up(0.0)
        assert done == [("a", threading.current_thread().name)]
    assert background.flush(SOON) and done.pop()[0] == "patient" and done.pop()
    with request_on(background):
        for number in range(9):
            assert background.submit(number, lambda n=number: note(n), patient=True)
        assert background.submit("a", lambda: note("a"))
    assert background.flush(SOON)
    assert [name for name, _ in done] == [8, "a"] and background.given_up["queue full"] == 8
    background.close()
    # close ends the thread
    background = Background(limit=5)
    begun, go_on, never = threading.Event(), threading.Event(), threading.Event()
    background.submit("long", lambda: (begun.set(), go_on.wait(SOON)))
    assert begun.wait(SOON)
    background.submit("waits", never.set)
    threading.Timer(0.02, go_on.set).start()
    background.close()
    assert go_on.is_set()
    assert not never.is_set()
    assert not background.submit("late", never.set)
    assert background.flush(SOON)
    background.close()


@pytest.mark.may_fail("background work")
def test_a_thread_that_cannot_be_started_is_later(background: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends whatever the system's limits are, and what waits is done once there is a thread."""
    start, tries, done = threading.Thread.start, iter(range(9)), list[int]()

    def scarce(thread: threading.Thread) -> None:
        if next(tries) < 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with request_on(background):
        assert background.submit("a", lambda: done.append(1))
    assert not done and background.flush(SOON) and done == [1]
    background.close()
