"""A folder's block files: which are known, open or damaged; finding them, and reading their records. A known block is a
header together with the file it was read from (its stamp). A descriptor is kept only with the header read from the same
file, so a file that another process replaces or deletes is read whole as it was, or not at all. A file of several
blocks stands under the name of each, and what one name says of the file holds for the others until found to differ."""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH108, PTH110, PTH116

import contextlib
import errno
import logging
import os
import resource
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import RecordMemory
from cacheblend.store.base import LOGGER_NAME, check_layer, head_range
from cacheblend.store.disk.folder import Folder, remove_entry
from cacheblend.store.eviction import Expiry
from cacheblend.store.format.block_file import (
    BlockHeader,
    Geometry,
    RecordPlace,
    check_heads,
    decode_headers,
    header_bytes,
    header_of,
)
from cacheblend.store.format.checksum import DamagedError

logger = logging.getLogger(LOGGER_NAME)

Stamp = tuple[int, int, int]  # inode, size and modification time (ns): identifies one state of a file
_TOUCH_EVERY_NS = 60 * 10**9
_BYTES_AT_ONCE, _BLOCKS_AT_ONCE = 8 << 20, 64  # read together by one thread
_FIRST_READ = 16 << 10  # covers most headers
_CUT_SHORT = "the file has been cut short"
_DELETED_EVERY_S = 10.0  # descriptors of files that others deleted are searched for, which keep their place on the disk
_MOST_KNOWN = 16384  # headers that are cached, of about 4 KB each
_PIECES_AT_ONCE = 512  # below IOV_MAX, which is 1024 on Linux


@dataclass(slots=True, eq=False)
class Known:
    """A block whose header has been read and checked."""

    name: BlockName
    path: str
    stamp: Stamp  # the state of the file that the header was read from
    header: BlockHeader
    fd: int = -1  # a descriptor of this file, or -1
    users: int = 0  # number of threads that read through `fd` now
    used_ns: int = 0  # when this process last found the block


def _stamp_of(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


class BlockFiles:
    """Finds and reads block files; safe to call from several threads. `max_open`: descriptors that are kept, by default
    a quarter of the process's limit, 512 at most."""

    def __init__(self, folder: Folder, max_open: int | None = None, *, expiry: Expiry | None = None) -> None:
        self._folder, self._expiry = folder, expiry or Expiry(None)
        self._touch_every_ns = min(_TOUCH_EVERY_NS, int(1e9 * self._expiry.interval))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max(1, min(512, limit // 4)) if max_open is None else max_open
        self._next_search = time.monotonic() + _DELETED_EVERY_S
        self._taken = 0  # descriptors that readers may hold now, besides those that are kept
        self._lock = threading.RLock()
        self._known: OrderedDict[BlockName, Known] = OrderedDict()  # least recently read first
        self._open: OrderedDict[BlockName, Known] = OrderedDict()  # least recently used first
        self._damaged: dict[BlockName, Stamp] = {}  # reported; those that could not be removed are not read again
        self.damaged = 0  # blocks found damaged so far

    # ---- finding ----------------------------------------------------------------------------------------

    def find(self, names: Sequence[BlockName]) -> list[BlockHeader | None]:
        """Headers of the blocks that are held, None for others, checked against their files; marks them as used."""
        self._close_deleted()
        headers: list[BlockHeader | None] = [None] * len(names)
        now = time.time_ns()
        # From the last to the first, so that of one call's blocks the first are evicted last.
        for index in range(len(names) - 1, -1, -1):
            known = self._current(names[index])
            if known is not None and self._has_expired(known, now):
                self.forget(known.name)
                with contextlib.suppress(OSError):  # removed, unless another process has just used it
                    if not self._folder.read_only and _stamp_of(os.stat(known.path)) == known.stamp:
                        os.unlink(known.path)
            elif known is not None:
                headers[index] = known.header
                known.used_ns = now - 1000 * index
                if abs(known.used_ns - known.stamp[2]) > self._touch_every_ns and not self._folder.read_only:
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
            if known.stamp == _stamp_of(status):
                return known
        try:
            with self._opened(name, fresh=True) as known:
                return known
        except BlockLostError:
            return None

    def _has_expired(self, known: Known, now: int) -> bool:
        used = max(known.stamp[2], known.used_ns)
        return used < 1e9 * self._expiry.since(now / 1e9) and not os.path.exists(self._folder.pins / known.name.hex())

    def _touch(self, known: Known) -> None:
        """Shows other processes, at most once a minute, that the block is used."""
        with contextlib.suppress(OSError):  # the file is gone, or belongs to another user
            try:
                os.utime(known.path, ns=(known.used_ns, known.used_ns))
            except PermissionError:  # who may write, but does not own it, may say "now"
                os.utime(known.path)
            stamp = _stamp_of(os.stat(known.path))
            if known.stamp[:2] == stamp[:2]:  # only the time has changed, of all blocks in the file
                with self._lock:
                    old = known.stamp
                    for each in map(self._known.get, known.header.names):
                        if each is not None and each.stamp == old:
                            each.stamp = stamp

    def used_ns(self, name: BlockName) -> int:
        """When this process last found the block; 0 if it has not."""
        known = self._known.get(name)
        return 0 if known is None else known.used_ns

    # ---- reading ----------------------------------------------------------------------------------------

    def read(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """Records as `KVStore.read_layers` returns them. Without `memory` those of a block lie in memory of their own;
        with it, those of several blocks together."""
        self._close_deleted()
        found: dict[BlockName, list[torch.Tensor] | BlockLostError] = {}
        wanted = list(dict.fromkeys(names))
        most = max(1, min(_BLOCKS_AT_ONCE, _BYTES_AT_ONCE // max(1, self.record_bytes(wanted, layers))))
        while len(found) < len(wanted):
            with self._lock:  # all readers together hold `max_open` descriptors, and each at least one
                count = max(1, min(most, self._max_open - self._taken))
                self._taken += count
            try:
                found |= self._read_few(wanted[len(found) : len(found) + count], layers, heads, memory)
            finally:
                with self._lock:
                    self._taken -= count
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
                    opened.append(self._acquire(name) or self._load(name, fresh=False))
                    alike.setdefault(wanted_of(opened[-1].header, layers, heads), []).append(opened[-1])
                except BlockLostError as error:
                    found[name] = error
            for wanted, blocks in alike.items():
                read = read_blocks(blocks, wanted, memory)
                for known, records in zip(blocks, read, strict=True):
                    found[known.name] = (
                        records
                        if isinstance(records, list)
                        else self._lost(known.name, known.path, known.stamp, records)
                    )
        finally:
            for known in opened:
                self._release(known)
        return found

    def record_bytes(self, names: Sequence[BlockName], layers: range) -> int:
        """Of a block's records of these layers, by the first of the blocks that is there; 0 if none is."""
        for name in names:
            known = self._known.get(name)
            if known is None:
                with contextlib.suppress(BlockLostError), self._opened(name) as known:
                    pass
            if known is not None:
                offsets = known.header.geometry.offsets
                return offsets[min(layers.stop, len(offsets) - 1)] - offsets[min(layers.start, len(offsets) - 1)]
        return 0

    def header(self, name: BlockName) -> BlockHeader:
        """The block's header, read anew. Raises `BlockLostError`."""
        with self._opened(name, fresh=True) as known:
            return known.header

    def _lost(self, name: BlockName, path: str, stamp: Stamp, error: DamagedError | OSError) -> BlockLostError:
        """The error for a failed read. Damage, I/O errors of the disk included, is reported once, and its file removed,
        unless it has been replaced meanwhile."""
        if isinstance(error, OSError) and error.errno != errno.EIO:
            self.forget(name)  # the file may be another by now, of which a network file system keeps no old one
            return BlockLostError([name], f"{path} cannot be read: {error.strerror}")
        self.forget(name)
        with self._lock:
            is_reported = self._damaged.get(name) == stamp
            self._damaged[name] = stamp
            self.damaged += not is_reported
        if is_reported:
            return BlockDamagedError(name, f"{path} is damaged: {error}", not _is_there(path, stamp))
        outcome = "left (the store is read-only)"
        if not self._folder.read_only:
            outcome = "removed"
            try:
                if _is_there(path, stamp):
                    remove_entry(path)
            except FileNotFoundError:
                pass
            except OSError as failed:
                outcome = f"could not be removed ({failed.strerror})"
        logger.warning("damaged block %s: %s; %s", path, error, outcome)
        return BlockDamagedError(name, f"{path} is damaged: {error}", outcome == "removed")

    # ---- headers and descriptors ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, name: BlockName, fresh: bool = False) -> Iterator[Known]:
        """The block, its descriptor open for as long as the context lasts; raises `BlockLostError`."""
        known = (None if fresh else self._acquire(name)) or self._load(name, fresh)
        try:
            yield known
        finally:
            self._release(known)

    def _acquire(self, name: BlockName) -> Known | None:
        """The block with its descriptor, which stays open until `_release`; None if it is not open."""
        with self._lock:
            known = self._open.get(name)
            if known is not None:
                known.users += 1
                self._open.move_to_end(name)
            return known

    def _release(self, known: Known) -> None:
        with self._lock:
            known.users -= 1
            if not known.users and self._open.get(known.name) is not known:
                os.close(known.fd)

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
            status = os.fstat(fd)
        except OSError as error:
            os.close(fd)
            raise BlockLostError([name], f"{path} cannot be read: {error.strerror}") from error
        try:
            old, stamp = self._known.get(name), _stamp_of(status)
            if old is not None and old.stamp == stamp and not fresh:
                known = Known(name, path, stamp, old.header, fd, 1)
            else:
                known = Known(name, path, stamp, self._read_header(name, path, fd, status), fd, 1)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            old = self._known.get(name)
            self.forget(name)
            if old is not None:
                known.used_ns = old.used_ns
            self._known[name] = self._open[name] = known
            self._bound()
            self.close_idle(self._max_open)
        return known

    def _read_header(self, name: BlockName, path: str, fd: int, status: os.stat_result) -> BlockHeader:
        """The block's header; what it says of the file's other blocks is known from then on, unless another file is."""
        stamp = _stamp_of(status)
        try:
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError("it is no regular file")
            if self._damaged.get(name) == stamp:
                raise BlockDamagedError(name, f"{path} is damaged", removed=False)
            headers = read_headers(fd, status.st_size)
            own = header_of(headers, name)
        except (DamagedError, OSError) as error:
            raise self._lost(name, path, stamp, error) from error
        with self._lock:
            for header in headers:
                if header is own or self._damaged.get(header.name) == stamp:
                    continue
                other = Known(header.name, self._folder.block_path(header.name), stamp, header)
                other = self._known.setdefault(header.name, other)
                if other.stamp[:2] == stamp[:2]:  # the same file, which somebody has used since
                    other.header, other.stamp = header, stamp
            self._bound()
        return own

    def _open_file(self, path: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self.close_idle(0)
        return os.open(path, flags)

    def known(self) -> set[BlockName]:
        """Blocks whose header is cached; a copy."""
        with self._lock:
            return set(self._known)

    def forget(self, name: BlockName) -> None:
        """Drops a block's header and descriptor; a thread that reads the block now finishes its read."""
        with self._lock:
            self._known.pop(name, None)
            self._close(name)

    def close_idle(self, keep: int) -> None:
        """Closes all but the `keep` most recently used descriptors."""
        with self._lock:
            while len(self._open) > keep:
                self._close(next(iter(self._open)))

    def _close_deleted(self) -> None:
        if time.monotonic() < self._next_search:
            return
        with self._lock:
            self._next_search = time.monotonic() + _DELETED_EVERY_S
            for name, known in list(self._open.items()):
                try:
                    is_deleted = not os.fstat(known.fd).st_nlink
                except OSError:
                    is_deleted = True
                if is_deleted:
                    self.forget(name)

    def close(self) -> None:
        """Closes all descriptors and drops all headers."""
        with self._lock:
            for name in list(self._known):
                self.forget(name)

    def _bound(self) -> None:
        while len(self._known) > _MOST_KNOWN:
            self.forget(next(iter(self._known)))

    def _close(self, name: BlockName) -> None:
        known = self._open.pop(name, None)
        if known is not None and not known.users:
            os.close(known.fd)


def _is_there(path: str, stamp: Stamp) -> bool:
    try:
        return os.stat(path).st_ino == stamp[0]
    except FileNotFoundError:
        return False
    except OSError:  # unknown, so it does not count as gone
        return True


# ---- bytes of one open file ---------------------------------------------------------------------------------


def read_headers(fd: int, file_bytes: int) -> list[BlockHeader]:
    """What the header says of each block, checked; raises `DamagedError` and `OSError`."""
    first = _read_bytes(fd, min(_FIRST_READ, file_bytes), 0)
    data_at = header_bytes(first, file_bytes)
    if data_at > len(first):
        first += _read_bytes(fd, data_at - len(first), len(first))
    return decode_headers(first[:data_at], file_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class WantedRecords:
    """Heads of some layers, as they are read of each block of one geometry: one layer behind the other in memory."""

    nbytes: int  # of a block's records
    dtype: torch.dtype  # of its records
    # for each layer (layer, first of the heads, begin in memory, end in memory)
    records: tuple[tuple[int, int, int, int], ...]
    inside: tuple[int, ...]  # where these heads begin in the records
    shapes: tuple[tuple[int, ...], ...]  # of its records

    def split(self, data: torch.Tensor, blocks: int) -> list[list[torch.Tensor]]:
        """The records of blocks that lie one behind the other in `data`, uint8 [blocks * nbytes]."""
        if len(set(self.shapes)) == 1:  # one call for all: it counts where records are small
            shaped = data.view(self.dtype).view(blocks, len(self.shapes), *self.shapes[0])
            return [list(block.unbind(0)) for block in shaped.unbind(0)]
        return [
            [
                block[start:stop].view(self.dtype).view(shape)
                for (_, _, start, stop), shape in zip(self.records, self.shapes, strict=True)
            ]
            for block in data.view(blocks, self.nbytes).unbind(0)
        ]


def wanted_of(header: BlockHeader, layers: range, heads: slice | None) -> WantedRecords:
    """What these layers and heads are in the file of a block; `InvalidInputError` if it has no such."""
    ends = None if heads is None else (heads.start, heads.stop, heads.step)  # slices have no hash before Python 3.12
    return _wanted(header.geometry, layers, ends)


@lru_cache(maxsize=4096)
def _wanted(geometry: Geometry, layers: range, ends: tuple[int | None, int | None, int | None] | None) -> WantedRecords:
    records: list[tuple[int, int, int, int]] = []
    inside: list[int] = []
    shapes: list[tuple[int, ...]] = []
    at = 0
    for layer in layers:
        shape = check_layer(geometry.layout, layer)
        start, stop = head_range(None if ends is None else slice(*ends), shape.kv_heads)
        end = at + (stop - start) * geometry.head_bytes[layer]
        records.append((layer, start, at, end))
        inside.append(start * geometry.head_bytes[layer])
        shapes.append((stop - start, *geometry.shapes[layer][1:]))
        at = end
    return WantedRecords(at, geometry.dtype, tuple(records), tuple(inside), tuple(shapes))


@lru_cache(maxsize=4096)
def _pieces(wanted: WantedRecords, place: RecordPlace) -> tuple[tuple[int, int, int], ...]:
    """What lies next to each other in the file: (begin in the file behind the header, begin in memory, its end)."""
    pieces: list[tuple[int, int, int]] = []
    for (layer, _, at, end), inside in zip(wanted.records, wanted.inside, strict=True):
        offset = place.begins[layer] + inside
        if pieces and pieces[-1][0] + pieces[-1][2] - pieces[-1][1] == offset:
            pieces[-1] = (pieces[-1][0], pieces[-1][1], end)
        else:
            pieces.append((offset, at, end))
    return tuple(pieces)


def read_blocks(
    blocks: Sequence[Known], wanted: WantedRecords, memory: RecordMemory | None
) -> list[list[torch.Tensor] | DamagedError | OSError]:
    """Records of open blocks of which the same is wanted; or what went wrong. Blocks of one file that follow each other
    are read together. `memory` gives memory for all together; None: each block has its own."""
    if memory is not None:
        together = memory(len(blocks) * wanted.nbytes)
        parts: Sequence[torch.Tensor] = together.view(len(blocks), wanted.nbytes).unbind(0)
        records = wanted.split(together, len(blocks))
    else:
        parts = [torch.empty(wanted.nbytes, dtype=torch.uint8) for _ in blocks]
        records = [wanted.split(part, 1)[0] for part in parts]
    found: list[list[torch.Tensor] | DamagedError | OSError] = []
    for _, group in groupby(blocks, key=lambda known: known.stamp):
        chain, first = list(group), len(found)
        views = [part.numpy().data for part in parts[first : first + len(chain)]]
        is_read = len(chain) > 1 and _read_chain(chain, wanted, views)
        for at, (known, view) in enumerate(zip(chain, views, strict=True), start=first):
            try:
                if not is_read:
                    _read_block(known, wanted, view)
                for layer, head, start, stop in wanted.records:
                    check_heads(known.header, layer, head, view[start:stop])
                found.append(records[at])
            except (DamagedError, OSError) as error:
                found.append(error)
    return found


def _read_chain(blocks: Sequence[Known], wanted: WantedRecords, views: Sequence[memoryview]) -> bool:
    """Reads what is wanted of a file's blocks: one preadv for all that lies next to each other. False if that fails:
    then each block is read alone, so that it is known which cannot."""
    places = [
        (offset, view[start:stop])
        for known, view in zip(blocks, views, strict=True)
        for offset, start, stop in _pieces(wanted, known.header.place)
    ]
    places.sort(key=itemgetter(0))
    data_at = blocks[0].header.data_at
    first, end = 0, 0
    for at, (offset, piece) in enumerate(places):
        if at and (offset != end or at - first == _PIECES_AT_ONCE):
            if not _read_pieces(blocks[0].fd, places[first:at], data_at):
                return False
            first = at
        end = offset + len(piece)
    return _read_pieces(blocks[0].fd, places[first:], data_at)


def _read_pieces(fd: int, places: Sequence[tuple[int, memoryview]], data_at: int) -> bool:
    """Reads pieces that follow each other in the file; False if not all of them came."""
    try:
        count = os.preadv(fd, [piece for _, piece in places], data_at + places[0][0])
    except OSError:
        return False
    return count == sum(len(piece) for _, piece in places)


def _read_block(known: Known, wanted: WantedRecords, view: memoryview) -> None:
    """Reads a block's records into memory: one pread for those next to each other in the file. Raises `DamagedError`,
    `OSError`."""
    for offset, start, stop in _pieces(wanted, known.header.place):
        _pread_all(known.fd, view[start:stop], known.header.data_at + offset)


def _read_bytes(fd: int, count: int, offset: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.pread(fd, count - len(data), offset + len(data))
        if not part:
            raise DamagedError(_CUT_SHORT)
        data += part
    return data


def _pread_all(fd: int, view: memoryview, offset: int) -> None:
    """Fills the view with the file's bytes; `DamagedError` if the file ends before."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, (view[done:],), offset + done)
        if count == 0:
            raise DamagedError(_CUT_SHORT)
        done += count
