"""Memory in front of another store.

What is read from the back is kept in front, so that the next read of it costs no I/O. Knows two stores; does
not know what the back is made of.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest
from cacheblend.store.base import Damage, KVStore, Progress, StoreStats, head_range, read_all
from cacheblend.store.memory import MemoryStore

_ENTRIES = 16384  # blocks found in the back whose reads can still gather in front


class TieredStore(KVStore):
    """Memory in front of a store in a folder; each keeps its own bound.

    The back holds everything, so it is the back that decides whether a write succeeds, and what is found,
    listed and pinned (while it does not answer, what is in front is found); the front is a cache of it, evicted by
    recency alone. A whole record that is read from the
    back (after a `find` of its block) is kept in front as it is, without a copy: a block's layers gather there
    one read at a time, and its tier is memory when the last of them is there. Reads of some heads are not kept.

    Args:
        front: memory; with a bound of 0 bytes it holds nothing and every read goes to the back.
        back: any store.
    """

    def __init__(self, front: MemoryStore, back: KVStore) -> None:
        self.front = front
        self.back = back
        self._lock = threading.Lock()
        self._entries: OrderedDict[BlockName, BlockEntry] = OrderedDict()
        self._hits = self._misses = 0

    @property
    def is_reachable(self) -> bool:
        """See `KVStore.is_reachable`: what counts is the back."""
        return self.back.is_reachable

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """See `KVStore.held`: what counts is the back."""
        return self.back.held(names)

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`; an entry's tier says where a read would come from."""
        in_back = self.back.find(names)  # all of them: what is used in front is used, too
        in_front, knows = self.front.find(names), self.back.is_reachable
        entries = [
            near if near and (far or not knows) else far and self._gathered(name, far)
            for name, near, far in zip(names, in_front, in_back, strict=True)
        ]
        found = sum(entry is not None for entry in entries)
        with self._lock:
            self._hits += found
            self._misses += len(entries) - found
            for name, entry in zip(names, entries, strict=True):
                if entry is not None:
                    self._entries[name] = entry
                    self._entries.move_to_end(name)
            while len(self._entries) > _ENTRIES:
                self._entries.popitem(last=False)
        return entries

    def _gathered(self, name: BlockName, far: BlockEntry) -> BlockEntry:
        """A block whose last layer is in memory has those there that are ever read (some selectors skip the first)."""
        near = self.front.peek(name, len(far.layout.layers) - 1) is not None
        return replace(far, tier="memory") if near else far

    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """See `KVStore.read`. From memory if the layer is there, else from the back."""
        (record,) = self.read_many([name], layer, heads)
        if isinstance(record, BlockLostError):
            raise record
        return record

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """See `KVStore.read_many`. What is not in memory is read from the back at once."""
        found: dict[BlockName, torch.Tensor | BlockLostError] = {}
        for name in names:
            record = self.front.peek(name, layer)
            if record is not None:  # what was seen is taken: the front may evict it at any time
                start, stop = head_range(heads, record.shape[0])
                found[name] = record if heads is None else record[start:stop]
        far = [name for name in dict.fromkeys(names) if name not in found]
        for name, read in zip(far, self.back.read_many(far, layer, heads), strict=True):
            found[name] = read
            if isinstance(read, torch.Tensor):
                self._promote(name, layer, read)
        return [found[name] for name in names]

    def promote(self, names: Sequence[BlockName]) -> None:
        """See `KVStore.promote`."""
        read_all(self, names)

    def _promote(self, name: BlockName, layer: int, record: torch.Tensor) -> None:
        """Keeps a whole record in front."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is not None and record.shape[0] == entry.layout.layers[layer].kv_heads:
            self.front.offer(name, entry, layer, record)

    def write(self, block: Block) -> bool:
        """See `KVStore.write`. To both; whether it succeeds is up to the back."""
        new = self.back.write(block)
        if sum(record.nbytes for record in block.records) <= self.front.max_bytes:
            self.front.write(block)
        return new

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`."""
        self.front.delete(name)
        return self.back.delete(name)

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.pin`. Keeps blocks in the back; memory goes by recency alone."""
        self.back.pin(names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.unpin`."""
        self.back.unpin(names)

    def pinned(self) -> set[BlockName]:
        """See `KVStore.pinned`."""
        return self.back.pinned()

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`."""
        self.back.put_manifest(manifest)

    def manifests(self) -> list[ChunkManifest]:
        """See `KVStore.manifests`."""
        return self.back.manifests()

    def listing_stamp(self) -> Hashable | None:
        """See `KVStore.listing_stamp`."""
        return self.back.listing_stamp()

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.has_manifest`."""
        return self.back.has_manifest(chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`."""
        return self.back.delete_manifest(chunk_id)

    def stats(self) -> StoreStats:
        """See `KVStore.stats`. State is the back's; hits and misses are of both together."""
        front, back = self.front.stats(), self.back.stats()
        return replace(back, tier="tiered", hits=self._hits, misses=self._misses, tiers=(front, back))

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """See `KVStore.verify`."""
        return self.back.verify(progress)

    def prune(self, max_bytes: int) -> int:
        """See `KVStore.prune`; the bytes freed in the back."""
        self.front.prune(max_bytes)
        return self.back.prune(max_bytes)

    def flush(self) -> None:
        """See `KVStore.flush`."""
        self.back.flush()

    def close(self) -> None:
        """See `KVStore.close`: closes both."""
        self.front.close()
        self.back.close()
