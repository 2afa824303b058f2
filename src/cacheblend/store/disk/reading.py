"""Reads a block file's header and records through a descriptor.

Knows one open file; raises on damage and leaves it to others what to do about it.
"""

import os

import torch

from cacheblend.core.naming import BlockName
from cacheblend.store.base import check_layer, head_range
from cacheblend.store.disk.record_file import BlockHeader, DamagedError, check_heads, decode_header, header_bytes

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns): tells one state of a file from another."""

_FIRST_READ = 16 << 10  # covers most headers
_SECTOR = 4096  # reads past the page cache begin and end at multiples of it, in memory as well


class Known:
    """A block whose header has been read and checked.

    Attributes:
        name, path, header: which block it is.
        stamp: the file that the header was read from.
        fd: a descriptor of that very file, or -1.
        users: threads reading through `fd` now.
        used_ns: when this process last found it.
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
    """The header, checked; raises `DamagedError` and `OSError`. `direct` as in `read_record`."""
    first = _read_bytes(fd, min(_FIRST_READ, file_bytes), 0, direct)
    data_at = header_bytes(first, file_bytes)
    if data_at > len(first):
        first += _read_bytes(fd, data_at - len(first), len(first), direct)
    return decode_header(first[:data_at], file_bytes, name)


def read_record(fd: int, header: BlockHeader, layer: int, heads: slice | None, *, direct: bool = False) -> torch.Tensor:
    """One record of all heads, or of those in `heads`, checked: one pread into new memory.

    Args:
        fd: of the file.
        header: its header.
        layer, heads: what to read.
        direct: the file was opened to be read past the page cache.

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
    """`count` bytes from `offset` on, uint8; read directly they are part of whole sectors."""
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
    """Fills the view with the file's bytes, `least` of them at least: the file may end behind those.

    Raises:
        DamagedError: the file ends earlier.
    """
    done = 0
    while done < least:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise DamagedError("the file has been cut short")
        done += count
