"""Pins, manifests and documents' records of a store in memory, and what they count against its bound."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.base import KVStore
from cacheblend.store.checks import check_manifest
from cacheblend.store.documents import NAME_OBJECT_BYTES, OBJECT_BYTES, MemoryDocuments
from cacheblend.store.empty_chunks import EmptyChunks, Listed


class MemoryManifests:
    """See `ManifestPlace`. Not safe to call from several threads: the caller holds the store's lock.

    Args:
        blocks: names of the blocks that the store holds; looked at, never changed.

    Attributes:
        nbytes: of all manifests.
    """

    def __init__(self, blocks: Collection[BlockName]) -> None:
        self._blocks, self._manifests = blocks, dict[BlockName, ChunkManifest]()
        self.nbytes = 0

    def put(self, manifest: ChunkManifest) -> None:
        """Lists a chunk, in place of one of the same name."""
        if manifest.chunk_id in self._manifests:
            self.remove([manifest.chunk_id])
        self._manifests[manifest.chunk_id] = manifest
        self.nbytes += _bytes(manifest)

    def has(self, chunk_id: BlockName) -> bool:
        """Whether the chunk is listed."""
        return chunk_id in self._manifests

    def ordered(self) -> list[ChunkManifest]:
        """All of them, by name."""
        return [self._manifests[chunk_id] for chunk_id in sorted(self._manifests)]

    def clear(self) -> None:
        """Takes all chunks off the list."""
        self._manifests.clear()
        self.nbytes = 0

    def count(self) -> int:
        """See `ManifestPlace`."""
        return len(self._manifests)

    def all(self) -> Iterable[Listed]:
        """See `ManifestPlace`. A snapshot."""
        return [(manifest, _bytes(manifest)) for manifest in self._manifests.values()]

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterable[Listed]:
        """See `ManifestPlace`."""
        found = [self._manifests[chunk_id] for chunk_id in chunk_ids if chunk_id in self._manifests]
        return [(manifest, _bytes(manifest)) for manifest in found]

    def held(self, names: Sequence[BlockName]) -> set[BlockName]:
        """See `ManifestPlace`."""
        return {name for name in names if name in self._blocks}

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        """See `ManifestPlace`."""
        for chunk_id in chunk_ids:
            self.nbytes -= _bytes(self._manifests.pop(chunk_id))


def _bytes(manifest: ChunkManifest) -> int:
    """What a manifest takes in memory, about."""
    ids = manifest.anchor_ids.nbytes + manifest.token_ids.nbytes
    return OBJECT_BYTES + ids + NAME_OBJECT_BYTES * len(manifest.block_names) + 4 * len(manifest.label)


class MemoryListing(KVStore):
    """The part of a `MemoryStore` that is no block.

    Args:
        blocks: names of those that are held; looked at, never changed.
        lock: of the store.
    """

    def __init__(self, blocks: Collection[BlockName], lock: AbstractContextManager[object]) -> None:
        self._lock, self._pinned = lock, set[BlockName]()
        self._manifests = MemoryManifests(blocks)
        self._empty = EmptyChunks(self._manifests)
        self.documents = self._kept_records = MemoryDocuments(self._make_room, lock)

    @abstractmethod
    def _make_room(self, need: int) -> None:
        """Evicts until so many bytes fit; raises `StoreFullError` if they cannot."""

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.pin`."""
        with self._lock:
            self._pinned.update(names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.unpin`."""
        with self._lock:
            self._pinned.difference_update(names)

    def pinned(self) -> set[BlockName]:
        """See `KVStore.pinned`."""
        with self._lock:
            return set(self._pinned)

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`. One that it replaces counts until it is gone."""
        check_manifest(manifest)
        with self._lock:
            self._make_room(_bytes(manifest))
            self._manifests.put(manifest)

    def manifests(self) -> list[ChunkManifest]:
        """See `KVStore.manifests`."""
        with self._lock:
            return self._manifests.ordered()

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.has_manifest`."""
        with self._lock:
            return self._manifests.has(chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`."""
        with self._lock:
            there = self._manifests.has(chunk_id)
            self._manifests.remove([chunk_id] if there else [])
            return there
