"""How long a block that nobody uses is kept."""

import math
import re

from cacheblend.core.errors import InvalidInputError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_LOOKS = 4  # for what has expired, in a time to live
_LONGEST_S = 3600.0


def parse_seconds(text: str | float) -> float:
    """Seconds of ``"30d"``, ``"12h"``, ``"90m"`` or ``"3600"``; `InvalidInputError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", str(text))
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds > 0:
        raise InvalidInputError(f"{text!r} is not a time to live: write e.g. 30d, 12h, 90m or 3600 (seconds)")
    return seconds


class Expiry:
    """Of one store; times are seconds of any one clock.

    Args:
        ttl: seconds since a block's last use; None: for ever.
    """

    def __init__(self, ttl: float | None) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidInputError(f"a time to live must be above 0 seconds (or None), got {ttl}")
        self.ttl = math.inf if ttl is None else ttl
        self.interval = min(self.ttl / _LOOKS, _LONGEST_S)
        self._next_look = 0.0

    def since(self, now: float) -> float:
        """Blocks last used before this have expired."""
        return now - self.ttl

    def is_due(self, now: float) -> bool:
        """Whether to look for what has expired and was not asked for; then not again for a while."""
        if self.ttl == math.inf or now < self._next_look:
            return False
        self._next_look = now + self.interval
        return True
