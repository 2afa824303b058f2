"""Reads a block file's header and records through a file descriptor.

Knows one open file; raises on damage, and the caller decides what to do about it.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

import numpy as np
import torch

from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import RecordMemory
from cacheblend.store.checks import check_layer, head_range
from cacheblend.store.format.block_file import (
    BlockHeader,
    Geometry,
    RecordPlace,
    check_heads,
    decode_headers,
    header_bytes,
)
from cacheblend.store.format.checksum import DamagedError

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns): identifies one state of a file."""

_FIRST_READ = 16 << 10  # covers most headers
_SECTOR = 4096  # direct reads begin and end at multiples of this, in the file and in memory
_PIECES_AT_ONCE = 512  # below IOV_MAX, which is 1024 on Linux


class Known:
    """A block whose header has been read and checked.

    Attributes:
        name, path, header: the block.
        stamp: the state of the file that the header was read from.
        fd: a descriptor of this file, or -1.
        users: number of threads that read through `fd` now.
        used_ns: when this process last found the block.
    """

    __slots__ = ("fd", "header", "name", "path", "stamp", "used_ns", "users")

    def __init__(self, name: BlockName, path: str, stamp: Stamp, header: BlockHeader) -> None:
        self.name = name
        self.path = path
        self.stamp = stamp
        self.header = header
        self.fd = -1
        self.users = 0
        self.used_ns = 0


def stamp_of(status: os.stat_result) -> Stamp:
    """The file's stamp."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_headers(fd: int, file_bytes: int, *, direct: bool = False) -> list[BlockHeader]:
    """What the header says of each block, checked; raises `DamagedError` and `OSError`. `direct`: see `read_block`."""
    first = _read_bytes(fd, min(_FIRST_READ, file_bytes), 0, direct)
    data_at = header_bytes(first, file_bytes)
    if data_at > len(first):
        first += _read_bytes(fd, data_at - len(first), len(first), direct)
    return decode_headers(first[:data_at], file_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class WantedRecords:
    """Heads of some layers, as they are read of each block of one geometry: one layer behind the other in memory.

    Attributes:
        nbytes: of a block's records.
        dtype: of its records.
        records: for each layer (layer, first of the heads, begin in memory, end in memory).
        inside: where these heads begin in the records.
        shapes: of its records.
    """

    nbytes: int
    dtype: torch.dtype
    records: tuple[tuple[int, int, int, int], ...]
    inside: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

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
    """What these layers and heads are in the file of a block.

    Raises:
        InvalidInputError: no such layer or heads.
    """
    ends = None if heads is None else (heads.start, heads.stop, heads.step)  # slices have no hash before Python 3.12
    return _wanted(header.geometry, len(header.entry.token_ids), layers, ends)


@lru_cache(maxsize=4096)
def _wanted(
    geometry: Geometry, tokens: int, layers: range, ends: tuple[int | None, int | None, int | None] | None
) -> WantedRecords:
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
        shapes.append((stop - start, *geometry.layout.record_shape(layer, tokens)[1:]))
        at = end
    return WantedRecords(at, geometry.layout.record_dtype, tuple(records), tuple(inside), tuple(shapes))


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
    blocks: Sequence[Known], wanted: WantedRecords, memory: RecordMemory | None, *, direct: bool = False
) -> list[list[torch.Tensor] | DamagedError | OSError]:
    """Records of open blocks of which the same is wanted; what went wrong where a block cannot be read.

    Args:
        blocks: with their descriptors. Those of one file that follow each other are read together.
        wanted: what to read.
        memory: gives memory for all of them together; None: each block has memory of its own.
        direct: see `read_block`.
    """
    if memory is not None:
        together = memory(len(blocks) * wanted.nbytes)
        parts: Sequence[torch.Tensor] = together.view(len(blocks), wanted.nbytes).unbind(0)
        records = wanted.split(together, len(blocks))
    else:
        parts = [sectors(wanted.nbytes) if direct else torch.empty(wanted.nbytes, dtype=torch.uint8) for _ in blocks]
        records = [wanted.split(part, 1)[0] for part in parts]
    found: list[list[torch.Tensor] | DamagedError | OSError] = []
    for first, last in _of_one_file(blocks):
        chain, views = blocks[first:last], [part.numpy().data for part in parts[first:last]]
        is_read = len(chain) > 1 and _read_chain(chain, wanted, views, direct)
        for at, known in enumerate(chain, start=first):
            try:
                if is_read:
                    _check(known.header, wanted, views[at - first])
                else:
                    read_block(known.fd, known.header, wanted, parts[at], direct=direct)
                found.append(records[at])
            except (DamagedError, OSError) as error:
                found.append(error)
    return found


def _of_one_file(blocks: Sequence[Known]) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch of blocks that lie in one file."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at].stamp != blocks[first].stamp:
            yield first, at
            first = at


def _read_chain(blocks: Sequence[Known], wanted: WantedRecords, views: Sequence[memoryview], direct: bool) -> bool:
    """Reads what is wanted of a file's blocks: one preadv for all that lies next to each other.

    Returns:
        False if that fails, or direct reads cannot do it: then each block is read alone, so that it is known which of
        them cannot be.
    """
    places = [
        (offset, view[start:stop])
        for known, view in zip(blocks, views, strict=True)
        for offset, start, stop in _pieces(wanted, known.header.place)
    ]
    places.sort(key=itemgetter(0))
    data_at = blocks[0].header.data_at
    if direct and any((data_at + offset | _address(piece) | len(piece)) % _SECTOR for offset, piece in places):
        return False
    first, end = 0, 0
    for at, (offset, piece) in enumerate(places):
        if at and (offset != end or at - first == _PIECES_AT_ONCE):
            if not _read_pieces(blocks[0].fd, places[first:at], data_at):
                return False
            first = at
        end = offset + len(piece)
    return _read_pieces(blocks[0].fd, places[first:], data_at)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _read_pieces(fd: int, places: Sequence[tuple[int, memoryview]], data_at: int) -> bool:
    """Reads pieces that follow each other in the file; False if not all of them came."""
    try:
        count = os.preadv(fd, [piece for _, piece in places], data_at + places[0][0])
    except OSError:
        return False
    return count == sum(len(piece) for _, piece in places)


def read_block(
    fd: int, header: BlockHeader, wanted: WantedRecords, data: torch.Tensor, *, direct: bool = False
) -> None:
    """Reads a block's records, and checks them: one pread for those that lie next to each other in the file.

    Args:
        fd: descriptor of the file.
        header: what its header says of the block.
        wanted: what to read.
        data: where it is put, uint8 [wanted.nbytes].
        direct: the file was opened with O_DIRECT, to bypass the page cache.

    Raises:
        DamagedError: a checksum differs, or the file is too short.
        OSError: the read failed.
    """
    view = data.numpy().data
    for offset, start, stop in _pieces(wanted, header.place):
        offset += header.data_at
        if direct and (offset | data.data_ptr() + start | stop - start) % _SECTOR:
            data[start:stop] = _read_sectors(fd, stop - start, offset)
        else:
            _pread_all(fd, view[start:stop], offset, stop - start)
    _check(header, wanted, view)


def _check(header: BlockHeader, wanted: WantedRecords, view: memoryview) -> None:
    """Checks what was read of a block; raises `DamagedError`."""
    for layer, head, start, stop in wanted.records:
        check_heads(header, layer, head, view[start:stop])


def sectors(count: int) -> torch.Tensor:
    """Memory that direct reads can fill, uint8 [count]."""
    memory = torch.empty(count + _SECTOR, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _SECTOR :][:count]


def _read_bytes(fd: int, count: int, offset: int, direct: bool) -> bytes:
    if direct:
        return _read_sectors(fd, count, offset).numpy().tobytes()
    data = os.pread(fd, count, offset)
    if len(data) < count:
        rest = bytearray(count - len(data))
        _pread_all(fd, memoryview(rest), offset + len(data), len(rest))
        data += rest
    return data


def _read_sectors(fd: int, count: int, offset: int) -> torch.Tensor:
    """`count` bytes from `offset` on, uint8: a view of whole sectors, the last of which the file may not fill."""
    first = offset - offset % _SECTOR
    least = offset + count - first
    memory = sectors(least + -least % _SECTOR)
    _pread_all(fd, memory.numpy().data, first, least)
    return memory[offset - first :][:count]


def _pread_all(fd: int, view: memoryview, offset: int, least: int) -> None:
    """Fills the view with the file's bytes; the file may end after the first `least` of them.

    Raises:
        DamagedError: the file ends earlier.
    """
    done = os.preadv(fd, (view,), offset)
    while done < least:
        count = os.preadv(fd, (view[done:],), offset + done)
        if count == 0:
            raise DamagedError("the file has been cut short")
        done += count
