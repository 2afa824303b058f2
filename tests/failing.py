"""Fails every test in which something failed that the package mends by itself: a blend that vLLM computed in its place,
a lost block, an error in a background thread. Answers are right then, and no assertion about answers sees it.

A test that injects faults declares them: `@pytest.mark.may_fail("RuntimeError")`, or `"*"` where what they lead to is
drawn. Failures of this process are those of `core.failures`; engines that run in children tell them in a file
(`write`, `take`), and servers by their counters, when they are stopped (`lab.servers.vllm_server.serving`).
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.failures import count_failure, failed_since, failures, in_words, take_failures

_seen: dict[str, int] = {}
_observed = Counter[str]()


def check(item: pytest.Item) -> None:
    """Fails the test if something has failed since the last call that it does not declare."""
    new = failed_since(_seen)
    _seen.update(failures())
    take_failures()  # another test's metrics show its own
    declared = {reason for mark in item.iter_markers("may_fail") for reason in mark.args}
    left = {reason: count for reason, count in new.items() if not {reason, "*"} & declared}
    if left:
        pytest.fail(
            f"{in_words(left)}: failed, and was mended; if it was injected, declare it (may_fail)", pytrace=False
        )


def observe() -> None:
    """In a process that runs engines: from now on what ranks in other processes report counts as well."""
    from cacheblend.engines.vllm.metrics import FAILURES, BlendPromMetrics

    real = BlendPromMetrics.observe

    def observed(self: BlendPromMetrics, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        _observed.update(transfer_stats_data.get(FAILURES, {}))
        real(self, transfer_stats_data, engine_idx)

    BlendPromMetrics.observe = observed  # type: ignore[method-assign]


def write(path: Path) -> None:
    """Writes what failed in this process, and in its ranks."""
    mine = Counter(failures())
    path.write_text(json.dumps({reason: int(count) for reason, count in (mine | _observed).items() if count}))


def take(path: Path) -> None:
    """Counts what a child wrote as if it had failed here."""
    for reason, count in json.loads(path.read_text()).items() if path.is_file() else ():
        count_failure(reason, count)
