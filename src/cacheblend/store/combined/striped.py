"""Several stores that share the blocks between them, each block in one: disks side by side.

A block's store is the one whose label and name hash highest, so that a store more or less moves only the blocks that
it takes or leaves.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
import xxhash

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest
from cacheblend.store.base import Damage, KVStore, Progress, StoreStats

T = TypeVar("T")


class StripedStore(KVStore):
    """Blocks, pins and manifests spread over stores; each keeps its own bound.

    Args:
        stores: by label, e.g. a folder's path; the labels decide where a block lies.

    Raises:
        InvalidInputError: there are none.
    """

    def __init__(self, stores: dict[str, KVStore]) -> None:
        if not stores:
            raise InvalidInputError("a striped store needs a store at least")
        self._labels = [label.encode() for label in stores]
        self.stores = tuple(stores.values())
        self._pool = ThreadPoolExecutor(len(stores), thread_name_prefix="cacheblend-stripe")

    # ---- blocks -----------------------------------------------------------------------------------------

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """See `KVStore.held`."""
        return self._by_store(names, lambda store, own: store.held(own))

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`."""
        return self._by_store(names, lambda store, own: store.find(own))

    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """See `KVStore.read`."""
        return self._of(name).read(name, layer, heads)

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """See `KVStore.read_many`. All stores at once."""
        return self._by_store(names, lambda store, own: store.read_many(own, layer, heads))

    def write(self, block: Block) -> bool:
        """See `KVStore.write`."""
        return self._of(block.name).write(block)

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`."""
        return self._of(name).delete(name)

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.pin`."""
        for name in names:
            self._of(name).pin([name])

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.unpin`."""
        for name in names:
            self._of(name).unpin([name])

    def pinned(self) -> set[BlockName]:
        """See `KVStore.pinned`."""
        return set().union(*(store.pinned() for store in self.stores))

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`."""
        self._of(manifest.chunk_id).put_manifest(manifest)

    def manifests(self) -> list[ChunkManifest]:
        """See `KVStore.manifests`."""
        found = [manifest for store in self.stores for manifest in store.manifests()]
        return sorted(found, key=lambda manifest: manifest.chunk_id)

    def listing_stamp(self) -> Hashable | None:
        """See `KVStore.listing_stamp`."""
        stamps = tuple(store.listing_stamp() for store in self.stores)
        return None if None in stamps else stamps

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.has_manifest`."""
        return self._of(chunk_id).has_manifest(chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`."""
        return self._of(chunk_id).delete_manifest(chunk_id)

    # ---- the whole --------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """See `KVStore.stats`. All stores together."""
        parts = tuple(store.stats() for store in self.stores)
        bounds = [part.max_bytes for part in parts if part.max_bytes is not None]
        first = parts[0]
        counted = ("blocks", "bytes", "chunks", "pinned", "hits", "misses", "evictions", "damaged", "write_failures")
        sums = {name: sum(getattr(part, name) for part in parts) for name in counted}
        return replace(first, **sums, max_bytes=sum(bounds) if len(bounds) == len(parts) else None, tiers=parts)

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """See `KVStore.verify`; progress is told store by store."""
        return [damage for store in self.stores for damage in store.verify(progress)]

    def prune(self, max_bytes: int) -> int:
        """See `KVStore.prune`: each store to an equal part."""
        if max_bytes < 0:
            raise InvalidInputError(f"max_bytes must be 0 or more, got {max_bytes}")
        listed = self.manifests()
        freed = sum(store.prune(max_bytes // len(self.stores)) for store in self.stores)
        for manifest in listed:  # each store knows its own blocks only
            if any(entry is not None for entry in self.find(manifest.block_names)):
                self.put_manifest(manifest)
            else:
                self.delete_manifest(manifest.chunk_id)
        return freed

    def flush(self) -> None:
        """See `KVStore.flush`."""
        for store in self.stores:
            store.flush()

    def close(self) -> None:
        """See `KVStore.close`: closes all."""
        self._pool.shutdown(wait=True)
        for store in self.stores:
            store.close()

    # ---- which store ------------------------------------------------------------------------------------

    def _index(self, name: BlockName) -> int:
        return max(range(len(self._labels)), key=lambda index: xxhash.xxh3_64_intdigest(self._labels[index] + name))

    def _of(self, name: BlockName) -> KVStore:
        return self.stores[self._index(name)]

    def _by_store(self, names: Sequence[BlockName], ask: Callable[[KVStore, list[BlockName]], list[T]]) -> list[T]:
        """Each store's answers, in the order of the names."""
        places: list[list[int]] = [[] for _ in self.stores]
        for at, name in enumerate(names):
            places[self._index(name)].append(at)
        asked = [
            (own, self._pool.submit(ask, store, [names[at] for at in own]))
            for store, own in zip(self.stores, places, strict=True)
            if own
        ]
        answers: dict[int, T] = {}
        for own, answer in asked:
            answers.update(zip(own, answer.result(), strict=True))
        return [answers[at] for at in range(len(names))]
