"""Reads a block file's header and records through a descriptor.

Knows one open file; raises on damage and leaves it to others what to do about it.
"""

import os

import torch

from cacheblend.core.naming import BlockName
from cacheblend.store.base import check_layer, head_range
from cacheblend.store.record_file import BlockHeader, DamagedError, check_heads, decode_header, header_bytes

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns): tells one state of a file from another."""

_FIRST_READ = 16 << 10  # covers most headers


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


def read_header(fd: int, file_bytes: int, name: BlockName) -> BlockHeader:
    """The header, checked; raises `DamagedError` and `OSError`."""
    first = os.pread(fd, _FIRST_READ, 0)
    data_at = header_bytes(first, file_bytes)
    if data_at > len(first):
        first += os.pread(fd, data_at - len(first), len(first))
    return decode_header(first[:data_at], file_bytes, name)


def read_record(fd: int, header: BlockHeader, layer: int, heads: slice | None) -> torch.Tensor:
    """One record of all heads, or of those in `heads`, checked: one pread into new memory.

    Raises:
        DamagedError: a checksum differs, or the file is too short.
        InvalidInputError: no such layer or heads.
        OSError: the read failed.
    """
    geometry = header.geometry
    shape = check_layer(geometry.layout, layer)
    start, stop = head_range(heads, shape.kv_heads)
    size = geometry.head_bytes[layer]
    data = torch.empty((stop - start) * size, dtype=torch.uint8)
    view = data.numpy().data
    _pread_all(fd, view, header.data_at + geometry.offsets[layer] + start * size)
    check_heads(header, layer, start, view)
    rest = geometry.layout.record_shape(layer, len(header.entry.token_ids))[1:]
    return data.view(geometry.layout.record_dtype).view(stop - start, *rest)


def _pread_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise DamagedError("the file has been cut short")
        view = view[count:]
        offset += count
