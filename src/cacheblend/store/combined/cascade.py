"""Stores in order, nearest first: reads fall through to farther stores, and blocks read there are copied nearer.

    find, read    near ── not held, lost or unreachable ──> farther ──> farthest
    promotion     near <── on a thread, once a request has read the block's last layer
    write         near at once; farther and farthest on threads of their own

A store that fails loses only the blocks that no other store holds. Each store keeps its own bound and evicts by itself.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest, RecordMemory
from cacheblend.store.base import LOGGER_NAME, FindCounter, KVStore, Progress, StoreStats, read_all_layers
from cacheblend.store.combined.base import CombinedStore, TierNames
from cacheblend.store.writer import WriteBehind

_MAX_FOUND = 65_536  # blocks of which the store that holds them is remembered
_MAX_GATHERED_BYTES = 1 << 28  # records that wait for the other layers of their block
logger = logging.getLogger(LOGGER_NAME)
T = TypeVar("T")


class CascadeStore(CombinedStore):
    """See the module.

    Args:
        stores: nearest first, at least two; every block is written to all of them.

    Raises:
        InvalidInputError: fewer than two.
    """

    def __init__(self, stores: Sequence[KVStore]) -> None:
        if len(stores) < 2:
            raise InvalidInputError(f"a cascade needs two stores at least, got {len(stores)}")
        super().__init__(stores)
        self._writers = [WriteBehind(store) for store in self.members]
        self._lock = threading.Lock()
        self._found: OrderedDict[BlockName, tuple[int, BlockEntry]] = OrderedDict()  # with the holding store's index
        self._gathered: OrderedDict[BlockName, dict[int, torch.Tensor]] = OrderedDict()  # records by layer
        self._gathered_bytes = 0
        self._finds = FindCounter()
        self._tiers = TierNames(self.members)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """See `KVStore.tier_names`."""
        return self._tiers.all

    def round_trip_s(self, tier: str) -> float:
        """See `KVStore.round_trip_s`."""
        own = self._tiers.own(tier)
        return 0.0 if own is None else self.members[own[0]].round_trip_s(own[1])

    def _ask(self, members: Sequence[KVStore], call: Callable[[KVStore], T]) -> list[T]:
        """The answers of the members that do not fail.

        Raises:
            StoreError: all of them fail; the last one's error.
        """
        answers: list[T] = []
        failed: StoreError | None = None
        for member in members:
            try:
                answers.append(call(member))
            except StoreError as error:
                failed = error
        if failed is not None:
            if not answers:
                raise failed
            logger.warning("a store of the cascade failed: %s", failed)
        return answers

    # ---- blocks -----------------------------------------------------------------------------------------

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`. Each store is asked for the blocks that no nearer one holds."""
        found: dict[BlockName, tuple[int, BlockEntry]] = {}
        for number, store in enumerate(self.members):
            wanted = [name for name in dict.fromkeys(names) if name not in found]
            for name, entry in zip(wanted, store.find(wanted) if wanted else [], strict=True):
                if entry is not None:
                    found[name] = (number, self._tiers.entry(number, entry))
        with self._lock:
            for name, where in found.items():
                self._found[name] = where
                self._found.move_to_end(name)
            while len(self._found) > _MAX_FOUND:
                self._found.popitem(last=False)
        entries = [found[name][1] if name in found else None for name in names]
        self._finds.count(entries)
        return entries

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """See `KVStore.read_layers`. Blocks that one store lost are read from the next."""
        with self._lock:
            first = {name: self._found[name][0] if name in self._found else 0 for name in names}
        read: dict[BlockName, list[torch.Tensor] | BlockLostError] = {}
        for number, store in enumerate(self.members):
            wanted = [
                name for name in dict.fromkeys(names) if first[name] <= number and not isinstance(read.get(name), list)
            ]
            if not wanted:
                continue
            is_kept = number > 0 and heads is None  # for the nearer stores, so in memory of their own
            found = store.read_layers(wanted, layers, heads, None if is_kept else memory)
            read.update(zip(wanted, found, strict=True))
            for name in wanted if is_kept else ():
                self._gather(number, layers, name, read[name])
        return [read[name] for name in names]

    def write(self, block: Block) -> bool:
        """See `KVStore.write`. To the nearest store at once, to the others later."""
        return self.write_all([block])[0]

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """See `KVStore.write_all`. To the nearest store at once, to the others later."""
        for writer in self._writers[1:]:
            writer.submit_all(blocks)
        return self.members[0].write_all(blocks)

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`. From all stores, and from what waits to be written to them."""
        with self._lock:
            self._found.pop(name, None)
            dropped = self._gathered.pop(name, {})
            self._gathered_bytes -= sum(part.nbytes for part in dropped.values())
        waited = [writer.withdraw(name) for writer in self._writers]
        return super().delete(name) or any(waited)

    # ---- manifests --------------------------------------------------------------------------------------

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`. Behind the blocks that wait: before them it would list an empty chunk, and these
        may go at any time (`EmptyChunks`).
        """
        queued = []
        for member, writer in zip(self.members, self._writers, strict=True):
            put = partial(_put_manifest, member, manifest)
            if writer.is_waiting(manifest.block_names) and writer.submit(put, _manifest_key(manifest.chunk_id)):
                queued.append(member)
        if now := [member for member in self.members if member not in queued]:
            self._ask(now, lambda member: member.put_manifest(manifest))

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`. From all stores, and from what waits to be written to them."""
        waited = [writer.withdraw(_manifest_key(chunk_id)) for writer in self._writers]
        return super().delete_manifest(chunk_id) or any(waited)

    # ---- promotion --------------------------------------------------------------------------------------

    def promote(self, names: Sequence[BlockName]) -> None:
        """See `KVStore.promote`."""
        read_all_layers(self, names)

    def _gather(
        self, number: int, layers: range, name: BlockName, records: list[torch.Tensor] | BlockLostError
    ) -> None:
        """Keeps a block's records that a farther store gave; those of its last layer start its copy to nearer ones."""
        with self._lock:
            where = self._found.get(name)
            if where is None or isinstance(records, BlockLostError):
                return
            parts = self._gathered.setdefault(name, {})
            for layer, record in zip(layers, records, strict=True):
                self._gathered_bytes += record.nbytes - (parts[layer].nbytes if layer in parts else 0)
                parts[layer] = record
            whole = self._gathered.pop(name) if layers.stop == len(where[1].layout.layers) else None
            self._gathered_bytes -= sum(part.nbytes for part in whole.values()) if whole else 0
            while self._gathered_bytes > _MAX_GATHERED_BYTES and self._gathered:
                _, dropped = self._gathered.popitem(last=False)
                self._gathered_bytes -= sum(part.nbytes for part in dropped.values())
        if whole is not None:
            self._copy_nearer(name, number, where[1], whole)

    def _copy_nearer(self, name: BlockName, number: int, entry: BlockEntry, parts: dict[int, torch.Tensor]) -> None:
        """Queues a block for the stores nearer than `number`; layers that were not gathered are read when it is due."""
        store = self.members[number]

        def make() -> Block | None:
            with self._lock:
                if name not in self._found:  # deleted since
                    return None
            try:
                layers = range(len(entry.layout.layers))
                records = [parts[layer] if layer in parts else store.read(name, layer) for layer in layers]
            except BlockLostError:
                return None
            return Block(name, entry.parent, entry.token_ids, records, entry.layout)

        for writer in self._writers[:number]:
            writer.submit(make, name, entry.layout.block_bytes(len(entry.token_ids)))

    # ---- the whole store --------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """See `KVStore.stats`. State of the farthest store that answers; hits and misses of all together."""
        parts = tuple(self._ask(self.members, self._stats_of))
        return replace(parts[-1], tier="tiered", hits=self._finds.hits, misses=self._finds.misses, tiers=parts)

    def _stats_of(self, store: KVStore) -> StoreStats:
        stats = store.stats()
        return replace(stats, tier=self._tiers.of(self.members.index(store), stats.tier))

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        """See `KVStore.prune`. Each store to `max_bytes`, behind the writes that wait, which would else come after it;
        the bytes freed in the farthest one that answers.
        """
        self.flush()
        return self._ask(self.members, lambda store: store.prune(max_bytes, progress))[-1]

    def flush(self) -> None:
        """See `KVStore.flush`. Waits for the writes to all stores."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """See `KVStore.close`. Writes the blocks that wait, and closes all stores."""
        for writer in self._writers:
            writer.close()
        super().close()


def _manifest_key(chunk_id: BlockName) -> BlockName:
    """Under which a manifest waits among blocks; no block has such a name."""
    return BlockName(b"manifest:" + chunk_id)


def _put_manifest(member: KVStore, manifest: ChunkManifest) -> None:
    member.put_manifest(manifest)


def close_all(stores: Iterable[KVStore]) -> None:
    """Closes stores, ignoring errors; for when the next one could not be opened."""
    for store in stores:
        with contextlib.suppress(StoreError):
            store.close()
