"""The options of a store's URL: from text to sizes, times, switches and permissions.

Each function names the value and the way out in its `InvalidInputError`.
"""

import math
import re
from collections.abc import Mapping

from cacheblend.core.errors import InvalidInputError
from cacheblend.store.expiry import parse_seconds

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"8GiB"``, ``"500 MB"`` or ``"1024"``; `InvalidInputError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in _UNITS:
        raise InvalidInputError(f"{text!r} is not a size: write e.g. 8GiB, 500MB or 1048576 (bytes)")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def read_bytes(options: Mapping[str, str]) -> int | None:
    """The bound `max_bytes`; None if there is no such option."""
    return parse_bytes(options["max_bytes"]) if "max_bytes" in options else None


def read_ttl(options: Mapping[str, str]) -> float | None:
    """The time to live `ttl` in seconds; None if there is no such option."""
    return parse_seconds(options["ttl"]) if "ttl" in options else None


def read_page_locked(options: Mapping[str, str]) -> bool | None:
    """The switch `page_locked`; None if there is no such option."""
    return read_flag(options, "page_locked") if "page_locked" in options else None


def read_flag(options: Mapping[str, str], name: str, default: str = "false") -> bool:
    """A switch, true or false."""
    given = options.get(name, default)
    if given not in ("true", "false"):
        raise InvalidInputError(f"{name} must be true or false, got {given!r}")
    return given == "true"


def read_mode(options: Mapping[str, str]) -> int:
    """The permissions `mode` of new files, without the right to execute them."""
    given = options.get("mode", "0600")
    if not re.fullmatch("0?[67][0-7]{2}", given):
        raise InvalidInputError(
            f"mode must be octal permissions that let the owner read and write (0640), got {given!r}"
        )
    return int(given, 8) & 0o666


def read_seconds(options: Mapping[str, str], default: float) -> float:
    """The longest time `timeout` that an answer may take, in seconds."""
    given = options.get("timeout", str(default))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidInputError(f"timeout must be a number of seconds above 0, got {given!r}")
    return seconds
