"""What failed in this process and was mended, by reason: answers are right, and what blending gains is lost. The method
does not read it. Metrics, tests and benchmarks do, since nobody else notices: a time with a failed blend in it is not
one of blending. What was decided (a wrong request, a limit) is no failure."""

import threading
from collections import Counter
from collections.abc import Mapping

LOST_BLOCK = "block lost"
NOT_WRITTEN = "store write"
CHECK = "shadow check"
KNOWN = (LOST_BLOCK, NOT_WRITTEN)

_lock = threading.Lock()
_counts, _taken = Counter(dict.fromkeys(KNOWN, 0)), Counter[str]()


def count_failure(reason: str, times: int = 1) -> None:
    """Counts what failed; from any thread."""
    with _lock:
        _counts[reason] += times


def failures() -> dict[str, int]:
    """All that failed since the process began, by reason; of `KNOWN` ones also that nothing has."""
    with _lock:
        return dict(_counts)


def failed_since(before: Mapping[str, int]) -> dict[str, int]:
    """What failed since `failures` returned that."""
    more = {reason: count - before.get(reason, 0) for reason, count in failures().items()}
    return {reason: count for reason, count in more.items() if count}


def take_failures() -> dict[str, int]:
    """What failed since this was called last, or since the process began."""
    with _lock:
        new = _counts - _taken
        _taken.update(new)
        return dict(new)


def in_words(failed: Mapping[str, float]) -> str:
    """As in "3 block lost, 1 RuntimeError"."""
    return ", ".join(f"{count:g} {reason}" for reason, count in sorted(failed.items()))
