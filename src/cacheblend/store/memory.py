"""A store in this process's memory: the tensors that it is given, without a copy where they own their memory."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cacheblend.core.errors import BlockLostError, StoreFullError
from cacheblend.core.names import BlockName, TokenIds, as_token_ids
from cacheblend.core.plan.blocks import UNKNOWN, Block, BlockEntry, ChunkManifest, KVLayout, RecordMemory
from cacheblend.store.base import (
    Damage,
    FindCounter,
    KVStore,
    Progress,
    StoreStats,
    check_block,
    check_layer,
    check_manifest,
    check_max_bytes,
    head_range,
)
from cacheblend.store.documents import NAME_OBJECT_BYTES, OBJECT_BYTES, MemoryDocuments
from cacheblend.store.eviction import EmptyChunks, Expiry, Listed, eviction_of
from cacheblend.store.residence import HERE, Kept, Residence, default_memory_bytes

_TRIES = 4  # to make room where there is less memory than the bound says


class MemoryManifests:
    """See `ManifestPlace`. Not safe to call from several threads: the caller holds the store's lock."""

    def __init__(self) -> None:
        self.listed: dict[BlockName, ChunkManifest] = {}
        self.nbytes = 0

    def put(self, manifest: ChunkManifest) -> None:
        if manifest.chunk_id in self.listed:
            self.remove([manifest.chunk_id])
        self.listed[manifest.chunk_id] = manifest
        self.nbytes += _bytes(manifest)

    def count(self) -> int:
        return len(self.listed)

    def all(self) -> Iterable[Listed]:
        return [(manifest, _bytes(manifest)) for manifest in self.listed.values()]

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterable[Listed]:
        found = [self.listed[chunk_id] for chunk_id in chunk_ids if chunk_id in self.listed]
        return [(manifest, _bytes(manifest)) for manifest in found]

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        for chunk_id in chunk_ids:
            self.nbytes -= _bytes(self.listed.pop(chunk_id))


def _bytes(manifest: ChunkManifest) -> int:
    ids = manifest.anchor_ids.nbytes + manifest.token_ids.nbytes
    return OBJECT_BYTES + ids + NAME_OBJECT_BYTES * len(manifest.block_names) + 4 * len(manifest.label)


@dataclass(slots=True)
class MemoryBlock:
    """A block in memory, or some heads of one."""

    # the block's; of some heads nobody knows them
    token_ids: TokenIds
    parent: BlockName
    layout: KVLayout
    # `records[i]` is None until layer i has been offered; of some heads there may be fewer than layers
    records: list[torch.Tensor | None]
    nbytes: int = 0  # of the records
    missing: int = 0  # records that are still missing; above 0 for some heads, which are never a whole block
    used: float = 0.0  # time of the last use

    def record(self, layer: int) -> torch.Tensor | None:
        return self.records[layer] if 0 <= layer < len(self.records) else None


def heads_key(name: BlockName, heads: slice | None, count: int | None = None) -> BlockName | None:
    """Under which some heads of a block are held; longer than any block's name, and begins with this one's. None: the
    slice names other heads by the number that there are, or not `count` of them."""
    if heads is None or heads.step not in (None, 1) or heads.stop is None:
        return None
    start, stop = heads.start or 0, heads.stop
    if not 0 <= start < stop or count not in (None, stop - start):
        return None
    return BlockName(name + start.to_bytes(4, "little") + stop.to_bytes(4, "little"))


class MemoryStore(KVStore):
    """Blocks in memory, at most `max_bytes` of records, manifests and documents' records.

    Besides whole blocks (`write`) it accepts single layers and some heads of single layers (`offer`), which is how a
    tiered store fills it. A block is found once all its layers are there with all heads. The bound and the policy count
    all of it.

    `max_bytes`: bound on the records' bytes, see `default_memory_bytes`; 0 holds nothing. `eviction`: the policy's
    name, see `eviction_of`. `ttl`: seconds without use after which an unpinned block is removed; None: no limit.
    `residence`: where records are kept: ordinary or page-locked memory, or a GPU's. Raises `InvalidInputError`: a
    negative bound, an unknown policy, or a `ttl` that is not above 0."""

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        eviction: str = "lru",
        ttl: float | None = None,
        residence: Residence = HERE,
    ) -> None:
        self.max_bytes = default_memory_bytes() if max_bytes is None else check_max_bytes(max_bytes)
        self.residence, self._lock = residence, threading.RLock()
        self._held: dict[BlockName, MemoryBlock] = {}
        self._pinned = set[BlockName]()
        self._manifests = MemoryManifests()
        self._empty = EmptyChunks(self._manifests, lambda names: {name for name in names if name in self._held})
        self.documents = self._kept_records = MemoryDocuments(self._make_room, self._lock)
        self._eviction, self._expiry = eviction_of(eviction), Expiry(ttl)
        self._bytes, self._holds_heads = 0, False
        self._finds = FindCounter()
        self._evictions = self._write_failures = 0

    @property
    def tier_names(self) -> tuple[str, ...]:
        return (self.residence.tier,)

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """Of one call's blocks the first are evicted last."""
        with self._lock:
            self._remove_expired()
            entries = [self._entry(name) for name in names]
            for name in reversed(names):
                if name in self._held and not self._has_expired(name, self._held[name]):
                    self._mark_used(name)
        self._finds.count(entries)
        return entries

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        with self._lock:
            return [self._entry(name) is not None for name in names]

    def _entry(self, name: BlockName) -> BlockEntry | None:
        held = self._held.get(name)
        if held is None or held.missing or self._has_expired(name, held):
            return None
        return BlockEntry(held.token_ids, held.layout, self.residence.tier, held.parent)

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """The stored tensors themselves, or views of them."""
        found: list[list[torch.Tensor] | BlockLostError] = []
        with self._lock:
            blocks = [self._held.get(name) for name in names]
            for held in filter(None, blocks) if layers else ():
                check_layer(held.layout, layers[0])
                check_layer(held.layout, layers[-1])
            read = [held.records[layers.start : layers.stop] if held else [] for held in blocks]
        for name, kept in zip(names, read, strict=True):
            records = [record for record in kept if record is not None]
            if len(records) < len(layers):
                found.append(BlockLostError([name], f"{name.hex()} is not in memory (never written, or evicted)"))
            elif heads is None:
                found.append(records)
            else:
                found.append([each[slice(*head_range(heads, each.shape[0]))] for each in records])
        return found

    def peek(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor | None:
        """The record of a whole or partial block, or these heads of it, or what was offered of exactly these heads,
        which counts as used then; None if it is not here."""
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                check_layer(held.layout, layer)
                if (record := held.records[layer]) is not None:
                    return record if heads is None else record[slice(*head_range(heads, record.shape[0]))]
            key = heads_key(name, heads)
            if key is None or key not in self._held:
                return None
            self._mark_used(key)
            return self._held[key].record(layer)

    def write(self, block: Block) -> bool:
        """Copies only records that are part of a larger tensor or not contiguous."""
        check_block(block)
        with self._lock:
            self._remove_expired()
            old = self._held.get(block.name)
            if old is not None and not old.missing and not self._has_expired(block.name, old):
                self._mark_used(block.name)
                return False
            if old is not None:
                self._drop(block.name)
            need = self.residence.taken(block.records)
            if not self._evict_for(need):
                self._write_failures += 1
                raise StoreFullError(
                    f"block {block.name.hex()} needs {need} bytes; the memory store is bounded to "
                    f"{self.max_bytes} bytes and the blocks it holds are pinned: raise max_bytes or unpin blocks"
                )
            records = self._kept(block.records, need)
            if records is None:
                self._write_failures += 1
                raise StoreFullError(f"there is no memory left for the {need} bytes of block {block.name.hex()}")
            self._held[block.name] = MemoryBlock(block.token_ids, block.parent, block.layout, [*records], need)
            self._mark_used(block.name)
            self._bytes += need
            return True

    def offer(
        self, name: BlockName, entry: BlockEntry | None, layer: int, heads: slice | None, record: torch.Tensor
    ) -> None:
        """Keeps one layer's record if it fits, as a whole one if the block's entry says that it has all heads, else as
        these heads. The block counts as held once every layer was offered; some heads are given by `peek` of the same
        heads only."""
        whole = entry if entry is not None and record.shape[0] == entry.layout.layers[layer].kv_heads else None
        key = heads_key(name, heads, record.shape[0]) if whole is None else name
        if key is None:
            return
        with self._lock:
            held = self._held.get(key)
            most = record.nbytes if whole is None else whole.layout.block_bytes(len(whole.token_ids))
            if most > self.max_bytes or (held is not None and held.record(layer) is not None):
                return
            if held is None and whole is not None:
                layers = len(whole.layout.layers)
                held = MemoryBlock(whole.token_ids, whole.parent, whole.layout, [None] * layers, missing=layers)
            elif held is None:
                self._holds_heads = True
                held = MemoryBlock(as_token_ids([]), UNKNOWN, KVLayout((), record.dtype), [], missing=1)
            if key not in self._held or whole is None:
                self._held[key] = held
                self._mark_used(key)
            need = self.residence.taken([record])
            kept = self._kept([record], need, keep=key) if self._evict_for(need, keep=key) else None
            if kept is None:
                self._drop(key)
                return
            held.records += [None] * (layer + 1 - len(held.records))
            held.records[layer] = kept[0]
            held.missing -= whole is not None
            held.nbytes += need
            self._bytes += need

    def delete(self, name: BlockName) -> bool:
        with self._lock:
            self._pinned.discard(name)
            whole = self._entry(name) is not None
            for key in [key for key in self._held if key.startswith(name)] if self._holds_heads else [name]:
                self._drop(key)
            return whole

    def _drop(self, name: BlockName) -> int:
        if (held := self._held.pop(name, None)) is None:
            return 0
        self._eviction.gone(name)
        self._bytes -= held.nbytes
        return held.nbytes

    def _mark_used(self, name: BlockName) -> None:
        """Tells the policy. The cost of recomputing a token is taken as independent of its position."""
        held = self._held[name]
        held.used = time.monotonic()
        tokens = len(held.token_ids)
        self._eviction.used(name, tokens / max(1, held.layout.block_bytes(tokens)))

    def _has_expired(self, name: BlockName, held: MemoryBlock) -> bool:
        return held.used < self._expiry.since(time.monotonic()) and name not in self._pinned

    def _remove_expired(self) -> None:
        if self._expiry.is_due():
            for name in [name for name, held in self._held.items() if self._has_expired(name, held)]:
                self._evict(name)

    @property
    def _total(self) -> int:
        return self._bytes + self._manifests.nbytes + self._kept_records.nbytes

    def _make_room(self, need: int) -> None:
        """Evicts until a manifest or record of so many bytes fits; raises `StoreFullError` if it cannot."""
        if not self._evict_for(need):
            raise StoreFullError(
                f"{need} more bytes do not fit into the memory store, which is bounded to {self.max_bytes} bytes; what "
                "it holds is pinned, or records of documents: raise max_bytes or unpin blocks"
            )

    def _evict_for(self, need: int, keep: BlockName | None = None) -> bool:
        """Evicts until `need` more bytes fit; False, with nothing evicted, if they cannot."""
        excess, victims = self._total + need - self.max_bytes, list[BlockName]()
        for name in self._eviction.victims() if excess > 0 else ():
            if name not in self._pinned and name != keep:
                victims.append(name)
                excess -= self._held[name].nbytes
            if excess <= 0:
                break
        if excess > 0 and self._empty.bytes_without(victims) < excess:
            return False
        for name in victims:
            if self._total + need <= self.max_bytes:  # manifests went, too
                return True
            self._evict(name)
        if self._total + need > self.max_bytes:
            self._empty.sweep()
        return True

    def _kept(self, records: Sequence[torch.Tensor], need: int, keep: BlockName | None = None) -> Kept:
        """The records where they are kept; where less memory is to be had than the bound says, others make room."""
        kept, tries = self.residence.keep(records), _TRIES
        while kept is None and tries and self._evict_for(self.max_bytes - self._total + need, keep):
            kept, tries = self.residence.keep(records), tries - 1
        return kept

    def _evict(self, name: BlockName) -> int:
        self._evictions += not self._held[name].missing
        self._eviction.evicted(name)
        freed = self._drop(name)
        freed += self._empty.evicted([name])
        return freed + (self._empty.sweep() if self._empty.is_due else 0)

    def pin(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            self._pinned.update(names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            self._pinned.difference_update(names)

    def pinned(self) -> set[BlockName]:
        with self._lock:
            return set(self._pinned)

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """One that it replaces counts until it is gone."""
        check_manifest(manifest)
        with self._lock:
            self._make_room(_bytes(manifest))
            self._manifests.put(manifest)

    def manifests(self) -> list[ChunkManifest]:
        with self._lock:
            return [manifest for _, manifest in sorted(self._manifests.listed.items())]

    def has_manifest(self, chunk_id: BlockName) -> bool:
        with self._lock:
            return chunk_id in self._manifests.listed

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        with self._lock:
            there = chunk_id in self._manifests.listed
            self._manifests.remove([chunk_id] if there else [])
            return there

    def stats(self) -> StoreStats:
        with self._lock:
            whole = [name for name, held in self._held.items() if not held.missing]
            return StoreStats(
                tier=self.residence.tier,
                blocks=len(whole),
                bytes=self._total,
                max_bytes=self.max_bytes,
                chunks=self._manifests.count(),
                pinned=len(self._pinned.intersection(whole)),
                hits=self._finds.hits,
                misses=self._finds.misses,
                evictions=self._evictions,
                damaged=0,
                write_failures=self._write_failures,
            )

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Memory has no checksums."""
        if progress is not None:
            progress(len(self._held), len(self._held))
        return []

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        check_max_bytes(max_bytes)
        freed = 0
        with self._lock:
            for name in [name for name in self._eviction.victims() if name not in self._pinned]:
                if self._total <= max_bytes:
                    break
                freed += self._evict(name)
            freed += self._empty.sweep()
        return freed

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            self._pinned.clear()
            self._manifests.remove(list(self._manifests.listed))
            self._bytes = 0
