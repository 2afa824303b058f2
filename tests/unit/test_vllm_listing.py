"""The listing that keeps vLLM's scheduler up to date with a store that others write to."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from cacheblend.core.errors import StoreError
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.matching import ChunkIndex
from cacheblend.engines.vllm.listing import ChunkListing
from cacheblend.store import MemoryStore, open_store
from store_blocks import make_block, make_manifest


def manifests(count: int) -> list[ChunkManifest]:
    return [make_manifest(make_block(seed), token_count=80 + seed) for seed in range(count)]


def refreshed(listing: ChunkListing, is_done: Callable[[], bool]) -> None:
    """What is read in a thread is there some time."""
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end
        listing.refresh()


def resolve_settings(folder: Path) -> None:
    """As if the last change were a while ago."""
    long_ago = time.time() - 60
    os.utime(folder / "manifests", (long_ago, long_ago))


def test_what_others_list_and_take_off_is_carried_over() -> None:
    store, index = MemoryStore(1 << 20), ChunkIndex(64)
    first, second, third = manifests(3)
    listing = ChunkListing(store, index, lambda m: m.chunk_id != third.chunk_id, refresh_s=0)
    store.put_manifest(first)
    store.put_manifest(third)
    listing.refresh()
    assert index.chunk_ids == [first.chunk_id]
    index.add([second])  # captured here, not listed yet
    store.delete_manifest(first.chunk_id)
    listing.refresh()
    assert index.chunk_ids == [second.chunk_id]
    listing.close()


def test_a_list_is_read_beside_its_owner_but_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store, index, let_go = MemoryStore(1 << 20), ChunkIndex(64), Event()
    first, second = manifests(2)
    store.put_manifest(first)
    listing = ChunkListing(store, index, lambda m: True, refresh_s=1e-9)
    listing.refresh()
    assert first.chunk_id in index
    store.put_manifest(second)
    read = store.manifests
    monkeypatch.setattr(store, "manifests", lambda: let_go.wait(10) and read())
    listing.refresh()
    assert second.chunk_id not in index  # and it came back at once
    let_go.set()
    refreshed(listing, lambda: second.chunk_id in index)
    listing.close()


def test_a_list_that_cannot_be_read_raises_the_first_time_and_is_logged_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, index = MemoryStore(1 << 20), ChunkIndex(64)
    (first,) = manifests(1)
    store.put_manifest(first)
    read, fails = store.manifests, True

    def manifests_or_not() -> list[ChunkManifest]:
        if fails:
            raise StoreError("gone")
        return read()

    monkeypatch.setattr(store, "manifests", manifests_or_not)
    listing = ChunkListing(store, index, lambda m: True, refresh_s=1e-9)
    with pytest.raises(StoreError, match="gone"):
        listing.refresh()
    fails = False
    listing.refresh()
    assert first.chunk_id in index
    fails = True
    refreshed(listing, lambda: "gone" in caplog.text)
    assert first.chunk_id in index
    listing.close()


def test_a_folder_that_did_not_change_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(f"file://{tmp_path}") as store:
        first, second = manifests(2)
        store.put_manifest(first)
        assert store.listing_stamp() is None  # a change may still come unseen
        resolve_settings(tmp_path)
        index = ChunkIndex(64)
        listing = ChunkListing(store, index, lambda m: True, refresh_s=0)
        listing.refresh()
        read = store.manifests
        monkeypatch.setattr(store, "manifests", lambda: pytest.fail("was listed again"))
        listing.refresh()
        monkeypatch.setattr(store, "manifests", read)
        store.put_manifest(second)
        listing.refresh()
        assert len(index) == 2
        resolve_settings(tmp_path)
        before = store.listing_stamp()
        store.delete_manifest(first.chunk_id)
        assert store.listing_stamp() != before
        listing.close()
