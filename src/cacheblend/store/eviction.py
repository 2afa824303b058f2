"""Which blocks go first where room is needed.

    lru     what was not used for longest
    worth   what is least worth its bytes: GreedyDual-Size-Frequency (Cherkasova 1998). A block's value is how often it
            was used times what recomputing it costs over what keeping it takes, on top of the value of what was
            evicted last: what was popular once grows old.

Knows names and numbers; the stores say what was used, and ask who goes.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.naming import BlockName


class Eviction(Protocol):
    """A policy; its caller holds the lock."""

    def used(self, name: BlockName, worth: float) -> None:
        """A block was written or found; `worth`: cost of recomputing it over its bytes, in any unit."""
        ...

    def gone(self, name: BlockName) -> None:
        """A block was removed by somebody."""
        ...

    def first(self, name: BlockName, used: float) -> tuple[float, float]:
        """A key of a block that was last used at that time: the smallest goes first."""
        ...

    def evicted(self, name: BlockName) -> None:
        """A block was removed for room."""
        ...

    def victims(self) -> Iterator[BlockName]:
        """Blocks that this process used, those to go first in front; it may be left early."""
        ...


class LeastRecentlyUsed:
    """``lru``."""

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
    """``worth``."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._counts: dict[BlockName, int] = {}
        self._values: dict[BlockName, float] = {}
        self._heap: list[tuple[float, int, BlockName]] = []  # with entries that are no longer true
        self._entry: dict[BlockName, int] = {}  # the tick of the true one
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
        """See `Eviction`. A block that this process never used is worth what was evicted last."""
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


def belady(uses: Iterable[BlockName], room: int) -> int:
    """Hits of a cache of `room` equal blocks that knows the future (Belady 1966): what is used latest goes."""
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
        if name not in held and len(held) >= room:
            while True:
                latest, victim = heapq.heappop(heap)
                if held.get(victim) == -latest:
                    break
            if -latest <= next_use[at]:  # the new one is needed latest: it does not come in
                heapq.heappush(heap, (latest, victim))
                continue
            del held[victim]
        held[name] = next_use[at]
        heapq.heappush(heap, (-next_use[at], name))
    return hits
