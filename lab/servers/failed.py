"""What failed in a server while it was measured, by its own counters: its clients got right answers, later.

A server that a benchmark starts is asked when its work is done (`count_failed`), as if all of it had failed here: no
benchmark has to remember it, and `ResultOptions.show` reports no speed with a failed blend in it.
"""

import re
from collections import Counter
from collections.abc import Iterable

from cacheblend.core.failures import CHECK, NOT_WRITTEN, count_failure
from cacheblend.engines.vllm.reasons import DECISIONS

_LABELLED = re.compile(r'(?:vllm:)?cacheblend_(\w+)_total\{.*?(?:reason|what)="([^"]*)".*\} (\S+)')
_FAILED = {("captures_given_up", "failed"): "background work", ("shadow_dropped", "failed"): CHECK}
_FAILED |= {("store_errors", "write"): NOT_WRITTEN}


def failed_in(metrics: Iterable[str]) -> Counter[str]:
    """What failed by the lines of a server's metrics, vLLM's or the embedded engine's."""
    found = Counter[str]()
    for line in metrics:
        if (at := _LABELLED.match(line)) is None:
            continue
        name, label, count = at[1], at[2], int(float(at[3]))
        is_fallback = name == "fallbacks" and label not in DECISIONS
        reason = label if is_fallback else _FAILED.get((name, label))
        if reason is not None and count:
            found[reason] += count
    return found


def count_failed(metrics: Iterable[str]) -> None:
    """Counts it in this process."""
    for reason, count in failed_in(metrics).items():
        count_failure(reason, count)
