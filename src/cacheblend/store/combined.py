"""Stores made of other stores: memory as a cache of one, and stores in order, nearest first. Pins, manifests, documents
and checks go to all members; how blocks are read and written is what tells the two apart. Does not know what the
members are made of."""

import contextlib
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreFullError
from cacheblend.core.load.threads import time_left
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest, RecordMemory
from cacheblend.store.base import LOGGER_NAME, Damage, FindCounter, KVStore, Progress, StoreStats, check_block
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords
from cacheblend.store.memory import MemoryStore, heads_key
from cacheblend.store.writer import WriteBehind

logger = logging.getLogger(LOGGER_NAME)
T = TypeVar("T")

_MOST_GATHERED_BYTES = 1 << 28  # records that wait for the other layers of their block


class CombinedDocuments(DocumentRecords):
    """The records of several stores, nearest first."""

    def __init__(self, members: Sequence[KVStore]) -> None:
        self._members = members

    def put(self, record: DocumentRecord) -> None:
        for member in self._members:
            member.documents.put(record)

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        """The nearest member's, an intact one before a damaged one."""
        found = [member.documents.get(root, name) for member in self._members]
        intact = [each for each in found if isinstance(each, DocumentRecord)]
        return intact[0] if intact else next((each for each in found if each is not None), None)

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        found: dict[BlockName, DocumentRecord | DamagedRecord] = {}
        for member in self._members:
            for record in member.documents.all(root):
                nearest = found.setdefault(record.name, record)
                if isinstance(nearest, DamagedRecord) and isinstance(record, DocumentRecord):
                    found[record.name] = record
        return [found[name] for name in sorted(found)]

    def names(self, root: BlockName) -> list[BlockName]:
        return sorted({name for member in self._members for name in member.documents.names(root)})

    def delete(self, root: BlockName, name: BlockName) -> bool:
        deleted = [member.documents.delete(root, name) for member in self._members]
        return any(deleted)

    def roots(self) -> list[BlockName]:
        return sorted({root for member in self._members for root in member.documents.roots()})

    def changing(self, root: BlockName) -> AbstractContextManager[object]:
        """By the last member's lock: a near one may be each machine's own."""
        return self._members[-1].documents.changing(root)


class CombinedStore(KVStore):
    """A store that keeps everything in its members. A call goes to all of them, and what they return is merged. Where
    and whether a block is read or written is up to the subclass, and so is `stats`. Tiers of one kind are told apart by
    numbers, see `KVStore.tier_names`. Of `most_found` blocks it is remembered where they were found. Members
    and tiers are closed with this store."""

    def __init__(self, members: Sequence[KVStore], tiers: Sequence[KVStore], most_found: int) -> None:
        self.members, self._tiers, self._most_found = tuple(members), tuple(tiers), most_found
        self.documents = CombinedDocuments(self.members)
        self._finds, self._lock = FindCounter(), threading.Lock()
        self._found: OrderedDict[BlockName, tuple[int, BlockEntry]] = OrderedDict()  # with the tier's index
        self._names: list[dict[str, str]] = []  # of each store's tiers, by the names that it gives them itself
        self._by_tier: dict[str, tuple[KVStore, str]] = {}  # whose it is, and what that calls it
        for store in self._tiers:
            self._names.append({})
            for name in store.tier_names:
                kind = re.sub(r"-\d+$", "", name)
                free = (name, *(f"{kind}-{number}" for number in range(2, len(self._by_tier) + 3)))
                self._names[-1][name] = new = next(each for each in free if each not in self._by_tier)
                self._by_tier[new] = store, name

    def _ask(
        self, call: Callable[[KVStore], T], members: Sequence[KVStore] | None = None, *, needs_all: bool = False
    ) -> list[T]:
        """The members' answers. A subclass may leave out members that fail, unless all are needed: what is deleted in
        some would come back from one that fails, and what that holds is not checked."""
        return [call(member) for member in (self.members if members is None else members)]

    @property
    def tier_names(self) -> tuple[str, ...]:
        return tuple(self._by_tier)

    def tiers(self) -> dict[str, KVStore]:
        return {name: store.tiers()[own] for name, (store, own) in self._by_tier.items()}

    @property
    def is_reachable(self) -> bool:  # all members, as each may be the one that holds a block
        return all(member.is_reachable for member in self.members)

    @property
    def is_away(self) -> bool:
        return all(member.is_away for member in self.members)

    @property
    def lasting(self) -> KVStore:  # the farthest that answers and may be written to
        able = (each for each in reversed(self.members) if each.is_reachable and not each.read_only)
        return next(able, self.members[0]).lasting

    @property
    def writing_s(self) -> float:
        return max(member.writing_s for member in self.members)

    def round_trip_s(self, tier: str) -> float:
        store, own = self._by_tier.get(tier, (None, tier))
        return 0.0 if store is None else store.round_trip_s(own)

    def _named(self, number: int, entry: BlockEntry) -> BlockEntry:
        """An entry of tier `number`, with the name that its tier has here."""
        name = self._names[number].get(entry.tier, entry.tier)
        return entry if name == entry.tier else replace(entry, tier=name)

    def _entries(
        self, names: Sequence[BlockName], found: Mapping[BlockName, tuple[int, BlockEntry]]
    ) -> list[BlockEntry | None]:
        """What `find` returns; where blocks were found is remembered."""
        with self._lock:
            for name, where in found.items():
                self._found[name] = where
                self._found.move_to_end(name)
            while len(self._found) > self._most_found:
                self._found.popitem(last=False)
        entries = [found[name][1] if name in found else None for name in names]
        self._finds.count(entries)
        return entries

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        return [any(there) for there in zip(*(member.held(names) for member in self.members), strict=True)]

    def promote(self, names: Sequence[BlockName]) -> None:
        """Reads every layer of them, one block after the other."""
        for name, entry in zip(names, self.find(names), strict=True):
            for layer in range(len(entry.layout.layers) if entry else 0):  # a whole block may exceed a timeout
                if isinstance(self.read_many([name], layer)[0], BlockLostError):
                    break

    def write(self, block: Block) -> bool:
        return self.write_all([block])[0]

    def delete(self, name: BlockName) -> bool:
        return any(self._ask(lambda member: member.delete(name), needs_all=True))

    def pin(self, names: Iterable[BlockName]) -> None:
        pinned = list(names)
        self._ask(lambda member: member.pin(pinned))

    def unpin(self, names: Iterable[BlockName]) -> None:
        unpinned = list(names)
        self._ask(lambda member: member.unpin(unpinned), needs_all=True)

    def pinned(self) -> set[BlockName]:
        return set().union(*self._ask(lambda member: member.pinned()))

    def put_manifest(self, manifest: ChunkManifest) -> None:
        self._ask(lambda member: member.put_manifest(manifest))

    def manifests(self) -> list[ChunkManifest]:
        """The nearest member's where several list a chunk."""
        listed = self._ask(lambda member: member.manifests())
        if len(listed) == 1:
            return listed[0]
        found = {manifest.chunk_id: manifest for each in reversed(listed) for manifest in each}
        return [found[chunk_id] for chunk_id in sorted(found)]

    def listing_stamp(self) -> Hashable | None:
        stamps = tuple(self._ask(lambda member: member.listing_stamp()))
        return None if None in stamps else stamps

    def has_manifest(self, chunk_id: BlockName) -> bool:
        return any(self._ask(lambda member: member.has_manifest(chunk_id)))

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        return any(self._ask(lambda member: member.delete_manifest(chunk_id), needs_all=True))

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        found = list[Damage]()
        try:
            self._ask(lambda member: found.extend(member.verify(progress)), needs_all=True)
        except StoreError:
            for each in found:  # of the others, who may have removed it
                what = "removed" if each.removed else "damaged"
                logger.warning("%s %s %s: %s", what, each.kind, each.name.hex(), each.reason)
            raise
        return found

    def flush(self, timeout_s: float | None = None) -> bool:
        left = time_left(timeout_s)
        done = [member.flush(left()) for member in self.members]
        return all(done)

    def drop_copies(self) -> None:
        for member in self.members:
            member.drop_copies()

    def close(self) -> None:
        for store in self._tiers:
            store.close()


class TieredStore(CombinedStore):
    """Memory, or a GPU's, in front of another store; each keeps its own bound.

    The back holds everything. It decides whether a write succeeds, and which blocks are found, listed and pinned;
    while it does not answer, blocks in memory are found. The front is a cache of the back, evicted by recency alone.
    A whole record that is read from the back, after a `find` of its block, is kept in the front, without a copy if its
    layer was read alone. A block's layers gather there read by read; its tier is memory once its last layer is there.

    A tensor-parallel rank reads some heads (``slice(2, 4)``) and finds nothing: another process does. Such records are
    kept, too, and answer reads of exactly these heads, as a whole record answers any. They do not change a block's
    tier, which says where this process would read whole records from: the process that plans cannot know what the
    ranks hold in theirs. There "disk" means: from the disk, or from memory where a rank has read it before.

    `front`: memory, or a GPU's; with a bound of 0 bytes it holds nothing and every read goes to the back.
    `keeps_written`: the front keeps what is written, too; False: only what is read."""

    def __init__(self, front: MemoryStore, back: KVStore, *, keeps_written: bool = True) -> None:
        super().__init__([back], (front, back), most_found=16_384)
        self.front, self.back, self._keeps_written = front, back, keeps_written

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        in_back = self.back.find(names)  # all of them, so that blocks used in memory count as used in the back, too
        in_front, back_answers = self.front.find(names), self.back.is_reachable
        found: dict[BlockName, tuple[int, BlockEntry]] = {}
        for name, near, far in zip(names, in_front, in_back, strict=True):
            if near and (far or not back_answers):
                found[name] = 0, near
            elif far and self.front.peek(name, len(far.layout.layers) - 1) is not None:
                # Its last layer is there: some selectors never read the first ones.
                found[name] = 0, self._named(0, replace(far, tier=self.front.tier_names[0]))
            elif far:
                found[name] = 1, self._named(1, far)
        return self._entries(names, found)

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """Blocks that are not in memory are read from the back in one call. In two if the front would keep records as
        they are, without a copy, and not all of them: what it keeps is never in `memory`, which is somebody else's."""
        found: dict[BlockName, list[torch.Tensor] | BlockLostError] = {}
        for name in dict.fromkeys(names):
            records = list[torch.Tensor]()  # kept from here on: the front may evict them at any time
            for layer in layers:
                if (record := self.front.peek(name, layer, heads)) is None:
                    break
                records.append(record)
            else:
                found[name] = records
        far = [name for name in dict.fromkeys(names) if name not in found]
        with self._lock:
            entries = {name: self._found[name][1] if name in self._found else None for name in far}
        kept, passing = list[BlockName](), list[BlockName]()
        for name, entry in entries.items():
            may_keep = heads_key(name, heads) is not None and self.front.max_bytes > 0
            if entry is not None and entry.layout.block_bytes(len(entry.token_ids)) <= self.front.max_bytes:
                may_keep = True
            (kept if may_keep and not self.front.residence.copies else passing).append(name)
        for part, where in ((passing, memory), (kept, None)):
            for name, read in zip(part, self.back.read_layers(part, layers, heads, where) if part else [], strict=True):
                found[name] = read
                for layer, record in zip(layers, read, strict=True) if isinstance(read, list) else ():
                    if self.front.residence.copies or where is None:
                        self.front.offer(name, entries[name], layer, heads, record)
        return [found[name] for name in names]

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """To the back first, which decides whether it succeeds."""
        new = self.back.write_all(blocks)
        for block in blocks if self._keeps_written else ():
            if sum(record.nbytes for record in block.records) <= self.front.max_bytes:
                with contextlib.suppress(StoreFullError):  # the back has it
                    self.front.write(block)
        return new

    def delete(self, name: BlockName) -> bool:
        self.front.delete(name)
        return super().delete(name)

    def stats(self) -> StoreStats:
        """The back's state; hits and misses of both together."""
        front, back = self.front.stats(), self.back.stats()
        return replace(back, tier="tiered", hits=self._finds.hits, misses=self._finds.misses, tiers=(front, back))

    def drop_copies(self) -> None:
        """Empties the front."""
        self.front.prune(0)
        super().drop_copies()

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        """Both; the bytes freed in the back."""
        self.front.prune(max_bytes)
        return self.back.prune(max_bytes, progress)


class CascadeStore(CombinedStore):
    """Stores in order, nearest first: reads fall through to farther stores, and blocks read there are copied nearer.

        find, read    near ── not held, lost or unreachable ──> farther ──> farthest
        promotion     near <── on a thread, once a request has read the block's last layer
        write         near at once; farther and farthest on threads of their own

    A store that fails loses only the blocks that no other store holds. Each store keeps its own bound and evicts by
    itself.

    `stores`: nearest first; every block is written to all of them. Raises `InvalidInputError`: fewer than two.
    """

    def __init__(self, stores: Sequence[KVStore]) -> None:
        if len(stores) < 2:
            raise InvalidInputError(f"a cascade needs two stores at least, got {len(stores)}")
        super().__init__(stores, stores, most_found=65_536)
        self._writers = [WriteBehind(store) for store in self.members]
        self._gathered: OrderedDict[BlockName, dict[int, torch.Tensor]] = OrderedDict()  # records by layer
        self._gathered_bytes = 0

    def _ask(
        self, call: Callable[[KVStore], T], members: Sequence[KVStore] | None = None, *, needs_all: bool = False
    ) -> list[T]:
        """The answers of the members that do not fail. Raises the last one's `StoreError` if all do, or if all are
        needed; each is asked before."""
        answers, failed = list[T](), None
        for member in self.members if members is None else members:
            try:
                answers.append(call(member))
            except StoreError as error:
                failed = error
        if failed is not None:
            if needs_all or not answers:
                raise failed
            logger.warning("a store of the cascade failed: %s", failed)
        return answers

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """Each store is asked for the blocks that no nearer one holds."""
        found: dict[BlockName, tuple[int, BlockEntry]] = {}
        for number, store in enumerate(self.members):
            wanted = [name for name in dict.fromkeys(names) if name not in found]
            for name, entry in zip(wanted, store.find(wanted) if wanted else [], strict=True):
                if entry is not None:
                    found[name] = (number, self._named(number, entry))
        return self._entries(names, found)

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """Blocks that one store lost are read from the next."""
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
            for name, records in zip(wanted, found, strict=True) if is_kept else ():
                if isinstance(records, list):
                    self._gather(number, layers, name, records)
        return [read[name] for name in names]

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """To the nearest store at once, to the others later."""
        for block in blocks:
            check_block(block)
        for writer in self._writers[1:]:
            writer.submit_all(blocks)
        return self.members[0].write_all(blocks)

    def delete(self, name: BlockName) -> bool:
        with self._lock:
            self._found.pop(name, None)
            self._drop(self._gathered.pop(name, {}))
        waited = [writer.withdraw(name) for writer in self._writers]
        return super().delete(name) or any(waited)

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """Behind the blocks that wait: before them it would list an empty chunk, and these may go at any time
        (`EmptyChunks`)."""
        now = []
        for member, writer in zip(self.members, self._writers, strict=True):
            put = partial(member.put_manifest, manifest)
            if not writer.is_waiting(manifest.block_names) or not writer.submit_made(
                _manifest_key(manifest.chunk_id), put
            ):
                now.append(member)
        if now:
            self._ask(lambda member: member.put_manifest(manifest), now)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        waited = [writer.withdraw(_manifest_key(chunk_id)) for writer in self._writers]
        return super().delete_manifest(chunk_id) or any(waited)

    def _gather(self, number: int, layers: range, name: BlockName, records: list[torch.Tensor]) -> None:
        """Keeps a block's records that a farther store gave; those of its last layer start its copy to nearer ones."""
        with self._lock:
            where = self._found.get(name)
            if where is None:
                return
            parts = self._gathered.setdefault(name, {})
            for layer, record in zip(layers, records, strict=True):
                self._gathered_bytes += record.nbytes - (parts[layer].nbytes if layer in parts else 0)
                parts[layer] = record
            entry = where[1]
            whole = self._gathered.pop(name) if layers.stop == len(entry.layout.layers) else {}
            self._drop(whole)
            while self._gathered_bytes > _MOST_GATHERED_BYTES and self._gathered:
                self._drop(self._gathered.popitem(last=False)[1])

        def make() -> Block | None:  # layers that were not gathered are read when it is due
            with self._lock:
                if name not in self._found:  # deleted since
                    return None
            layers, store = range(len(entry.layout.layers)), self.members[number]
            try:
                copied = [whole[layer] if layer in whole else store.read(name, layer) for layer in layers]
            except BlockLostError:
                return None
            return Block(name, entry.parent, entry.token_ids, copied, entry.layout)

        for writer in self._writers[:number] if whole else ():
            writer.submit_made(name, make, entry.layout.block_bytes(len(entry.token_ids)), is_copy=True)

    def _drop(self, parts: Mapping[int, torch.Tensor]) -> None:
        """These records are no longer gathered. The caller holds the lock."""
        self._gathered_bytes -= sum(part.nbytes for part in parts.values())

    def stats(self) -> StoreStats:
        """State of the farthest store that answers; hits and misses of all together."""

        def renamed(store: KVStore) -> StoreStats:
            stats = store.stats()
            return replace(stats, tier=self._names[self.members.index(store)].get(stats.tier, stats.tier))

        parts = tuple(self._ask(renamed))
        return replace(parts[-1], tier="tiered", hits=self._finds.hits, misses=self._finds.misses, tiers=parts)

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        """Each store to `max_bytes`, behind the writes that wait, which would else come after it; the bytes freed in
        the farthest one."""
        self.flush()
        return self._ask(lambda store: store.prune(max_bytes, progress), needs_all=True)[-1]

    def flush(self, timeout_s: float | None = None) -> bool:
        left = time_left(timeout_s)
        done = [writer.flush(left()) for writer in self._writers]
        return all(done)

    @property
    def writing_s(self) -> float:
        return max(writer.writing_s for writer in self._writers)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        super().close()


def _manifest_key(chunk_id: BlockName) -> BlockName:
    """Under which a manifest waits among blocks; no block has such a name."""
    return BlockName(b"manifest:" + chunk_id)
