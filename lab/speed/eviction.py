"""Hit rate by cache size on a RAGPulse trace: each eviction policy, and the optimum (Belady).

The passages of the trace are blocks of equal size, used in the order of its requests; nothing is computed.
"""

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName
from cacheblend.store.eviction import POLICIES, eviction_of
from lab.bench import Advance, draw_curves, picture, silent
from lab.servers.replay import read_trace

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
BLOCK = 256


def run(trace: Path, shares: Sequence[float] = (), advance: Advance = silent) -> dict[str, Any]:
    """Hit rates over the whole trace, for caches that hold these shares of all distinct blocks."""
    shares = shares or SHARES
    if any(not 0 < share <= 1 for share in shares):
        raise InvalidInputError(f"sizes must lie above 0 and up to 1, got {list(shares)}")
    uses = [
        BlockName(f"{passage.id} {number}".encode())
        for request in read_trace(trace)
        for passage in request.passages
        for number in range(-(-passage.tokens // BLOCK))
    ]
    distinct = len(set(uses))
    capacities = [max(1, round(share * distinct)) for share in shares]
    rates: dict[str, list[float]] = {}
    for number, name in enumerate(POLICIES, 1):
        rates[name] = [_hits(name, uses, capacity) / len(uses) for capacity in capacities]
        advance(number, len(POLICIES))
    rates["belady"] = best = [belady(uses, capacity) / len(uses) for capacity in capacities]
    of_best = {
        f"{name}_of_best": min(rate / most if most else 1.0 for rate, most in zip(rates[name], best, strict=True))
        for name in POLICIES
    }
    return {
        "trace": trace.name,
        "uses": len(uses),
        "distinct": distinct,
        "shares": list(shares),
        "hit_rate": rates,
        "figures": of_best,
    }


def belady(uses: Iterable[BlockName], capacity: int) -> int:
    """Hits of the optimal cache of `capacity` equal blocks, which evicts the block used furthest in the future.

    An upper bound for every policy (Belady 1966).
    """
    sequence = list(uses)
    later: dict[BlockName, int] = {}
    next_use = [0] * len(sequence)
    for at in range(len(sequence) - 1, -1, -1):
        next_use[at] = later.get(sequence[at], len(sequence))
        later[sequence[at]] = at
    held: dict[BlockName, int] = {}
    heap: list[tuple[int, BlockName]] = []
    hits = 0
    for at, name in enumerate(sequence):
        hits += name in held
        if name not in held and len(held) >= capacity:
            while True:
                latest, victim = heapq.heappop(heap)
                if held.get(victim) == -latest:
                    break
            if -latest <= next_use[at]:  # the new block is used latest of all: it is not admitted
                heapq.heappush(heap, (latest, victim))
                continue
            del held[victim]
        held[name] = next_use[at]
        heapq.heappush(heap, (-next_use[at], name))
    return hits


def _hits(policy: str, uses: Sequence[BlockName], capacity: int) -> int:
    """Hits of a cache of `capacity` equal blocks."""
    eviction, held, found = eviction_of(policy), set[BlockName](), 0
    for name in uses:
        found += name in held
        if name not in held and len(held) >= capacity:
            victim = next(eviction.victims())
            eviction.evicted(victim)
            held.remove(victim)
        held.add(name)
        eviction.used(name, 1.0)
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws hit rate by size, a curve for each policy."""
    sizes = [100 * share for share in result["shares"]]
    with picture(path) as (axes,):
        draw_curves(
            axes,
            {name: (sizes, [100 * rate for rate in rates]) for name, rates in result["hit_rate"].items()},
            f"RAGPulse: {result['uses']} uses of {result['distinct']} blocks of {BLOCK} tokens",
            dashed=("belady",),
            xscale="log",
            xlabel="cache, % of all distinct blocks",
            ylabel="hits, % of uses",
            ylim=(0, 100),
        )
