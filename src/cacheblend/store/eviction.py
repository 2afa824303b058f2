"""What leaves a store: blocks by an eviction policy or after a time to live, and the manifests that they leave behind.

    lru     the least recently used block first
    worth   the block of lowest value first: GreedyDual-Size-Frequency (Cherkasova 1998). A block's value is its number
            of uses times the cost of recomputing it, divided by its bytes, plus the value of the block that was
            evicted last. This sum lets blocks that were popular only in the past age.

A manifest of a chunk of which no block is held goes with the last block, so that a bound counts what stays:

    evicted   a chunk's last block, whose name is the chunk's: its manifest is read, and goes if no block is left
    sweep     all manifests are read: where evicting blocks was not enough, and now and then
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Protocol

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest

Listed = tuple[ChunkManifest, int]  # a manifest, and the bytes that it counts
_CHECKS_PER_TTL = 4  # how often expired blocks are searched for
_LONGEST_INTERVAL_S = 3600.0
_AT_ONCE = 256
_FEW_EVICTED = 64  # blocks, after which all manifests are searched, where there are few of these


class LeastRecentlyUsed:
    """The policy ``lru``, see the module. No policy is safe to call from several threads at once."""

    def __init__(self) -> None:
        self._held: dict[BlockName, None] = {}  # in the order of use

    def used(self, name: BlockName, worth: float) -> None:
        """Records that a block was written or found; `worth`: cost of recomputing it per byte, in any unit."""
        self._held.pop(name, None)
        self._held[name] = None

    def gone(self, name: BlockName) -> None:
        """Records that a block was removed; `evicted`: by eviction."""
        self._held.pop(name, None)

    evicted = gone

    def victims(self) -> Iterator[BlockName]:
        """Blocks that this process used, in the order of eviction. The caller may stop early."""
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
        count = self._counts[name] = self._counts.get(name, 0) + 1
        self._values[name] = self._clock + count * worth
        self._push(name)

    def gone(self, name: BlockName) -> None:
        self._counts.pop(name, None)
        self._values.pop(name, None)
        self._entry.pop(name, None)

    def keep(self, held: AbstractSet[BlockName]) -> None:
        """Forgets all others, which other processes removed."""
        for name in self._counts.keys() - held:
            self.gone(name)

    def first(self, name: BlockName, used: float) -> tuple[float, float]:
        """Sort key of a block that was last used at the time `used`: the smallest is evicted first. One that this
        process never used has the value of the block evicted last."""
        return self._values.get(name, self._clock), used

    def evicted(self, name: BlockName) -> None:
        self._clock = max(self._clock, self._values.get(name, 0.0))
        self.gone(name)

    def victims(self) -> Iterator[BlockName]:
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


Eviction = LeastRecentlyUsed | LeastWorth
POLICIES: dict[str, Callable[[], Eviction]] = {"lru": LeastRecentlyUsed, "worth": LeastWorth}


def eviction_of(name: str) -> Eviction:
    """A policy by its name; `InvalidInputError` if there is none of that name."""
    if name not in POLICIES:
        raise InvalidInputError(f"no eviction policy is called {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()


class Expiry:
    """Times to live of one store's blocks, in seconds after their last use (None: no limit), by any one clock. Raises
    `InvalidInputError`: a `ttl` that is not above 0."""

    def __init__(self, ttl: float | None) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidInputError(f"a time to live must be above 0 seconds (or None), got {ttl}")
        self.ttl = math.inf if ttl is None else ttl
        self.interval = min(self.ttl / _CHECKS_PER_TTL, _LONGEST_INTERVAL_S)  # between two searches for expired blocks
        self._next_check = -math.inf

    def since(self, now: float) -> float:
        """Blocks last used before this time have expired."""
        return now - self.ttl

    def is_due(self) -> bool:
        """Whether to search all blocks for expired ones now; mutates: True once in `interval` seconds."""
        now = time.monotonic()  # as clocks of the day may be set back
        if self.ttl == math.inf or now < self._next_check:
            return False
        self._next_check = now + self.interval
        return True


class ManifestPlace(Protocol):
    """Where a store keeps its manifests."""

    def count(self) -> int:
        """How many there are."""

    def all(self) -> Iterable[Listed]:
        """All that are intact."""

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterable[Listed]:
        """Those of these names that there are and that are intact."""

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        """Takes chunks off the list."""


class EmptyChunks:
    """Removes the manifests of chunks of which no block is held. The caller holds the store's lock. `place`: of the
    manifests; every method raises what it raises. `held`: which of these blocks are held; marks none as used."""

    def __init__(self, place: ManifestPlace, held: Callable[[Sequence[BlockName]], AbstractSet[BlockName]]) -> None:
        self._place, self._held = place, held
        self._evicted = 0  # since the last sweep

    def evicted(self, names: Sequence[BlockName]) -> int:
        """Removes what blocks leave behind that were just evicted; the bytes freed."""
        self._evicted += len(names)
        return self._remove(self._place.some(names))

    @property
    def is_due(self) -> bool:  # whether so much was evicted since the last sweep that one is worth its time
        return self._evicted > _FEW_EVICTED and self._evicted > self._place.count() // 2

    def sweep(self) -> int:
        """Removes all that are left behind; the bytes freed."""
        self._evicted = 0
        return self._remove(self._place.all())

    def bytes_without(self, blocks: Collection[BlockName]) -> int:
        """Bytes of the manifests that a sweep would remove if these blocks were gone, too."""
        gone = frozenset(blocks)
        return sum(nbytes for part in _parts(self._place.all()) for _, nbytes in self._empty(part, gone))

    def _remove(self, listed: Iterable[Listed]) -> int:
        freed = 0
        for part in _parts(listed):
            empty = self._empty(part, frozenset())
            self._place.remove([chunk_id for chunk_id, _ in empty])
            freed += sum(nbytes for _, nbytes in empty)
        return freed

    def _empty(self, part: Sequence[Listed], gone: frozenset[BlockName]) -> list[tuple[BlockName, int]]:
        names = dict.fromkeys(name for manifest, _ in part for name in manifest.block_names)
        held = self._held(list(names)) - gone
        return [(each.chunk_id, nbytes) for each, nbytes in part if held.isdisjoint(each.block_names)]


def _parts(listed: Iterable[Listed]) -> Iterable[list[Listed]]:
    """So many at a time that a store of a million chunks takes no memory for it, and a server few round trips."""
    left = iter(listed)
    while part := list(islice(left, _AT_ONCE)):
        yield part
