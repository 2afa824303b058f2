"""Keeps computed chunks in a store: checks whether a chunk is held, stores it, pauses after a store error."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from cacheblend.core.errors import StoreError
from cacheblend.core.failures import NOT_WRITTEN, count_failure
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.core.plan.blocks import Block, ChunkManifest
from cacheblend.store import KVStore

PAUSE_S = 60  # seconds without further attempts after a store could not take a chunk
logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class WarmReport:
    """What `warm` did: chunks computed and stored, chunks that the store already held, tokens of the stored chunks,
    seconds; and how many of all chunks the store does not hold in the end: it is too small for them."""

    stored: int
    held: int
    tokens: int
    seconds: float
    missing: int = 0


class ChunkKeeper:
    """Keeps chunks in one store. Thread-safe. `listeners` are called with each stored chunk, by the thread that did."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._resume_at = 0.0
        self.listeners: list[Callable[[ChunkManifest], None]] = []

    @property
    def is_paused(self) -> bool:
        """The store refused a chunk less than `PAUSE_S` ago: computing another one would be wasted."""
        return time.monotonic() < self._resume_at

    def is_held(self, manifest: ChunkManifest) -> bool:
        """Whether the store holds all blocks of a chunk, and lists it. Raises `StoreError`."""
        store = self._store.lasting
        held = store.find(manifest.block_names)
        return all(entry is not None for entry in held) and store.has_manifest(manifest.chunk_id)

    def missing(self, chunks: Sequence[ChunkManifest]) -> int:
        """How many chunks the store does not hold all blocks of; asks it once. Raises `StoreError`."""
        names = [name for chunk in chunks for name in chunk.block_names]
        held = dict(zip(names, self._store.lasting.held(names), strict=True))
        return sum(not all(held[name] for name in chunk.block_names) for chunk in chunks)

    def store(self, chunk: CapturedChunk) -> None:
        """Writes a chunk's blocks, then its manifest, so that a listed chunk is complete. The anchor's blocks, which
        stay when the chunk is deleted, are written apart: together they might share a file. Raises `StoreError`: the
        store is full or cannot be written to; blocks written before stay."""
        own = set(chunk.manifest.block_names)
        for _, blocks in groupby(chunk.blocks, lambda block: block.name in own):
            self._store.write_all(list(blocks))
        self._store.put_manifest(chunk.manifest)
        for listener in self.listeners:
            listener(chunk.manifest)

    def keep(self, chunk: CapturedChunk) -> bool:
        """Stores a chunk after the request that missed it; False, logged, and a pause if the store cannot take it."""
        return self._attempt(lambda: self.store(chunk))

    def write(self, blocks: Sequence[Block]) -> bool:
        """Writes blocks that belong to no chunk; as `keep`."""
        return self._attempt(lambda: self._store.write_all(blocks))

    def _attempt(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except StoreError as error:  # full or read-only: the next chunk would fail as well
            self._resume_at = time.monotonic() + PAUSE_S
            logger.warning("missed chunks are not stored for %d s: %s", PAUSE_S, error)
            count_failure(NOT_WRITTEN)
            return False
        return True
