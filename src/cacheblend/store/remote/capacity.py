"""Keeps the blocks of an `Objects` within a bound by evicting the least recently used ones.

Other processes' writes are noticed when the blocks are listed: every 30 s, and when this process's own count reaches
the bound. Knows sizes, times and pins; does not know the blocks' content.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from cacheblend.core.errors import StoreFullError
from cacheblend.core.naming import BlockName
from cacheblend.store.remote.objects import HeldBlock, Objects

_RECOUNT_S = 30.0  # other processes write too


class RemoteCapacity:
    """The bound of one place; safe to call from several threads.

    Args:
        objects: the place.
        max_bytes: bound on the blocks of all writers; None leaves eviction to the other side.
        drop: removes blocks and returns which were held.

    Attributes:
        max_bytes: the same.
        evictions: blocks evicted so far.
    """

    def __init__(
        self, objects: Objects, max_bytes: int | None, drop: Callable[[Sequence[BlockName]], list[bool]]
    ) -> None:
        self._objects, self.max_bytes, self._drop = objects, max_bytes, drop
        self._lock = threading.Condition()
        self._bytes, self._counted_at = 0, -_RECOUNT_S
        self._being_written = 0  # bytes
        self.evictions = 0

    @contextlib.contextmanager
    def reserved(
        self, need: int, name: BlockName, asking: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """A context in which a block of `need` bytes may be written: evicts until it fits.

        Args:
            need: the block's size in bytes.
            name: the block's name; it is not evicted meanwhile.
            asking: makes the context of calls to the place, see `CircuitBreaker.asking`.

        Raises:
            StoreFullError: the block cannot fit.
        """
        if self.max_bytes is None:
            yield
            return
        with self._lock:
            while self._being_written and self._being_written + need > self.max_bytes:
                self._lock.wait()  # blocks being written by other threads cannot be evicted yet
            self._evict_for(need, name, self.max_bytes, asking)
            self._being_written += need
        written = 0
        try:
            yield
            written = need
        finally:
            with self._lock:
                self._being_written -= need
                self._bytes += written
                self._lock.notify_all()

    def shrink(self, max_bytes: int) -> int:
        """Evicts unpinned blocks until at most `max_bytes` are held; the bytes freed. Raises `StoreError`."""
        with self._lock:
            freed, _ = self._evict(max_bytes, None)
        return freed

    def expire(self, since: float) -> None:
        """Removes unpinned blocks that were last used before the time `since`. Raises `StoreError`."""
        with self._lock:
            pinned = self._objects.pinned()
            old = [block for block in self._objects.held(tidy=True) if block.used < since and block.name not in pinned]
            gone = self._drop([block.name for block in old])
            self.evictions += sum(gone)
            self._bytes -= sum(block.nbytes for block, was in zip(old, gone, strict=True) if was)

    def _evict_for(
        self, need: int, name: BlockName, bound: int, asking: Callable[[], AbstractContextManager[None]]
    ) -> None:
        taken = self._being_written + need
        if time.monotonic() > self._counted_at + _RECOUNT_S or self._bytes + taken > bound:
            with asking():
                _, self._bytes = self._evict(bound - taken, name, slack=bound // 64)
            self._counted_at = time.monotonic()
        if self._bytes + taken > bound:
            raise StoreFullError(
                f"block {name.hex()} needs {need} bytes; {self._objects.place} is bounded to {bound} "
                "bytes and the blocks it holds are pinned: raise max_bytes or unpin blocks"
            )

    def _evict(self, at_most: int, keep: BlockName | None, slack: int = 0) -> tuple[int, int]:
        """Evicts the least recently used blocks until `at_most` bytes are left: (bytes freed, bytes left).

        Evicts nothing if that is not enough to write the block `keep`. If anything is evicted, `slack` bytes more
        are, so that not every write has to list all blocks.
        """
        held = sorted(self._objects.held(tidy=True), key=lambda block: block.used)
        total = sum(block.nbytes for block in held)
        pinned = self._objects.pinned() if total > at_most else set()
        victims: list[HeldBlock] = []
        excess = total - at_most
        for block in held if excess > 0 else ():
            if excess <= -min(slack, max(0, at_most)):
                break
            if block.name not in pinned and block.name != keep:
                victims.append(block)
                excess -= block.nbytes
        if keep is not None and excess > 0:
            return 0, total
        gone = self._drop([block.name for block in victims])
        self.evictions += sum(gone)
        freed = sum(block.nbytes for block, was in zip(victims, gone, strict=True) if was)
        return freed, total - sum(block.nbytes for block in victims)
