"""The block files of a folder: finding, reading, and handling of damage.

Knows single files; does not know the bound or eviction.

A known block is a header together with the file it was read from (its stamp: inode, size and modification
time). A descriptor is only kept with the header that was read from the same file, so a file that another
process replaces or deletes is read whole as it was, or not at all. A file of several blocks stands under the name of
each, and what one of its names says of the file is known of the others, too, until it is found to differ.
"""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH108, PTH110, PTH116

import contextlib
import errno
import logging
import os
import resource
import stat
import time
from collections.abc import Iterator, Sequence

import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import RecordMemory
from cacheblend.store.base import LOGGER_NAME, Damage
from cacheblend.store.disk.block_reader import Known, WantedRecords, read_blocks, read_headers, stamp_of, wanted_of
from cacheblend.store.disk.damaged_files import DamagedFiles
from cacheblend.store.disk.folder import Folder
from cacheblend.store.disk.known_blocks import KnownBlocks
from cacheblend.store.expiry import Expiry
from cacheblend.store.format.block_file import BlockHeader, header_of
from cacheblend.store.format.checksum import DamagedError

logger = logging.getLogger(LOGGER_NAME)

_TOUCH_EVERY_NS = 60 * 10**9
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_BYTES_AT_ONCE, _BLOCKS_AT_ONCE = 8 << 20, 64  # read together by one thread


class BlockFiles:
    """Finds and reads block files; safe to call from several threads.

    Args:
        folder: the store's folder.
        max_known: number of headers to cache (about 4 KB each).
        max_open: number of descriptors to keep; by default 512, or a quarter of the process's limit if that is less.
        direct: bypass the page cache, where the file system can.
        expiry: time to live of unpinned blocks.

    Attributes:
        forget, known, close_idle, close: of `KnownBlocks`.
    """

    def __init__(
        self,
        folder: Folder,
        max_known: int = 16384,
        max_open: int | None = None,
        *,
        direct: bool = False,
        expiry: Expiry | None = None,
    ) -> None:
        self._folder, self._direct = folder, direct
        self._expiry = expiry or Expiry(None)
        self._touch_every_ns = min(_TOUCH_EVERY_NS, int(1e9 * self._expiry.interval))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._known = KnownBlocks(max_known, max(1, min(512, limit // 4)) if max_open is None else max_open)
        self.forget, self.known, self.close_idle = self._known.forget, self._known.names, self._known.close_idle
        self.close = self._known.close
        self._damaged = DamagedFiles(folder, self.forget)

    @property
    def damaged(self) -> int:
        """Blocks found damaged so far."""
        return self._damaged.count

    # ---- finding ----------------------------------------------------------------------------------------

    def find(self, names: Sequence[BlockName]) -> list[BlockHeader | None]:
        """Headers of the blocks that are held, None for others, checked against their files; marks them as used."""
        headers: list[BlockHeader | None] = [None] * len(names)
        now = time.time_ns()
        # From the last to the first, so that of one call's blocks the first are evicted last.
        for index in range(len(names) - 1, -1, -1):
            known = self._current(names[index])
            if known is not None and self._has_expired(known, now):
                self._remove_expired(known)
            elif known is not None:
                headers[index] = known.header
                known.used_ns = now - 1000 * index
                if known.used_ns - known.stamp[2] > self._touch_every_ns and not self._folder.read_only:
                    self._touch(known)
        return headers

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each block's file exists with a sound header; marks none as used."""
        now, known = time.time_ns(), [self._current(name) for name in names]
        return [each is not None and not self._has_expired(each, now) for each in known]

    def _current(self, name: BlockName) -> Known | None:
        """The block, if its file exists with a sound header; reads the header if the file is not the known one."""
        known = self._known.get(name)
        if known is not None:
            try:
                status = os.stat(known.path)
            except OSError:
                self.forget(name)
                return None
            if known.stamp == stamp_of(status):
                return known
        try:
            with self._opened(name, fresh=True) as known:
                return known
        except BlockLostError:
            return None

    def _has_expired(self, known: Known, now: int) -> bool:
        used = max(known.stamp[2], known.used_ns)
        return used < 1e9 * self._expiry.since(now / 1e9) and not os.path.exists(self._folder.pins / known.name.hex())

    def _remove_expired(self, known: Known) -> None:
        """Removes an expired block, unless another process has just used it."""
        self.forget(known.name)
        if not self._folder.read_only:
            with contextlib.suppress(OSError):
                if stamp_of(os.stat(known.path)) == known.stamp:
                    os.unlink(known.path)

    def _touch(self, known: Known) -> None:
        """Shows other processes, at most once a minute, that the block is used."""
        with contextlib.suppress(OSError):  # the file is gone, or belongs to another user
            os.utime(known.path, ns=(known.used_ns, known.used_ns))
            stamp = stamp_of(os.stat(known.path))
            if known.stamp[:2] == stamp[:2]:
                self._known.restamp(known.header.names, known.stamp, stamp)

    def used_ns(self, name: BlockName) -> int:
        """When this process last found the block; 0 if it has not."""
        known = self._known.get(name)
        return 0 if known is None else known.used_ns

    # ---- reading ----------------------------------------------------------------------------------------

    def read(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """Records as `KVStore.read_layers` returns them.

        Without `memory` those of a block lie in memory of their own; with it, those of several blocks together.
        """
        found: dict[BlockName, list[torch.Tensor] | BlockLostError] = {}
        wanted = list(dict.fromkeys(names))
        most = max(1, min(_BLOCKS_AT_ONCE, _BYTES_AT_ONCE // max(1, self.record_bytes(wanted, layers))))
        while len(found) < len(wanted):
            with self._known.descriptors(most) as count:
                found |= self._read_few(wanted[len(found) : len(found) + count], layers, heads, memory)
        return [found[name] for name in names]

    def _read_few(
        self, names: Sequence[BlockName], layers: range, heads: slice | None, memory: RecordMemory | None
    ) -> dict[BlockName, list[torch.Tensor] | BlockLostError]:
        found: dict[BlockName, list[torch.Tensor] | BlockLostError] = {}
        alike: dict[WantedRecords, list[Known]] = {}
        opened: list[Known] = []
        try:
            for name in names:
                try:
                    opened.append(self._known.acquire(name) or self._load(name, fresh=False))
                    alike.setdefault(wanted_of(opened[-1].header, layers, heads), []).append(opened[-1])
                except BlockLostError as error:
                    found[name] = error
            for wanted, blocks in alike.items():
                read = read_blocks(blocks, wanted, memory, direct=self._direct)
                for known, records in zip(blocks, read, strict=True):
                    found[known.name] = (
                        records
                        if isinstance(records, list)
                        else self._damaged.lost(known.name, known.path, known.stamp, records)
                    )
        finally:
            for known in opened:
                self._known.release(known)
        return found

    def record_bytes(self, names: Sequence[BlockName], layers: range) -> int:
        """Bytes of a block's records of these layers, by the first of the blocks that is there; 0 if none is."""
        for name in names:
            known = self._known.get(name)
            if known is None:
                with contextlib.suppress(BlockLostError), self._opened(name) as known:
                    pass
            if known is not None:
                offsets = known.header.geometry.offsets
                return offsets[min(layers.stop, len(offsets) - 1)] - offsets[min(layers.start, len(offsets) - 1)]
        return 0

    def verify(self, name: BlockName) -> Damage | None:
        """What is wrong with the block's file, None if nothing is or it is gone; reads all of it."""
        try:
            with self._opened(name, fresh=True) as known:
                for layer in range(len(known.header.entry.layout.layers)):
                    wanted = wanted_of(known.header, range(layer, layer + 1), None)
                    (found,) = read_blocks([known], wanted, None, direct=self._direct)
                    if not isinstance(found, list):
                        raise self._damaged.lost(name, known.path, known.stamp, found)
        except BlockDamagedError as error:
            return Damage("block", name, error.reason, error.removed)
        except BlockLostError:
            return None
        return None

    @contextlib.contextmanager
    def _opened(self, name: BlockName, fresh: bool = False) -> Iterator[Known]:
        """The block, its descriptor open for as long as the context lasts; raises `BlockLostError`."""
        known = (None if fresh else self._known.acquire(name)) or self._load(name, fresh)
        try:
            yield known
        finally:
            self._known.release(known)

    def _load(self, name: BlockName, fresh: bool) -> Known:
        """Opens the file and reads its header if that is not known: a new `Known` with one user."""
        path = self._folder.block_path(name)
        try:
            fd = self._open_file(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
                self.forget(name)
            raise BlockLostError([name], f"{path} cannot be opened: {error.strerror}") from error
        try:
            known = self._checked(name, path, fd, None if fresh else self._known.get(name))
        except BaseException:
            os.close(fd)
            raise
        known.fd = fd
        known.users = 1
        self._known.remember(known)
        return known

    def _checked(self, name: BlockName, path: str, fd: int, old: Known | None) -> Known:
        """The block with its header, taken from `old` if that was read from the same file."""
        status = os.fstat(fd)
        stamp = stamp_of(status)
        if old is not None and old.stamp == stamp:
            return Known(name, path, stamp, old.header)
        if not stat.S_ISREG(status.st_mode):
            raise self._damaged.lost(name, path, stamp, DamagedError("it is no regular file"))
        if self._damaged.is_known(name, stamp):
            raise BlockDamagedError(name, f"{path} is damaged", removed=False)
        try:
            headers = read_headers(fd, status.st_size, direct=self._direct)
            own = header_of(headers, name)
        except (DamagedError, OSError) as error:
            raise self._damaged.lost(name, path, stamp, error) from error
        others = [each for each in headers if each is not own and not self._damaged.is_known(each.name, stamp)]
        self._known.remember_others(others, stamp, [self._folder.block_path(header.name) for header in others])
        return Known(name, path, stamp, own)

    def _open_file(self, path: str) -> int:
        try:
            return os.open(path, self._flags)
        except OSError as error:
            if error.errno == errno.EINVAL and self._direct:
                logger.warning("the file system of %s has no direct reads; it is read through the page cache", path)
                self._direct = False
            elif error.errno not in _OUT_OF_DESCRIPTORS:
                raise
        self.close_idle(0)
        return os.open(path, self._flags)

    @property
    def _flags(self) -> int:
        return os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (getattr(os, "O_DIRECT", 0) if self._direct else 0)
