"""How much of the tests a run draws: of campaigns and of tests marked `slow` a fifth, and `make test-all` all.

A campaign draws `share(whole)` of its random cases. A test or a parameter marked `slow` has its turn in one of five
runs: the seed says in which, and five seeds one after the other run everything. The summary prints the seed;
`CACHEBLEND_SEED` draws the same again.
"""

import os
import random
from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

import pytest

SHARE = min(1.0, float(os.environ.get("CACHEBLEND_CAMPAIGNS", "0.2")))
TURNS = round(1 / SHARE)
SEED = int(os.environ.setdefault("CACHEBLEND_SEED", str(random.SystemRandom().randrange(10**6))))
"""The processes of a run inherit it."""


def share(whole: int) -> int:
    """Of so many cases, or seconds, those of this run; one at least."""
    return max(1, round(whole * SHARE))


def seeds(count: int, known: int) -> list[int]:
    """Of a campaign that has gone well with the seeds below `known`: half of these are always the first ones, the
    others go on with this run's."""
    core = count - count // 2
    return [*range(core), *(core + (SEED * count + at) % (known - core) for at in range(count - core))]


def rotating(values: Iterable[Any], core: Collection[Any] = ()) -> list[Any]:
    """Parameters, of which those outside of the core are slow and take turns; the same turn in each test, so that a
    model or a server that is made for a value serves all of its tests. A tuple is of several arguments."""
    turn, found = 0, list[Any]()
    for value in values:
        if value in core:
            found.append(value)
        else:
            each = value if isinstance(value, tuple) else (value,)
            found.append(pytest.param(*each, marks=pytest.mark.slow(turn)))
            turn += 1
    return found


def leave_out(items: list[pytest.Item], seed: int = SEED, turns: int = TURNS) -> list[pytest.Item]:
    """Takes the slow tests that do not have their turn out of the list; returns them."""
    seen = dict[str, int]()
    left, kept = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if (mark := item.get_closest_marker("slow")) is None:
            kept.append(item)
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] = seen.get(test, -1) + 1
        turn = mark.args[0] if mark.args else crc32(test.encode()) + seen[test]
        (kept if (turn + seed) % turns == 0 else left).append(item)
    items[:] = kept
    return left
