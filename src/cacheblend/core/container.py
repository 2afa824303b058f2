"""What the control group of a container lets this process have: the machine's own figures say more than that."""

import math
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def memory_bytes() -> float:
    """Of the group; infinite: it has no limit, or none that can be read."""
    limits = [_words("memory.max"), _words("memory/memory.limit_in_bytes")]
    return min((float(words[0]) for words in limits if words and words[0].isdecimal()), default=math.inf)


def processors() -> float:
    """How many the group may use on average, a part of one too; infinite: as many as there are."""
    quota = _words("cpu.max") or [*_words("cpu/cpu.cfs_quota_us"), *_words("cpu/cpu.cfs_period_us")]
    if len(quota) != 2 or not all(word.isdecimal() for word in quota) or not int(quota[1]):
        return math.inf
    return int(quota[0]) / int(quota[1])


def _words(name: str) -> list[str]:
    try:
        return (_GROUPS / name).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []
