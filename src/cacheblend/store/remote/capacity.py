"""Keeps an `Objects` within a bound by evicting the least recently used blocks, and manifests that have none left.
Other processes' writes are noticed when the blocks are listed: every 30 s, and when this process's own count reaches
the bound."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from cacheblend.core.errors import StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.store.base import Progress
from cacheblend.store.eviction import EmptyChunks, ManifestPlace
from cacheblend.store.remote.objects import HeldBlock, Objects
from cacheblend.store.sealed import MANIFESTS

_RECOUNT_S = 30.0  # other processes write too


class RemoteCapacity:
    """The bound of one place; safe to call from several threads. `max_bytes`: of what all writers store, manifests and
    documents' records included, None: eviction is left to the other side; `drop`: removes blocks and returns which were
    held; `asking`: see `SharedStore.asking`."""

    def __init__(
        self,
        objects: Objects,
        max_bytes: int | None,
        drop: Callable[[Sequence[BlockName]], list[bool]],
        manifests: ManifestPlace,
        asking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._objects, self.max_bytes, self._drop, self._asking = objects, max_bytes, drop, asking
        self._empty = EmptyChunks(manifests, self._held)
        self._blocks: set[BlockName] = set()  # that were listed last, but for those removed since
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # never entered itself: see `WriteBehind`
        self._bytes, self._counted_at = 0, -_RECOUNT_S
        self._being_written = 0  # bytes
        self.evictions = 0

    @contextlib.contextmanager
    def reserved(self, need: int, name: BlockName, what: str) -> Iterator[None]:
        """A context in which something of `need` bytes may be written: evicts blocks until it fits, but none of its
        name, or raises `StoreFullError`, which says `what` it is."""
        if self.max_bytes is None:
            yield
            return
        with self._lock:
            while self._being_written and self._being_written + need > self.max_bytes:
                self._changed.wait()  # blocks being written by other threads cannot be evicted yet
            taken = self._being_written + need
            if time.monotonic() > self._counted_at + _RECOUNT_S or self._bytes + taken > self.max_bytes:
                with self._asking():
                    _, self._bytes = self._evict_until(self.max_bytes - taken, name, slack=self.max_bytes // 64)
                self._counted_at = time.monotonic()
            if self._bytes + taken > self.max_bytes:
                raise StoreFullError(
                    f"{what} {name.hex()} needs {need} bytes; {self._objects.place} is bounded to {self.max_bytes} "
                    "bytes, and what it holds is pinned, or records of documents: raise max_bytes or unpin blocks"
                )
            self._being_written += need
        written = 0
        try:
            yield
            written = need
        finally:
            with self._lock:
                self._being_written -= need
                self._bytes += written
                self._changed.notify_all()

    def shrink(self, max_bytes: int, progress: Progress | None = None) -> int:
        """Evicts unpinned blocks until at most `max_bytes` are held, and removes all manifests of which no block is
        held; the bytes freed."""
        with self._lock:
            freed, _ = self._evict_until(max_bytes, None)
            if progress is not None:
                progress(freed, freed)
            self._listed()
            return freed + self._empty.sweep()

    def expire(self, since: float) -> None:
        """Removes unpinned blocks that were last used before the time `since`."""
        with self._lock:
            pinned = self._objects.pinned()
            old = [block for block in self._listed() if block.used < since and block.name not in pinned]
            gone = self._drop([block.name for block in old])
            self.evictions += sum(gone)
            self._bytes -= sum(block.nbytes for block, was in zip(old, gone, strict=True) if was)
            self._bytes -= self._left_by(old)

    def _evict_until(self, at_most: int, keep: BlockName | None, slack: int = 0) -> tuple[int, int]:
        """Evicts the least recently used blocks until `at_most` bytes are left: (bytes freed, bytes left). Evicts
        nothing if that is not enough to write `keep`. If anything is evicted, `slack` bytes more are, so that not every
        write has to list all blocks."""
        freed, left = self._evict(at_most, keep, slack)
        total = freed
        while left > at_most and freed:  # a manifest stayed, of a chunk that has other blocks
            freed, left = self._evict(at_most, keep, slack)
            total += freed
        return total, left

    def _evict(self, at_most: int, keep: BlockName | None, slack: int) -> tuple[int, int]:
        held, listed = sorted(self._listed(), key=lambda block: block.used), self._objects.sealed(MANIFESTS)
        total = sum(block.nbytes for block in held) + sum(each.nbytes for each in listed.values())
        total += self._objects.documents_bytes()
        pinned = self._objects.pinned() if total > at_most else set()
        victims: list[HeldBlock] = []
        excess = total - at_most
        for block in held if excess > 0 else ():
            if excess <= -min(slack, max(0, at_most)):
                break
            if block.name not in pinned and block.name != keep:
                victims.append(block)
                excess -= block.nbytes + (listed[block.name].nbytes if block.name in listed else 0)
        names, nbytes = [block.name for block in victims], sum(block.nbytes for block in victims)
        if keep is not None and excess > 0 and total - nbytes - self._empty.bytes_without(names) > at_most:
            return 0, total
        gone = self._drop(names)
        self.evictions += sum(gone)
        manifests = self._left_by(victims)
        if total - nbytes - manifests > at_most or self._empty.is_due:
            manifests += self._empty.sweep()
        freed = sum(block.nbytes for block, was in zip(victims, gone, strict=True) if was) + manifests
        return freed, total - nbytes - manifests

    def _listed(self) -> list[HeldBlock]:
        held = self._objects.held(tidy=True)
        self._blocks = {block.name for block in held}
        return held

    def _held(self, names: Sequence[BlockName]) -> set[BlockName]:
        """Which of these blocks are held: others may have been written since they were listed."""
        unknown = [name for name in names if name not in self._blocks]
        written = {name for name, there in zip(unknown, self._objects.exist(unknown), strict=True) if there}
        return self._blocks.intersection(names) | written

    def _left_by(self, blocks: Sequence[HeldBlock]) -> int:
        """Removes the manifests that blocks leave behind; the bytes freed."""
        names = [block.name for block in blocks]
        self._blocks.difference_update(names)
        return self._empty.evicted(names)
