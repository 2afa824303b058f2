"""Keeps an index of chunks up to date with a store that others may write to; reads the store's list in a thread."""

import logging
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.matching import ChunkIndex
from cacheblend.store import KVStore

logger = logging.getLogger("cacheblend.vllm")


@dataclass
class _Changes:
    """What changed between two readings of the list."""

    added: list[ChunkManifest] = field(default_factory=list)
    removed: set[BlockName] = field(default_factory=set)


class ChunkListing:
    """Copies a store's list of chunks to an index.

    Args:
        store: its list is read.
        index: is updated, only by the thread that calls `refresh`.
        is_wanted: whether prompts of this engine can use a chunk.
        refresh_s: the list is read again after so many seconds; 0: at each call, which then waits for it.
    """

    def __init__(
        self, store: KVStore, index: ChunkIndex, is_wanted: Callable[[ChunkManifest], bool], refresh_s: float
    ) -> None:
        self._store, self._index, self._is_wanted, self._refresh_s = store, index, is_wanted, refresh_s
        self._listed: set[BlockName] = set()
        self._stamp: Hashable | None = None
        self._read_at = float("-inf")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-listing")
        self._reading: Future[_Changes] | None = None
        self._is_first = True
        if refresh_s:
            self._start_reading()

    def refresh(self) -> None:
        """Applies the last reading to the index, and starts a new one if it is due.

        Waits for the reading the first time only (and always, if `refresh_s` is 0): a long list takes seconds to read.

        Raises:
            StoreError: the list cannot be read, and this call waits for it. Otherwise the error is logged and
                the index stays as it is.
        """
        waits = self._is_first or self._refresh_s == 0
        if self._reading is None and time.monotonic() - self._read_at >= self._refresh_s:
            self._start_reading()
        if self._reading is None or not (waits or self._reading.done()):
            return
        reading, self._reading = self._reading, None
        try:
            changes = reading.result()
        except Exception as error:
            if waits:
                raise
            logger.warning("the store's list of chunks cannot be read: %s", error)
            return
        self._is_first = False
        self._index.remove(changes.removed)
        self._index.add(changes.added)

    def close(self) -> None:
        """Waits for a reading that has started."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _start_reading(self) -> None:
        self._read_at = time.monotonic()
        self._reading = self._reader.submit(self._read)

    def _read(self) -> _Changes:
        stamp = self._store.listing_stamp()
        if stamp is not None and stamp == self._stamp:
            return _Changes()
        wanted = {m.chunk_id: m for m in self._store.manifests() if self._is_wanted(m)}
        changes = _Changes([m for name, m in wanted.items() if name not in self._listed], self._listed - set(wanted))
        self._listed, self._stamp = set(wanted), stamp
        return changes
