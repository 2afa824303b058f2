"""Reads a block file's header and records through a file descriptor.

Knows one open file; raises on damage, and the caller decides what to do about it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import RecordMemory
from cacheblend.store.checks import check_layer, head_range
from cacheblend.store.format.block_file import BlockHeader, Geometry, check_heads, decode_header, header_bytes
from cacheblend.store.format.checksum import DamagedError

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns): identifies one state of a file."""

_FIRST_READ = 16 << 10  # covers most headers
_SECTOR = 4096  # direct reads begin and end at multiples of this, in the file and in memory


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


def read_header(fd: int, file_bytes: int, name: BlockName, *, direct: bool = False) -> BlockHeader:
    """The header, checked; raises `DamagedError` and `OSError`. `direct`: see `read_block`."""
    first = _read_bytes(fd, min(_FIRST_READ, file_bytes), 0, direct)
    data_at = header_bytes(first, file_bytes)
    if data_at > len(first):
        first += _read_bytes(fd, data_at - len(first), len(first), direct)
    return decode_header(first[:data_at], file_bytes, name)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Heads of some layers, as they are read of each block of one geometry: one layer behind the other in memory.

    Attributes:
        nbytes: of a block's records.
        dtype: of its records.
        records: for each layer (layer, first of the heads, begin in memory, end in memory).
        shapes: of its records.
        runs: what lies next to each other in the file: (begin in the file behind the header, begin in memory, its end).
    """

    nbytes: int
    dtype: torch.dtype
    records: tuple[tuple[int, int, int, int], ...]
    shapes: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[int, int, int], ...]

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


def wanted_of(header: BlockHeader, layers: range, heads: slice | None) -> Wanted:
    """What these layers and heads are in the file of a block.

    Raises:
        InvalidInputError: no such layer or heads.
    """
    ends = None if heads is None else (heads.start, heads.stop, heads.step)  # slices have no hash before Python 3.12
    return _wanted(header.geometry, len(header.entry.token_ids), layers, ends)


@lru_cache(maxsize=4096)
def _wanted(
    geometry: Geometry, tokens: int, layers: range, ends: tuple[int | None, int | None, int | None] | None
) -> Wanted:
    records: list[tuple[int, int, int, int]] = []
    shapes: list[tuple[int, ...]] = []
    runs: list[tuple[int, int, int]] = []
    at = 0
    for layer in layers:
        shape = check_layer(geometry.layout, layer)
        start, stop = head_range(None if ends is None else slice(*ends), shape.kv_heads)
        offset, end = geometry.offsets[layer] + start * geometry.head_bytes[layer], at
        end += (stop - start) * geometry.head_bytes[layer]
        records.append((layer, start, at, end))
        shapes.append((stop - start, *geometry.layout.record_shape(layer, tokens)[1:]))
        if runs and runs[-1][0] + runs[-1][2] - runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], runs[-1][1], end)
        else:
            runs.append((offset, at, end))
        at = end
    return Wanted(at, geometry.layout.record_dtype, tuple(records), tuple(shapes), tuple(runs))


def read_blocks(
    blocks: Sequence[Known], wanted: Wanted, memory: RecordMemory | None, *, direct: bool = False
) -> list[list[torch.Tensor] | DamagedError | OSError]:
    """Records of open blocks of which the same is wanted; what went wrong where a block cannot be read.

    Args:
        blocks: with their descriptors.
        wanted: what to read.
        memory: gives memory for all of them together; None: each block has memory of its own.
        direct: see `read_block`.
    """
    if memory is not None:
        together = memory(len(blocks) * wanted.nbytes)
        pieces: Sequence[torch.Tensor] = together.view(len(blocks), wanted.nbytes).unbind(0)
        records = wanted.split(together, len(blocks))
    else:
        pieces = [sectors(wanted.nbytes) if direct else torch.empty(wanted.nbytes, dtype=torch.uint8) for _ in blocks]
        records = [wanted.split(piece, 1)[0] for piece in pieces]
    found: list[list[torch.Tensor] | DamagedError | OSError] = []
    for known, piece, read in zip(blocks, pieces, records, strict=True):
        try:
            read_block(known.fd, known.header, wanted, piece, direct=direct)
            found.append(read)
        except (DamagedError, OSError) as error:
            found.append(error)
    return found


def read_block(fd: int, header: BlockHeader, wanted: Wanted, data: torch.Tensor, *, direct: bool = False) -> None:
    """Reads a block's records, and checks them: one pread for those that lie next to each other in the file.

    Args:
        fd: descriptor of the file.
        header: the file's header.
        wanted: what to read.
        data: where it is put, uint8 [wanted.nbytes].
        direct: the file was opened with O_DIRECT, to bypass the page cache.

    Raises:
        DamagedError: a checksum differs, or the file is too short.
        OSError: the read failed.
    """
    view = data.numpy().data
    for offset, start, stop in wanted.runs:
        offset += header.data_at
        if direct and (offset | data.data_ptr() + start | stop - start) % _SECTOR:
            data[start:stop] = _read_sectors(fd, stop - start, offset)
        else:
            _pread_all(fd, view[start:stop], offset, stop - start)
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
