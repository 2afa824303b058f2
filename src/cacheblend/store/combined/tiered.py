"""Memory, or a GPU's, as a cache of another store.

Records that are read from the back are kept in memory, so that their next read costs no I/O. Knows two stores; does
not know what the back is made of.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch

from cacheblend.core.errors import BlockLostError, StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, RecordMemory
from cacheblend.store.base import FindCounter, KVStore, Progress, StoreStats, read_all_layers
from cacheblend.store.checks import head_range
from cacheblend.store.combined.base import CombinedStore, TierNames
from cacheblend.store.memory import MemoryStore

_MAX_ENTRIES = 16384  # found blocks whose records are kept in memory when they are read


class TieredStore(CombinedStore):
    """Memory in front of another store; each keeps its own bound.

    The back holds everything. It decides whether a write succeeds, and which blocks are found, listed and pinned;
    while it does not answer, blocks in memory are found. The front is a cache of the back, evicted by recency alone.
    A whole record that is read from the back, after a `find` of its block, is kept in the front, without a copy if its
    layer was read alone. A block's layers gather there read by read; its tier is memory once its last layer is there.

    A tensor-parallel rank reads some heads (``slice(2, 4)``) and finds nothing: another process does. Such records are
    kept, too, and answer reads of exactly these heads, as a whole record answers any. They do not change a block's
    tier, which says where this process would read whole records from: the process that plans cannot know what the
    ranks hold in theirs. There "disk" means: from the disk, or from memory where a rank has read it before.

    Args:
        front: memory, or a GPU's; with a bound of 0 bytes it holds nothing and every read goes to the back.
        back: any store.
        keeps_written: the front keeps what is written, too; False: only what is read.
    """

    def __init__(self, front: MemoryStore, back: KVStore, *, keeps_written: bool = True) -> None:
        super().__init__([back])
        self.front, self.back, self._keeps_written = front, back, keeps_written
        self._lock = threading.Lock()
        self._entries: OrderedDict[BlockName, BlockEntry] = OrderedDict()
        self._finds = FindCounter()
        self._tiers = TierNames((front, back))

    @property
    def tier_names(self) -> tuple[str, ...]:
        """See `KVStore.tier_names`."""
        return self._tiers.all

    def round_trip_s(self, tier: str) -> float:
        """See `KVStore.round_trip_s`."""
        number, name = self._tiers.own(tier) or (0, tier)
        return (self.front, self.back)[number].round_trip_s(name)

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`. An entry's tier says where a read would come from."""
        in_back = self.back.find(names)  # all of them, so that blocks used in memory count as used in the back, too
        in_front, back_answers = self.front.find(names), self.back.is_reachable
        entries = [
            near if near and (far or not back_answers) else far and self._with_tier(name, far)
            for name, near, far in zip(names, in_front, in_back, strict=True)
        ]
        self._finds.count(entries)
        with self._lock:
            for name, entry in zip(names, entries, strict=True):
                if entry is not None:
                    self._entries[name] = entry
                    self._entries.move_to_end(name)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        return entries

    def _with_tier(self, name: BlockName, far: BlockEntry) -> BlockEntry:
        """The entry, of tier memory if its last layer is there: some selectors never read the first ones."""
        near = self.front.peek(name, len(far.layout.layers) - 1) is not None
        return self._tiers.entry(0, replace(far, tier=self.front.tier_names[0])) if near else self._tiers.entry(1, far)

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """See `KVStore.read_layers`. Blocks that are not in memory are read from the back in one call.

        In two if the front would keep records as they are, without a copy, and not all of them: what it keeps is never
        in `memory`, which is somebody else's.
        """
        found: dict[BlockName, list[torch.Tensor] | BlockLostError] = {}
        for name in dict.fromkeys(names):
            records = self._near(name, layers, heads)  # kept from here on: the front may evict it at any time
            if records is not None:
                found[name] = records
        far = [name for name in dict.fromkeys(names) if name not in found]
        kept = [] if self.front.residence.copies else [name for name in far if self._may_keep(name, heads)]
        passing = [name for name in far if name not in set(kept)]
        for part, where in ((passing, memory), (kept, None)):
            for name, read in zip(part, self.back.read_layers(part, layers, heads, where) if part else [], strict=True):
                found[name] = read
                for layer, record in zip(layers, read, strict=True) if isinstance(read, list) else ():
                    if self.front.residence.copies or where is None:
                        self._keep(name, layer, heads, record)
        return [found[name] for name in names]

    def _may_keep(self, name: BlockName, heads: slice | None) -> bool:
        """Whether the front may keep what is read of a block; see `_keep`."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is not None and entry.layout.block_bytes(len(entry.token_ids)) <= self.front.max_bytes:
            return True
        return _named(heads) is not None and self.front.max_bytes > 0

    def _near(self, name: BlockName, layers: range, heads: slice | None) -> list[torch.Tensor] | None:
        """The block's records in the front; None if one of them is not there."""
        records = []
        for layer in layers:
            record = self._near_record(name, layer, heads)
            if record is None:
                return None
            records.append(record)
        return records

    def _near_record(self, name: BlockName, layer: int, heads: slice | None) -> torch.Tensor | None:
        """The record in the front: a part of the whole one, or exactly these heads; None if it is not there."""
        record = self.front.peek(name, layer)
        if record is not None:
            return record if heads is None else record[slice(*head_range(heads, record.shape[0]))]
        named = _named(heads)
        return None if named is None else self.front.peek_heads(name, layer, *named)

    def _keep(self, name: BlockName, layer: int, heads: slice | None, record: torch.Tensor) -> None:
        """Keeps a record in the front: as a whole one if it is known to have all heads, else as these heads."""
        with self._lock:
            entry = self._entries.get(name)
        named = _named(heads)
        if entry is not None and record.shape[0] == entry.layout.layers[layer].kv_heads:
            self.front.offer(name, entry, layer, record)
        elif named is not None and named[1] - named[0] == record.shape[0]:
            self.front.offer_heads(name, layer, named[0], record)

    def promote(self, names: Sequence[BlockName]) -> None:
        """See `KVStore.promote`."""
        read_all_layers(self, names)

    def write(self, block: Block) -> bool:
        """See `KVStore.write`. The back decides whether it succeeds."""
        return self.write_all([block])[0]

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """See `KVStore.write_all`. To the back first."""
        new = self.back.write_all(blocks)
        for block in blocks if self._keeps_written else ():
            if sum(record.nbytes for record in block.records) <= self.front.max_bytes:
                with contextlib.suppress(StoreFullError):  # the back has it
                    self.front.write(block)
        return new

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`. From both."""
        self.front.delete(name)
        return super().delete(name)

    def stats(self) -> StoreStats:
        """See `KVStore.stats`. The back's state; hits and misses of both together."""
        front, back = self.front.stats(), self.back.stats()
        hits, misses = self._finds.hits, self._finds.misses
        return replace(back, tier="tiered", hits=hits, misses=misses, tiers=(front, back))

    def drop_copies(self) -> None:
        """See `KVStore.drop_copies`. Empties the front."""
        self.front.prune(0)
        super().drop_copies()

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        """See `KVStore.prune`. Both; the bytes freed in the back."""
        self.front.prune(max_bytes)
        return self.back.prune(max_bytes, progress)

    def close(self) -> None:
        """See `KVStore.close`. Closes both."""
        self.front.close()
        super().close()


def _named(heads: slice | None) -> tuple[int, int] | None:
    """The heads [start, stop) that a slice names whatever the number of heads; None for one that depends on it."""
    if heads is None or heads.step not in (None, 1) or heads.stop is None:
        return None
    start = heads.start or 0
    return (start, heads.stop) if 0 <= start < heads.stop else None
