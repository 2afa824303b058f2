"""Times to live: how long a block is kept after its last use."""

import math
import re

from cacheblend.core.errors import InvalidInputError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_CHECKS_PER_TTL = 4  # how often expired blocks are searched for
_LONGEST_INTERVAL_S = 3600.0


def parse_seconds(text: str | float) -> float:
    """Seconds of ``"30d"``, ``"12h"``, ``"90m"`` or ``"3600"``; `InvalidInputError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", str(text))
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds > 0:
        raise InvalidInputError(f"{text!r} is not a time to live: write e.g. 30d, 12h, 90m or 3600 (seconds)")
    return seconds


class Expiry:
    """Times to live of one store's blocks; times are seconds of any one clock.

    Args:
        ttl: seconds that a block is kept after its last use; None: no limit.

    Attributes:
        ttl: the same; infinity for None.
        interval: seconds between two searches for expired blocks.

    Raises:
        InvalidInputError: a `ttl` that is not above 0.
    """

    def __init__(self, ttl: float | None) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidInputError(f"a time to live must be above 0 seconds (or None), got {ttl}")
        self.ttl = math.inf if ttl is None else ttl
        self.interval = min(self.ttl / _CHECKS_PER_TTL, _LONGEST_INTERVAL_S)
        self._next_check = 0.0

    def since(self, now: float) -> float:
        """Blocks last used before this time have expired."""
        return now - self.ttl

    def is_due(self, now: float) -> bool:
        """Whether to search all blocks for expired ones now; mutates: True once in `interval` seconds."""
        if self.ttl == math.inf or now < self._next_check:
            return False
        self._next_check = now + self.interval
        return True
