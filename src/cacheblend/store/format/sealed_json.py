"""JSON objects that begin with a checksum of everything behind it."""

import json
from typing import Any

from cacheblend.store.format.checksum import DIGITS, DamagedError, is_sealed, seal

_OPENING = b'{"checksum":"'


def encode_sealed(fields: dict[str, Any]) -> bytes:
    """The object's bytes: one line."""
    return seal(_OPENING, b'",' + json.dumps(fields, separators=(",", ":")).encode()[1:] + b"\n")


def decode_sealed(data: bytes, what: str) -> dict[str, Any]:
    """The object's fields, its checksum among them.

    Args:
        data: the bytes.
        what: names the object for messages.

    Raises:
        DamagedError: a byte is wrong.
    """
    if len(data) < len(_OPENING) + DIGITS or not data.startswith(_OPENING):
        raise DamagedError(f"not a {what}")
    if not is_sealed(data, len(_OPENING)):
        raise DamagedError(f"the {what} does not match its checksum")
    try:
        fields: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"the {what} cannot be understood: {error!r}") from error
    return fields
