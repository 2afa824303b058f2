"""What is cached of a folder's blocks: headers that were checked, and descriptors of their files.

Knows what is held open, and how much may be; does not open or read files.
"""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from cacheblend.core.names import BlockName
from cacheblend.store.disk.block_reader import Known, Stamp
from cacheblend.store.format.block_file import BlockHeader


class KnownBlocks:
    """Headers and descriptors by name, least recently used out first; safe to call from several threads.

    Args:
        max_known: number of headers to cache (about 4 KB each).
        max_open: number of descriptors to keep.
    """

    def __init__(self, max_known: int, max_open: int) -> None:
        self._max_known, self._max_open = max_known, max_open
        self._taken = 0  # descriptors that readers may hold now, besides those that are kept
        self._lock = threading.RLock()
        self._known: OrderedDict[BlockName, Known] = OrderedDict()
        self._open: OrderedDict[BlockName, Known] = OrderedDict()

    def get(self, name: BlockName) -> Known | None:
        """What is known of a block, open or not."""
        return self._known.get(name)

    def names(self) -> set[BlockName]:
        """Blocks whose header is cached; a copy."""
        with self._lock:
            return set(self._known)

    def acquire(self, name: BlockName) -> Known | None:
        """The block with its descriptor, which stays open until `release`; None if it is not open."""
        with self._lock:
            known = self._open.get(name)
            if known is not None:
                known.users += 1
                self._open.move_to_end(name)
            return known

    def release(self, known: Known) -> None:
        """One user less of its descriptor, which is closed if it is not kept."""
        with self._lock:
            known.users -= 1
            if not known.users and self._open.get(known.name) is not known:
                os.close(known.fd)

    def remember(self, known: Known) -> None:
        """Caches a block that has just been opened, in place of what was known of it."""
        with self._lock:
            old = self._known.get(known.name)
            self.forget(known.name)
            if old is not None:
                known.used_ns = old.used_ns
            self._known[known.name] = known
            self._open[known.name] = known
            self._bound()
            self.close_idle(self._max_open)

    def remember_others(self, headers: Sequence[BlockHeader], stamp: Stamp, paths: Sequence[str]) -> None:
        """Caches blocks that lie in a file that has been read, unless another file is known of them."""
        with self._lock:
            for header, path in zip(headers, paths, strict=True):
                known = self._known.setdefault(header.name, Known(header.name, path, stamp, header))
                if known.stamp[:2] == stamp[:2]:  # the same file, which somebody has used since
                    known.header, known.stamp = header, stamp
            self._bound()

    def restamp(self, names: Sequence[BlockName], old: Stamp, new: Stamp) -> None:
        """The file of these blocks is in state `new`, where it was read in state `old`: only its time has changed."""
        with self._lock:
            for name in names:
                known = self._known.get(name)
                if known is not None and known.stamp == old:
                    known.stamp = new

    def forget(self, name: BlockName) -> None:
        """Drops a block's header and descriptor; a thread that reads the block now finishes its read."""
        with self._lock:
            self._known.pop(name, None)
            self._drop_fd(name)

    def close_idle(self, keep: int) -> None:
        """Closes all but the `keep` most recently used descriptors."""
        with self._lock:
            while len(self._open) > keep:
                self._drop_fd(next(iter(self._open)))

    def close(self) -> None:
        """Closes all descriptors and drops all headers."""
        with self._lock:
            for name in list(self._known):
                self.forget(name)

    @contextlib.contextmanager
    def descriptors(self, most: int) -> Iterator[int]:
        """How many files a reader may hold open now: all together hold `max_open`, and each at least one."""
        with self._lock:
            count = max(1, min(most, self._max_open - self._taken))
            self._taken += count
        try:
            yield count
        finally:
            with self._lock:
                self._taken -= count

    def _bound(self) -> None:
        while len(self._known) > self._max_known:
            self.forget(next(iter(self._known)))

    def _drop_fd(self, name: BlockName) -> None:
        known = self._open.pop(name, None)
        if known is not None and not known.users:
            os.close(known.fd)
