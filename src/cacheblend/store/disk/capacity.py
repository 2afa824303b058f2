"""Keeps a folder's files within the bound by evicting blocks, and manifests of chunks that have none left.

A file that stands under several names counts in equal parts for each of them, and its bytes are freed with the last. A
block's last use is its file's modification time, which all processes see, or this process's own where that is later.

Other processes' writes are noticed when the folder is listed: when this process's own count reaches the bound, and
before it has written more than 1/32 of the bound, what it is writing included. What is more than that at once is
reserved where the others see it before it is written. So each further process that writes can exceed the bound by at
most 1/32 of it, whatever the sizes of files:

    the latest listing, by any process    all files + what is reserved <= max_bytes
    since then, each other process        at most 1/32 that it has not listed
"""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH108, PTH110, PTH116

import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from cacheblend.core.errors import InvalidInputError, StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.store.base import Progress
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.folder import BLOCK_SUFFIX, Folder, named_files, whole_pages
from cacheblend.store.eviction import EmptyChunks, Expiry, LeastWorth
from cacheblend.store.format.block_file import name_of_file
from cacheblend.store.sealed import Manifests

_TRIES = 3
_UNSEEN = 32  # a process may have written this part of the bound without the others' knowing


@dataclass(frozen=True, slots=True, order=True)
class BlockFile:
    """A block's file as the folder lists it, `nbytes` its part; the least recently used one compares lowest."""

    used_ns: int
    name: BlockName
    nbytes: float
    mtime_ns: int
    pinned: bool


class Capacity:
    """Reserves bytes for blocks and evicts others for them; thread-safe. `max_bytes`: bound on the files' sizes, None:
    no bound but the disk's; `eviction`: None: least recently used first, by the files' times."""

    def __init__(
        self,
        folder: Folder,
        files: BlockFiles,
        manifests: Manifests,
        max_bytes: int | None,
        eviction: LeastWorth | None,
        expiry: Expiry,
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise InvalidInputError(f"max_bytes must be above 0 (or None for no bound), got {max_bytes}")
        self.max_bytes, self.evictions = max_bytes, 0
        self._folder, self._files, self._eviction, self._expiry = folder, files, eviction, expiry
        self._empty = EmptyChunks(manifests, self._held)
        self._lock = threading.RLock()
        self._policy_lock = threading.Lock()  # separate, so that a look-up does not wait for an eviction
        self._total: int | None = None  # bytes as last listed, plus this process's writes since
        self._since_listed = 0
        self._in_flight = self._in_flight_unseen = 0  # of these other processes see what is reserved

    def pinned(self) -> set[BlockName]:
        return set(named_files(str(self._folder.pins)))

    def blocks(self) -> Iterator[BlockFile]:
        """All blocks of the folder, in no order. Raises `OSError`."""
        pinned = self.pinned()
        for file in self._files_of_blocks():
            name = name_of_file(file.name, BLOCK_SUFFIX)
            if name is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                used_ns = max(status.st_mtime_ns, self._files.used_ns(name))
                yield BlockFile(used_ns, name, _share(status), status.st_mtime_ns, name in pinned)

    def small_bytes(self, pinned: AbstractSet[str] = frozenset()) -> tuple[int, int]:
        """(bytes of all manifests and documents' records, of those that no eviction removes). Raises `OSError`."""
        total = kept = 0
        listed = ((file, file.name.partition(".")[0] in pinned) for file in _entries(self._folder.manifests))
        records = ((file, True) for root in _entries(self._folder.documents) for file in _entries(root.path))
        for file, stays in itertools.chain(listed, records):
            with contextlib.suppress(FileNotFoundError):
                size = whole_pages(file.stat(follow_symlinks=False).st_size)
                total += size
                kept += size if stays else 0
        return total, kept

    def used(self, worths: Sequence[tuple[BlockName, float]]) -> None:
        """Records for the policy that blocks were written or found, in this order; see `LeastWorth.used`."""
        if self._eviction is not None:
            with self._policy_lock:
                for name, worth in worths:
                    self._eviction.used(name, worth)

    def gone(self, name: BlockName) -> None:
        """Records for the policy that a block was removed."""
        if self._eviction is not None:
            with self._policy_lock:
                self._eviction.gone(name)

    @contextlib.contextmanager
    def reserved(self, need: int) -> Iterator[None]:
        """A context in which `need` bytes may be written; evicts blocks for them first, or raises `StoreFullError`."""
        with contextlib.ExitStack() as until_written:
            with self._lock:
                if self._expiry.is_due():
                    since = 1e9 * self._expiry.since(time.time())
                    with self._folder.locked():
                        old = (each for each in self.blocks() if each.used_ns < since and not each.pinned)
                        freed = sum(map(self._remove, old))
                    self._total = None if self._total is None else self._total - freed
                is_seen = self.max_bytes is not None and self._admit(need, self.max_bytes, until_written)
                unseen = 0 if is_seen else need
                self._in_flight += need
                self._in_flight_unseen += unseen
            is_written = False
            try:
                yield
                is_written = True
            finally:
                with self._lock:
                    self._in_flight -= need
                    self._in_flight_unseen -= unseen
                    if is_written:
                        self._since_listed += unseen
                        if self._total is not None:
                            self._total += need

    def _admit(self, need: int, max_bytes: int, until_written: contextlib.ExitStack) -> bool:
        """Makes room; whether it is reserved where other processes see it."""
        if need > max_bytes:
            raise StoreFullError(f"a file of {need} bytes; the store is bounded to {max_bytes}: raise max_bytes")
        limit = max_bytes - need - self._in_flight
        unseen = self._in_flight_unseen + need
        is_stale = self._since_listed + unseen > max_bytes // _UNSEEN
        if not is_stale and self._total is not None and self._total <= limit:
            return False
        with self._folder.locked():
            for _ in range(_TRIES):  # what another process uses meanwhile is not evicted
                total, kept = self._count()
                if total <= limit or kept > limit:
                    break
                # A little more than needed, so that not every write lists the folder.
                total -= self._evict(total - max(0, limit - max_bytes // 64), total)
                if total <= limit:
                    break
            if total > limit:
                raise StoreFullError(
                    f"{need} more bytes do not fit: {max(kept, limit)} of at most {max_bytes} bytes in "
                    f"{self._folder.path} are pinned, records of documents, or being written: unpin blocks, or raise "
                    "max_bytes"
                )
            self._total = total
            self._since_listed = 0
            if unseen <= max_bytes // _UNSEEN:
                return False
            until_written.enter_context(self._folder.reservation(need))
            return True

    def _count(self) -> tuple[int, int]:
        """(bytes of all files, and of those that other processes are writing; bytes of those that stay); seconds for a
        million blocks, and memory for pinned ones."""
        pinned = {name.hex() for name in self.pinned()}
        reserved = self._folder.reserved_bytes()
        total, small = (float(each + reserved) for each in self.small_bytes(pinned))
        kept: dict[int, int] = {}  # by inode: a pinned block keeps all of its file
        for file in self._files_of_blocks():
            if file.name.endswith(BLOCK_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    total += _share(status)
                    if pinned and file.name.removesuffix(BLOCK_SUFFIX) in pinned:
                        kept[status.st_ino] = status.st_size
        return round(total), round(small) + sum(kept.values())

    def free(self, need: int) -> int:
        """Evicts blocks of at least `need` bytes in total, even if the bound is not reached; the bytes freed."""
        self._files.close_idle(0)  # a deleted file occupies the disk for as long as it is open
        with self._lock, self._folder.locked():
            self._total = None
            return self._evict(need, self._count()[0])

    def shrink(self, max_bytes: int, progress: Progress | None = None) -> int:
        """Evicts unpinned blocks until at most `max_bytes` are held; removes manifests without any; the bytes freed."""
        with self._lock, self._folder.locked():
            self._total = None
            total = self._count()[0]
            return self._evict(total - max_bytes, total, progress) + self._empty.sweep()

    def _evict(self, surplus: int, total: int, progress: Progress | None = None) -> int:
        """Removes unpinned blocks in order until `surplus` bytes of `total` are freed; the bytes freed."""
        freed, evicted = 0, -1
        while freed < surplus and evicted != self.evictions:  # files of several blocks may free nothing at first
            evicted = self.evictions
            for block in self._victims(surplus - freed):
                if freed >= surplus:
                    break
                freed += self._remove(block)
                if progress is not None:
                    progress(min(freed, surplus), surplus)
            if freed < surplus:  # of files that are linked from elsewhere, such as a snapshot, no name seems the last
                freed = max(freed, total - self._count()[0])
        if freed < surplus or self._empty.is_due:
            freed += self._empty.sweep()
        return freed

    def _remove(self, block: BlockFile) -> int:
        """Removes a block that was listed; the bytes freed."""
        path, freed = self._folder.block_path(block.name), 0  # if it is gone: others may keep its file
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            if status.st_mtime_ns != block.mtime_ns:
                return 0  # another process has used it since
            os.unlink(path)
            freed = status.st_size if status.st_nlink == 1 else 0
            if self._eviction is not None:
                with self._policy_lock:
                    self._eviction.evicted(block.name)
            self.evictions += 1
        self._files.forget(block.name)
        return freed + self._empty.evicted([block.name])

    def _victims(self, surplus: int) -> list[BlockFile]:
        """The first blocks in eviction order, with twice the bytes, as some may be in use. Holds no others."""
        chosen: list[tuple[tuple[float, ...], BlockFile]] = []  # a heap, the last one in that order on top
        if surplus <= 0:
            return []
        nbytes, gone, listed = 0.0, self._files.known(), set[BlockName]()
        for block in self.blocks():
            gone.discard(block.name)
            if self._eviction is not None:
                listed.add(block.name)
            if block.pinned:
                continue
            order: tuple[float, ...] = (block.used_ns,)  # the smallest is evicted first
            if self._eviction is not None:
                with self._policy_lock:
                    order = self._eviction.first(block.name, block.used_ns)
            heapq.heappush(chosen, (tuple(-part for part in order), block))
            nbytes += block.nbytes
            while nbytes - chosen[0][1].nbytes >= 2 * surplus:
                nbytes -= heapq.heappop(chosen)[1].nbytes
        for name in gone:
            self._files.forget(name)  # another process removed it, and its open file occupies the disk
        if self._eviction is not None:
            with self._policy_lock:
                self._eviction.keep(listed)
        return [block for _, block in sorted(chosen, reverse=True)]

    def _held(self, names: Sequence[BlockName]) -> set[BlockName]:
        return {name for name in names if os.path.exists(self._folder.block_path(name))}

    def _files_of_blocks(self) -> Iterator["os.DirEntry[str]"]:
        for shard in _entries(self._folder.blocks):
            yield from _entries(shard.path)


def _share(status: os.stat_result) -> float:
    """What a block's file counts for one of its names; the sum over all of them is its size."""
    return status.st_size / max(1, status.st_nlink)


def _entries(folder: str | os.PathLike[str]) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
