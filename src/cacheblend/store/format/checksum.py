"""Checksums of records, and of headers that contain their own checksum. xxh3_64 detects accidents (bit rot, torn
writes, truncation); it does not protect against an attacker who can write to the store."""

from collections.abc import Callable

import xxhash

Bytes = bytes | memoryview

DIGITS = 16  # length of a checksum as text: 16 lower-case hexadecimal digits


class DamagedError(Exception):
    """Stored bytes are not what was written; the message is one line for the report."""


digest: Callable[[Bytes], bytes] = xxhash.xxh3_64_digest  # xxh3_64 of bytes: 8 bytes, most significant first


def seal(before: bytes, after: bytes) -> bytes:
    """`before` + 16 digits + `after`, the digits being the checksum of `before` + `after`."""
    return before + _digits(before, after) + after


def is_sealed(data: Bytes, at: int) -> bool:
    """Whether the 16 digits at offset `at` are the checksum of everything before and after them."""
    view = memoryview(data)
    return bytes(view[at : at + DIGITS]) == _digits(view[:at], view[at + DIGITS :])


def _digits(before: Bytes, after: Bytes) -> bytes:
    state = xxhash.xxh3_64(before)
    state.update(after)
    return str(state.hexdigest()).encode()
