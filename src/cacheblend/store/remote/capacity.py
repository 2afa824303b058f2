"""Capacity in a store elsewhere: who is evicted, and when what others wrote is counted again."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from cacheblend.core.errors import StoreFullError
from cacheblend.core.naming import BlockName
from cacheblend.store.remote.objects import HeldBlock, Objects

_RECOUNT_S = 30.0  # others write, too


class RemoteCapacity:
    """Keeps the blocks of an `Objects` below a bound, least recently used evicted first.

    Args:
        objects: where.
        max_bytes: bound on the blocks of all who write there; None leaves it to the other side.
        drop: removes blocks and says which were held.
    """

    def __init__(
        self, objects: Objects, max_bytes: int | None, drop: Callable[[Sequence[BlockName]], list[bool]]
    ) -> None:
        self._objects, self.max_bytes, self._drop = objects, max_bytes, drop
        self._lock = threading.Condition()
        self._bytes, self._counted_at = 0, -_RECOUNT_S
        self._under_way = 0
        self.evictions = 0

    @contextlib.contextmanager
    def reserved(
        self, need: int, name: BlockName, answering: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Around writing a block of `need` bytes: evicts until they fit, and counts them as taken.

        Args:
            need: bytes.
            name: of the block, which is not evicted meanwhile.
            answering: around calls of the other side.

        Raises:
            StoreFullError: they cannot fit.
        """
        if self.max_bytes is None:
            yield
            return
        with self._lock:
            while self._under_way and self._under_way + need > self.max_bytes:
                self._lock.wait()  # what others are writing cannot be evicted yet
            self._make_room(need, name, self.max_bytes, answering)
            self._under_way += need
        written = 0
        try:
            yield
            written = need
        finally:
            with self._lock:
                self._under_way -= need
                self._bytes += written
                self._lock.notify_all()

    def shrink(self, max_bytes: int) -> int:
        """Evicts until at most so many bytes are held, or only pinned blocks; the bytes freed."""
        with self._lock:
            freed, _ = self._evict(max_bytes, None)
        return freed

    def expire(self, since: float) -> None:
        """Removes unpinned blocks that were not used since then."""
        with self._lock:
            pinned = self._objects.pinned()
            old = [block for block in self._objects.held(tidy=True) if block.used < since and block.name not in pinned]
            gone = self._drop([block.name for block in old])
            self.evictions += sum(gone)
            self._bytes -= sum(block.nbytes for block, was in zip(old, gone, strict=True) if was)

    def _make_room(
        self, need: int, name: BlockName, bound: int, answering: Callable[[], AbstractContextManager[None]]
    ) -> None:
        taken = self._under_way + need
        if time.monotonic() > self._counted_at + _RECOUNT_S or self._bytes + taken > bound:
            with answering():
                _, self._bytes = self._evict(bound - taken, name, slack=bound // 64)
            self._counted_at = time.monotonic()
        if self._bytes + taken > bound:
            raise StoreFullError(
                f"block {name.hex()} needs {need} bytes; {self._objects.place} is bounded to {bound} "
                "bytes and what it holds is pinned: raise max_bytes or unpin"
            )

    def _evict(self, at_most: int, keep: BlockName | None, slack: int = 0) -> tuple[int, int]:
        """(freed, left): removes what was not used for longest; nothing, if not enough of it can go.

        If anything has to go, `slack` bytes more go with it: not every write should have to list all.
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
