"""Eviction policies: the order in which blocks are evicted when a store is full.

    lru     the least recently used block first
    worth   the block of lowest value first: GreedyDual-Size-Frequency (Cherkasova 1998). A block's value is its number
            of uses times the cost of recomputing it, divided by its bytes, plus the value of the block that was
            evicted last. This sum lets blocks that were popular only in the past age.

Knows names and numbers; stores report uses and ask for the order.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName


class Eviction(Protocol):
    """A policy; not safe to call from several threads at once: the caller holds a lock."""

    def used(self, name: BlockName, worth: float) -> None:
        """Records that a block was written or found; `worth`: cost of recomputing it per byte, in any unit."""
        ...

    def gone(self, name: BlockName) -> None:
        """Records that a block was removed, but not by eviction."""
        ...

    def first(self, name: BlockName, used: float) -> tuple[float, float]:
        """Sort key of a block that was last used at the time `used`: the smallest is evicted first."""
        ...

    def evicted(self, name: BlockName) -> None:
        """Records that a block was evicted."""
        ...

    def victims(self) -> Iterator[BlockName]:
        """Blocks that this process used, in the order of eviction. The caller may stop early."""
        ...


class LeastRecentlyUsed:
    """The policy ``lru``, see the module."""

    def __init__(self) -> None:
        self._held: dict[BlockName, None] = {}  # in the order of use

    def used(self, name: BlockName, worth: float) -> None:
        """See `Eviction`."""
        self._held.pop(name, None)
        self._held[name] = None

    def gone(self, name: BlockName) -> None:
        """See `Eviction`."""
        self._held.pop(name, None)

    def first(self, name: BlockName, used: float) -> tuple[float, float]:
        """See `Eviction`."""
        return 0.0, used

    def evicted(self, name: BlockName) -> None:
        """See `Eviction`."""
        self._held.pop(name, None)

    def victims(self) -> Iterator[BlockName]:
        """See `Eviction`."""
        yield from self._held


class LeastWorth:
    """The policy ``worth``, see the module."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._counts: dict[BlockName, int] = {}
        self._values: dict[BlockName, float] = {}
        self._heap: list[tuple[float, int, BlockName]] = []  # includes outdated entries
        self._entry: dict[BlockName, int] = {}  # the tick of each block's current entry
        self._tick = 0

    def used(self, name: BlockName, worth: float) -> None:
        """See `Eviction`."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        self._values[name] = self._clock + count * worth
        self._push(name)

    def gone(self, name: BlockName) -> None:
        """See `Eviction`."""
        self._counts.pop(name, None)
        self._values.pop(name, None)
        self._entry.pop(name, None)

    def first(self, name: BlockName, used: float) -> tuple[float, float]:
        """See `Eviction`. A block that this process never used has the value of the block evicted last."""
        return self._values.get(name, self._clock), used

    def evicted(self, name: BlockName) -> None:
        """See `Eviction`."""
        self._clock = max(self._clock, self._values.get(name, 0.0))
        self.gone(name)

    def victims(self) -> Iterator[BlockName]:
        """See `Eviction`."""
        seen: list[BlockName] = []
        try:
            while self._heap:
                _, tick, name = heapq.heappop(self._heap)
                if self._entry.get(name) == tick:
                    seen.append(name)
                    yield name
        finally:
            for name in seen:
                if name in self._values:
                    self._push(name)

    def _push(self, name: BlockName) -> None:
        self._tick += 1
        self._entry[name] = self._tick
        heapq.heappush(self._heap, (self._values[name], self._tick, name))
        if len(self._heap) > 64 + 4 * len(self._values):
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)


POLICIES: dict[str, Callable[[], Eviction]] = {"lru": LeastRecentlyUsed, "worth": LeastWorth}


def eviction_of(name: str) -> Eviction:
    """A policy by its name; `InvalidInputError` if there is none of that name."""
    if name not in POLICIES:
        raise InvalidInputError(f"no eviction policy is called {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()


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
