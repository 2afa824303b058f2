"""Reads a block file's header and records through a file descriptor.

Knows one open file; raises on damage, and the caller decides what to do about it.
"""

import os

import torch

from cacheblend.core.naming import BlockName
from cacheblend.store.checks import check_layer, head_range
from cacheblend.store.format.block_file import BlockHeader, check_heads, decode_header, header_bytes
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
    """The header, checked; raises `DamagedError` and `OSError`. `direct`: see `read_record`."""
    first = _read_bytes(fd, min(_FIRST_READ, file_bytes), 0, direct)
    data_at = header_bytes(first, file_bytes)
    if data_at > len(first):
        first += _read_bytes(fd, data_at - len(first), len(first), direct)
    return decode_header(first[:data_at], file_bytes, name)


def read_record(fd: int, header: BlockHeader, layer: int, heads: slice | None, *, direct: bool = False) -> torch.Tensor:
    """One record of all heads, or of `heads`, checked: one pread into new memory.

    Args:
        fd: descriptor of the file.
        header: the file's header.
        layer, heads: what to read.
        direct: the file was opened with O_DIRECT, to bypass the page cache.

    Returns:
        The record, [heads, ...] as the block's layout has it, on the CPU.

    Raises:
        DamagedError: a checksum differs, or the file is too short.
        InvalidInputError: no such layer or heads.
        OSError: the read failed.
    """
    geometry = header.geometry
    shape = check_layer(geometry.layout, layer)
    start, stop = head_range(heads, shape.kv_heads)
    size = geometry.head_bytes[layer]
    data = _read(fd, (stop - start) * size, header.data_at + geometry.offsets[layer] + start * size, direct)
    check_heads(header, layer, start, data.numpy().data)
    rest = geometry.layout.record_shape(layer, len(header.entry.token_ids))[1:]
    return data.view(geometry.layout.record_dtype).view(stop - start, *rest)


def _read_bytes(fd: int, count: int, offset: int, direct: bool) -> bytes:
    if direct:
        return _read(fd, count, offset, direct).numpy().tobytes()
    data = os.pread(fd, count, offset)
    if len(data) < count:
        data += _read(fd, count - len(data), offset + len(data), direct).numpy().tobytes()
    return data


def _read(fd: int, count: int, offset: int, direct: bool) -> torch.Tensor:
    """`count` bytes from `offset` on, uint8; a direct read takes whole sectors and returns a view of them."""
    if not direct:
        data = torch.empty(count, dtype=torch.uint8)
        _pread_all(fd, data.numpy().data, offset, count)
        return data
    first = offset - offset % _SECTOR
    size = offset + count - first
    size += -size % _SECTOR
    memory = torch.empty(size + _SECTOR, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _SECTOR :][:size]
    _pread_all(fd, memory.numpy().data, first, offset + count - first)
    return memory[offset - first :][:count]


def _pread_all(fd: int, view: memoryview, offset: int, least: int) -> None:
    """Fills the view with the file's bytes; the file may end after the first `least` of them.

    Raises:
        DamagedError: the file ends earlier.
    """
    done = 0
    while done < least:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise DamagedError("the file has been cut short")
        done += count
