"""Several stores that share the blocks between them, each block in one: disks side by side.

A block belongs to the store whose label hashes highest together with the block's name (rendezvous hashing). Adding or
removing a store moves only the blocks that this store gains or loses.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import xxhash

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.load.threads import DaemonPool, results_of
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, RecordMemory
from cacheblend.store.base import KVStore, Progress, StoreStats
from cacheblend.store.checks import check_max_bytes
from cacheblend.store.combined.base import CombinedStore

T = TypeVar("T")
CALLS = 4
"""Calls to each store at the same time; others wait for one to end."""
CLOSE_S = 5.0
"""Seconds that `close` waits for the calls to each store that are under way."""

_SUMMED = ("blocks", "bytes", "chunks", "pinned", "hits", "misses", "evictions", "damaged", "write_failures")


class StripedStore(CombinedStore):
    """Blocks, pins and manifests spread over stores; each keeps its own bound.

    Args:
        stores: by label, e.g. a folder's path; the labels decide which store a block belongs to.

    Raises:
        InvalidInputError: there are no stores.
    """

    def __init__(self, stores: dict[str, KVStore]) -> None:
        if not stores:
            raise InvalidInputError("a striped store needs a store at least")
        super().__init__(list(stores.values()))
        self._labels = [label.encode() for label in stores]
        # Each has its own threads: a store that hangs stops nobody who reads another one, and no process from ending.
        self._pools = [DaemonPool(CALLS, "cacheblend-stripe") for _ in stores]

    @property
    def tier_names(self) -> tuple[str, ...]:
        """See `KVStore.tier_names`. The first store's: all of them are read side by side, as one device."""
        return self.members[0].tier_names[:1]

    def round_trip_s(self, tier: str) -> float:
        """See `KVStore.round_trip_s`. The longest: all stores are read side by side."""
        return max(store.round_trip_s(name) for store in self.members for name in store.tier_names[:1])

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """See `KVStore.held`."""
        return self._by_store(names, lambda store, own: store.held(own))

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`."""
        return self._by_store(names, lambda store, own: store.find(own))

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """See `KVStore.read_layers`. All stores at the same time."""
        return self._by_store(names, lambda store, own: store.read_layers(own, layers, heads, memory))

    def write(self, block: Block) -> bool:
        """See `KVStore.write`. To the one store of this block."""
        return self.members[self._index(block.name)].write(block)

    def stats(self) -> StoreStats:
        """See `KVStore.stats`. The sums over all stores."""
        parts = tuple(store.stats() for store in self.members)
        bounds = [part.max_bytes for part in parts if part.max_bytes is not None]
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        return replace(parts[0], **sums, max_bytes=sum(bounds) if len(bounds) == len(parts) else None, tiers=parts)

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        """See `KVStore.prune`. Each store to an equal part of `max_bytes`."""
        check_max_bytes(max_bytes)
        listed = self.manifests()
        freed = sum(store.prune(max_bytes // len(self.members), progress) for store in self.members)
        for manifest in listed:  # a store knows only its own blocks, and may have dropped a chunk held in others
            if any(entry is not None for entry in self.find(manifest.block_names)):
                self.put_manifest(manifest)
            else:
                self.delete_manifest(manifest.chunk_id)
        return freed

    def close(self) -> None:
        """See `KVStore.close`. Closes all stores."""
        for pool in self._pools:
            pool.close()
        for pool in self._pools:
            pool.join(CLOSE_S)
        super().close()

    # ---- which store ------------------------------------------------------------------------------------

    def _index(self, name: BlockName) -> int:
        return max(range(len(self._labels)), key=lambda index: xxhash.xxh3_64_intdigest(self._labels[index] + name))

    def _members_of(self, name: BlockName) -> Sequence[KVStore]:
        return (self.members[self._index(name)],)

    def _by_store(self, names: Sequence[BlockName], ask: Callable[[KVStore, list[BlockName]], list[T]]) -> list[T]:
        """Asks all stores at the same time, each for its own blocks; the answers in the order of the names."""
        places: list[list[int]] = [[] for _ in self.members]
        for at, name in enumerate(names):
            places[self._index(name)].append(at)
        parts = [each for each in zip(self._pools, self.members, places, strict=True) if each[2]]
        asked = [pool.submit(ask, store, [names[at] for at in own]) for pool, store, own in parts]
        answers: dict[int, T] = {}
        for (_, _, own), found in zip(parts, results_of(asked), strict=True):
            answers.update(zip(own, found, strict=True))
        return [answers[at] for at in range(len(names))]
