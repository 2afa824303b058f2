"""Keeping captured chunks: what counts as held, the order of writing, and the pause after a store error."""

import logging

import pytest

from cacheblend.core.errors import StoreError, StoreFullError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.plan.blocks import Block, ChunkManifest
from cacheblend.engines import keeper as keeper_module
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.store import MemoryStore
from store_blocks import make_block, make_manifest

FIRST = make_block(1)
BLOCKS = [FIRST, make_block(2, parent=FIRST.name)]
CHUNK = CapturedChunk(BLOCKS, make_manifest(BLOCKS[1]))


class Recording(MemoryStore):
    """A store that remembers the order of its writes, and refuses to write as long as it has an error."""

    def __init__(self) -> None:
        super().__init__()
        self.error: StoreError | None = None
        self.order: list[str] = []

    def write(self, block: Block) -> None:
        if self.error is not None:
            raise self.error
        self.order.append("block")
        super().write(block)

    def put_manifest(self, manifest: ChunkManifest) -> None:
        self.order.append("manifest")
        super().put_manifest(manifest)


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

    recording = Recording()
    assert ChunkKeeper(recording).keep(CHUNK)
    assert recording.order == ["block", "block", "manifest"]
    assert ChunkKeeper(recording).is_held(CHUNK.manifest)


@pytest.mark.may_fail("store write")
def test_a_store_error_pauses_and_the_pause_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(keeper_module.time, "monotonic", lambda: now)
    store = Recording()
    store.error = StoreFullError("the store is full: 3 of 3 bytes")
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
    store.error = None
    assert keeper.keep(CHUNK)
    assert not keeper.is_paused
