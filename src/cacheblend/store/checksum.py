"""Checksums: of records, and of a file's header with the checksum inside it.

xxh3_64 finds accidents (bit rot, torn writes, truncation); it is no protection against an attacker who can
write to the folder.
"""

import xxhash

Bytes = bytes | memoryview

DIGITS = 16
"""A checksum in text: 16 lower-case hexadecimal digits."""


def digest(data: Bytes) -> bytes:
    """xxh3_64 of `data`, 8 bytes, most significant first."""
    return bytes(xxhash.xxh3_64_digest(data))


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
