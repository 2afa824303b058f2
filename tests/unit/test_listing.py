"""The listing that keeps an engine up to date with a store that others write to."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from cacheblend.core.errors import StoreError
from cacheblend.core.names import BlockName, as_token_ids, root_name
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.chunk_index import ChunkListing, ListChanges
from cacheblend.store import KVStore, MemoryStore, open_store
from store_blocks import ROOT, make_block, make_manifest


def manifests(count: int) -> list[ChunkManifest]:
    return [make_manifest(make_block(seed), token_count=80 + seed) for seed in range(count)]


def open_listing(store: KVStore, refresh_s: float) -> ChunkListing:
    return ChunkListing(store, as_token_ids([1]), 64, refresh_s, keeps_changes=True)


def found(listing: ChunkListing, root: BlockName = ROOT) -> set[BlockName]:
    """The chunks that prompts of this root find."""
    longest = as_token_ids(np.arange(100) % 977)
    listing.match(root, Prompt.of([text(longest)]))
    return set(listing._index(root).chunk_ids)


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


def test_what_others_list_and_take_off_is_carried_over() -> None:
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


def test_each_root_finds_its_own_chunks() -> None:
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
    store, let_go = MemoryStore(1 << 20), Event()
    first, second = manifests(2)
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


def test_after_a_pause_what_others_stored_meanwhile_is_found_at_once() -> None:
    store = MemoryStore(1 << 20)
    first, second = manifests(2)
    store.put_manifest(first)
    listing = open_listing(store, refresh_s=0.05)
    listing.update()
    store.put_manifest(second)
    time.sleep(0.1)  # no request came
    assert not listing.refresh()
    listing.update()
    assert found(listing) == {first.chunk_id, second.chunk_id}
    listing.close()


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

    store = MemoryStore(1 << 20)
    one, other = manifests(2)
    for manifest in (one, other):
        store.put_manifest(manifest)
    listing = open_listing(store, refresh_s=0)
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


def test_a_chunk_that_is_captured_while_the_list_is_read_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(1 << 20)
    first, second = manifests(2)
    store.put_manifest(first)
    listing = open_listing(store, refresh_s=0)
    read = store.manifests

    def manifests_then_captured() -> list[ChunkManifest]:
        before = read()
        listing.add([second])
        return before

    monkeypatch.setattr(store, "manifests", manifests_then_captured)
    listing.update()
    assert found(listing) == {first.chunk_id, second.chunk_id}


@pytest.mark.may_fail("list of chunks")
def test_a_list_that_cannot_be_read_raises_until_it_is_there_and_is_logged_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(1 << 20)
    (first,) = manifests(1)
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
    refreshed(listing, lambda: first.chunk_id in found(listing))
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


def test_an_index_is_made_once_however_many_ask_for_it_and_no_change_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cacheblend.core.plan.chunk_matches import ChunkIndex
    from cacheblend.engines import chunk_index as module

    store, let_go, made = MemoryStore(1 << 20), Event(), []

    class SlowIndex(ChunkIndex):
        def __init__(self, min_tokens: int) -> None:
            super().__init__(min_tokens)
            made.append(self)
            assert let_go.wait(30)

    monkeypatch.setattr(module, "ChunkIndex", SlowIndex)
    first, second = manifests(2)
    store.put_manifest(first)
    listing = open_listing(store, refresh_s=0)
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
    """vLLM's scheduler matches, and takes changes, between two steps."""
    from cacheblend.core.plan.chunk_matches import ChunkIndex

    store, is_applied, let_go = MemoryStore(1 << 20), Event(), Event()
    first, second = manifests(2)
    store.put_manifest(first)
    listing = open_listing(store, refresh_s=0)
    listing.update()
    assert found(listing) == {first.chunk_id}
    copy = ChunkIndex.copy

    def slow(self: ChunkIndex) -> ChunkIndex:
        is_applied.set()
        assert let_go.wait(60)
        return copy(self)

    monkeypatch.setattr(ChunkIndex, "copy", slow)
    store.put_manifest(second)
    reader = Thread(target=listing.update)
    reader.start()
    assert is_applied.wait(30)
    answers: list[object] = []

    def step() -> None:
        answers.append(found(listing))
        answers.append(listing.take_changes(64))

    scheduler = Thread(target=step, daemon=True)
    scheduler.start()
    scheduler.join(20)
    assert answers == [{first.chunk_id}, ListChanges()]
    let_go.set()
    reader.join()
    assert found(listing) == {first.chunk_id, second.chunk_id}
    assert [chunk.chunk_id for chunk in listing.take_changes(64).added] == [first.chunk_id, second.chunk_id]
    listing.close()


@pytest.mark.parametrize("seed", range(5))
def test_tenants_who_have_stored_nothing_take_no_place_of_those_who_have(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend.engines import chunk_index as module

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
    listing.close()
