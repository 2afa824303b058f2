"""Stores behind each other, nearest first: reads fall through, what is read comes nearer, writes go on behind.

    find, read    near ── not there, lost or unreachable ──> farther ──> farthest
    promotion     near <── on a thread, once a request has read the block's last layer
    write         near at once; farther and farthest on threads of their own

A store that fails costs what only it had. Each keeps its own bound and evicts by itself.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest
from cacheblend.store.base import LOGGER_NAME, Damage, KVStore, Progress, StoreStats, read_all
from cacheblend.store.writer import WriteBehind

_FOUND = 65_536  # blocks of which it is remembered where they are
_GATHERED_BYTES = 1 << 28  # records that wait for the others of their block
logger = logging.getLogger(LOGGER_NAME)
T = TypeVar("T")


class CascadeStore(KVStore):
    """See the module.

    Args:
        stores: nearest first, two at least; the farthest is where all of it ends up.

    Raises:
        InvalidInputError: fewer than two.
    """

    def __init__(self, stores: Sequence[KVStore]) -> None:
        if len(stores) < 2:
            raise InvalidInputError(f"a cascade needs two stores at least, got {len(stores)}")
        self.stores = tuple(stores)
        self._writers = [WriteBehind(store) for store in self.stores]
        self._lock = threading.Lock()
        self._found: OrderedDict[BlockName, tuple[int, BlockEntry]] = OrderedDict()
        self._gathered: OrderedDict[BlockName, dict[int, torch.Tensor]] = OrderedDict()
        self._gathered_bytes = 0
        self._hits = self._misses = 0

    # ---- blocks -----------------------------------------------------------------------------------------

    @property
    def is_reachable(self) -> bool:
        """See `KVStore.is_reachable`. All of them are: what one of them holds may be what is asked for."""
        return all(store.is_reachable for store in self.stores)

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """See `KVStore.held`."""
        return [any(there) for there in zip(*(store.held(names) for store in self.stores), strict=True)]

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`. Each store is asked for what those in front of it do not have."""
        found: dict[BlockName, tuple[int, BlockEntry]] = {}
        for number, store in enumerate(self.stores):
            wanted = [name for name in dict.fromkeys(names) if name not in found]
            for name, entry in zip(wanted, store.find(wanted) if wanted else [], strict=True):
                if entry is not None:
                    found[name] = (number, entry)
        with self._lock:
            self._hits += sum(name in found for name in names)
            self._misses += sum(name not in found for name in names)
            for name, where in found.items():
                self._found[name] = where
                self._found.move_to_end(name)
            while len(self._found) > _FOUND:
                self._found.popitem(last=False)
        return [found[name][1] if name in found else None for name in names]

    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """See `KVStore.read`."""
        (record,) = self.read_many([name], layer, heads)
        if isinstance(record, BlockLostError):
            raise record
        return record

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """See `KVStore.read_many`. What one store lost, those behind it are asked for."""
        with self._lock:
            first = {name: self._found[name][0] if name in self._found else 0 for name in names}
        read: dict[BlockName, torch.Tensor | BlockLostError] = {}
        for number, store in enumerate(self.stores):
            wanted = [
                name
                for name in dict.fromkeys(names)
                if first[name] <= number and not isinstance(read.get(name), torch.Tensor)
            ]
            if not wanted:
                continue
            read.update(zip(wanted, store.read_many(wanted, layer, heads), strict=True))
            if number and heads is None:
                self._gather(number, layer, {name: read[name] for name in wanted})
        return [read[name] for name in names]

    def promote(self, names: Sequence[BlockName]) -> None:
        """See `KVStore.promote`."""
        read_all(self, names)

    def write(self, block: Block) -> bool:
        """See `KVStore.write`. To the nearest store; to the others behind."""
        for writer in self._writers[1:]:
            writer.submit(block)
        return self.stores[0].write(block)

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`. From all."""
        with self._lock:
            self._found.pop(name, None)
        return any(self._of_all(lambda store: store.delete(name)))

    # ---- promotion --------------------------------------------------------------------------------------

    def _gather(self, number: int, layer: int, read: dict[BlockName, torch.Tensor | BlockLostError]) -> None:
        """Keeps what came from a farther store; a block whose last layer came is written to the nearer ones."""
        for name, record in read.items():
            with self._lock:
                where = self._found.get(name)
            if where is None or not isinstance(record, torch.Tensor):
                continue
            with self._lock:
                parts = self._gathered.setdefault(name, {})
                self._gathered_bytes += record.nbytes - (parts[layer].nbytes if layer in parts else 0)
                parts[layer] = record
                whole = self._gathered.pop(name) if layer == len(where[1].layout.layers) - 1 else None
                self._gathered_bytes -= sum(part.nbytes for part in whole.values()) if whole else 0
                while self._gathered_bytes > _GATHERED_BYTES and self._gathered:
                    _, dropped = self._gathered.popitem(last=False)
                    self._gathered_bytes -= sum(part.nbytes for part in dropped.values())
            if whole is not None:
                self._promote(name, number, where[1], whole)

    def _promote(self, name: BlockName, number: int, entry: BlockEntry, parts: dict[int, torch.Tensor]) -> None:
        store = self.stores[number]

        def make() -> Block | None:
            try:
                layers = range(len(entry.layout.layers))
                records = [parts[layer] if layer in parts else store.read(name, layer) for layer in layers]
            except BlockLostError:
                return None
            return Block(name, entry.parent, entry.token_ids, records, entry.layout)

        for writer in self._writers[:number]:
            writer.submit(make, name, entry.layout.block_bytes(len(entry.token_ids)))

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.pin`. In all."""
        listed = list(names)
        self._of_all(lambda store: store.pin(listed))

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.unpin`. In all."""
        listed = list(names)
        self._of_all(lambda store: store.unpin(listed))

    def pinned(self) -> set[BlockName]:
        """See `KVStore.pinned`. Of any."""
        return set().union(*self._of_all(lambda store: store.pinned()))

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`. In all."""
        self._of_all(lambda store: store.put_manifest(manifest))

    def manifests(self) -> list[ChunkManifest]:
        """See `KVStore.manifests`. Of any; the nearest's where several have it."""
        found: dict[BlockName, ChunkManifest] = {}
        for listed in reversed(self._of_all(lambda store: store.manifests())):
            found |= {manifest.chunk_id: manifest for manifest in listed}
        return [found[chunk_id] for chunk_id in sorted(found)]

    def listing_stamp(self) -> Hashable | None:
        """See `KVStore.listing_stamp`."""
        stamps = tuple(self._of_all(lambda store: store.listing_stamp()))
        return None if None in stamps else stamps

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.has_manifest`. In any."""
        return any(self._of_all(lambda store: store.has_manifest(chunk_id)))

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`. From all."""
        return any(self._of_all(lambda store: store.delete_manifest(chunk_id)))

    # ---- the whole --------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """See `KVStore.stats`. State is the farthest's that answers; hits and misses are of all together."""
        parts = tuple(self._of_all(lambda store: store.stats()))
        return replace(parts[-1], tier="tiered", hits=self._hits, misses=self._misses, tiers=parts)

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """See `KVStore.verify`; progress is told store by store."""
        return [damage for found in self._of_all(lambda store: store.verify(progress)) for damage in found]

    def prune(self, max_bytes: int) -> int:
        """See `KVStore.prune`. Each of them to so many bytes; the bytes freed in the farthest that answers."""
        return self._of_all(lambda store: store.prune(max_bytes))[-1]

    def flush(self) -> None:
        """See `KVStore.flush`. Waits for what is written behind."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """See `KVStore.close`. Writes what waits, and closes all."""
        for writer in self._writers:
            writer.close()
        for store in self.stores:
            store.close()

    def _of_all(self, ask: Callable[[KVStore], T]) -> list[T]:
        """The answers of those that give one.

        Raises:
            StoreError: none of them does; the last one's.
        """
        answers: list[T] = []
        failed: StoreError | None = None
        for store in self.stores:
            try:
                answers.append(ask(store))
            except StoreError as error:
                failed = error
        if failed is not None:
            if not answers:
                raise failed
            logger.warning("one of the stores is left out: %s", failed)
        return answers


def close_all(stores: Iterable[KVStore]) -> None:
    """Closes stores of which the next one could not be opened."""
    for store in stores:
        with contextlib.suppress(StoreError):
            store.close()
