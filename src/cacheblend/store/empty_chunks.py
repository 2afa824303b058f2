"""Manifests of chunks of which no block is held: they go with the last block, so that a bound counts what stays.

    evicted   a chunk's last block, whose name is the chunk's: its manifest is read, and goes if no block is left
    sweep     all manifests are read: where evicting blocks was not enough, and now and then

Every kind of store evicts in this way. Knows manifests and names; does not know where they lie.
"""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Protocol

from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest

Listed = tuple[ChunkManifest, int]
"""A manifest, and the bytes that it counts."""

_AT_ONCE = 256
_FEW_EVICTED = 64  # blocks, after which all manifests are searched, where there are few of these


class ManifestPlace(Protocol):
    """Where a store keeps its manifests."""

    def count(self) -> int:
        """How many there are."""
        ...

    def all(self) -> Iterable[Listed]:
        """All that are intact."""
        ...

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterable[Listed]:
        """Those of these names that there are and that are intact."""
        ...

    def held(self, names: Sequence[BlockName]) -> AbstractSet[BlockName]:
        """Which of these blocks are held; marks none as used."""
        ...

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        """Takes chunks off the list."""
        ...


class EmptyChunks:
    """Removes the manifests of chunks of which no block is held. The caller holds the store's lock.

    Every method raises what the place raises.

    Args:
        place: of the manifests.
    """

    def __init__(self, place: ManifestPlace) -> None:
        self._place = place
        self._evicted = 0  # since the last sweep

    def evicted(self, names: Sequence[BlockName]) -> int:
        """Removes what blocks leave behind that were just evicted; the bytes freed."""
        self._evicted += len(names)
        return self._remove(self._place.some(names))

    @property
    def is_due(self) -> bool:
        """Whether so much was evicted since the last sweep that one is worth its time."""
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
            if empty:
                self._place.remove([chunk_id for chunk_id, _ in empty])
            freed += sum(nbytes for _, nbytes in empty)
        return freed

    def _empty(self, part: Sequence[Listed], gone: frozenset[BlockName]) -> list[tuple[BlockName, int]]:
        names = dict.fromkeys(name for manifest, _ in part for name in manifest.block_names)
        held = self._place.held(list(names)) - gone
        return [(each.chunk_id, nbytes) for each, nbytes in part if held.isdisjoint(each.block_names)]


def _parts(listed: Iterable[Listed]) -> Iterable[list[Listed]]:
    """So many at a time that a store of a million chunks takes no memory for it, and a server few round trips."""
    left = iter(listed)
    while part := list(islice(left, _AT_ONCE)):
        yield part
