"""The chunks that a store lists, by tenant and content, kept up to date with a store that others write to.

    refresh    starts a reading in a thread when one is due; never waits
    update     waits until the list has been read; for a newer one only if that is quick
    prepare    has the index of a root made in a thread; never waits
    match      the stored chunks in a prompt of one root; match_now: those that are known by now

A reading changes copies of the indexes, which then replace the old ones, and of which nobody else waits for the making.
Knows stores and manifests. Does not know requests.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from cacheblend.core.errors import StoreUnreachableError
from cacheblend.core.failures import count_failure
from cacheblend.core.load.threads import DaemonPool, standing_aside
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.prompt import Prompt, Segment, run_of, text
from cacheblend.store import KVStore

INDEXES_AT_ONCE = 4  # that are made: a large one takes seconds, and those of other tenants do not wait for it
MOST_INDEXES = 256
"""Tenants whose chunks are indexed at a time; the index of another one is made again when it is needed.
Those without chunks go first, so that any number of tenants who have stored nothing takes nobody's place."""

logger = logging.getLogger("cacheblend.store")


@dataclass
class ListChanges:
    """Chunks that were added to the list and removed from it since the last call."""

    added: list[ChunkManifest] = field(default_factory=list)
    removed: list[ChunkManifest] = field(default_factory=list)


class ChunkListing:
    """An index of a store's chunks for each root. Thread-safe. Chunks with another anchor are ignored (`anchor_ids`
    None: none is compared), and runs shorter than `min_tokens` are not matched. The store's list is read again after
    `refresh_s` seconds; 0: for each request, which waits for it. A look-up waits `fresh_s` at most for a list that is
    due, as long as readings are that quick; otherwise the previous list serves. `keeps_changes`: record changes for
    `take_changes`; `has_read`: the list has been read at least once."""

    def __init__(
        self,
        store: KVStore,
        anchor_ids: TokenIds | None,
        min_tokens: int,
        refresh_s: float,
        *,
        fresh_s: float = 0.1,
        keeps_changes: bool = False,
    ) -> None:
        self._store, self._min_tokens = store, min_tokens
        self._anchor = None if anchor_ids is None else anchor_ids.tolist()
        self._refresh_s, self._fresh_s, self._keeps_changes = refresh_s, fresh_s, keeps_changes
        self._listed: dict[BlockName, ChunkManifest] = {}
        self._indexes: OrderedDict[BlockName, ChunkIndex] = OrderedDict()
        self._changes: deque[tuple[bool, ChunkManifest]] = deque()  # in their order; True: added
        self._stamp: Hashable | None = None
        self.has_read = False
        self._reading_s = 0.0  # what the last reading took
        self._forgotten: set[BlockName] = set()  # since the last reading began
        self._lost: set[BlockName] = set()  # listed, and announced as taken off
        self._by_root: dict[BlockName, dict[BlockName, ChunkManifest]] = {}
        self._ordered: dict[BlockName, list[BlockName]] = {}  # names of a root's chunks, since it has changed
        self._lock = threading.RLock()  # of everything above; for moments, never while the store is asked
        self._applying = threading.RLock()  # of one change at a time, with the making of changed indexes
        self._is_closed = False
        self._pool = DaemonPool(1, "cacheblend-listing")
        self._index_pool = DaemonPool(INDEXES_AT_ONCE, "cacheblend-index")
        self._making: dict[BlockName, Future[ChunkIndex]] = {}
        self._reading: Future[None] | None = None
        self._starting = threading.Lock()  # of one reading, and of one index of a root, at a time
        self._read_at = float("-inf")
        if refresh_s:
            self._start_reading()

    def refresh(self) -> bool:
        """Starts a reading if one is due. True: the list is recent enough; False: call `update` first."""
        if self._refresh_s == 0:
            return False
        with self._starting:
            ended = self._reading if self._reading is not None and self._reading.done() else None
            if ended is not None:
                self._reading = None
            if self._reading is None and time.monotonic() - self._read_at >= self._refresh_s:
                self._start_reading()
        if ended is not None and ended.exception() is not None:
            if not isinstance(ended.exception(), StoreUnreachableError):  # which the place's own store has logged
                logger.warning("the store's list of chunks cannot be read: %s", ended.exception())
            count_failure("list of chunks")
        return self.has_read and not self._is_waited_for(self._reading)

    def update(self) -> None:
        """Returns once the list has been read: at least once, or after this call if `refresh_s` is 0. Waits for a
        reading under way only while readings are quick. Raises `StoreError`."""
        reading = self._reading
        if self._refresh_s == 0 or (reading is None and not self.has_read):
            self._read()
        elif reading is not None and not self.has_read:
            reading.result()
        elif reading is not None and self._is_waited_for(reading):
            done, _ = wait([reading], self._fresh_s)  # its error is logged by the next `refresh`
            if not done:
                self._reading_s = float("inf")

    def match(self, root: BlockName, prompt: Prompt) -> Prompt:
        """Cuts the plain text of a prompt at the chunks of this root that it contains. Raises as the first reading."""
        index = self._index(root)
        with suppress(KeyError):  # it is gone again
            self._indexes.move_to_end(root)  # a single call, so that the scheduler waits for no lock
        return with_matches(prompt, index)

    def match_now(self, root: BlockName, prompt: Prompt) -> Prompt:
        """As `match`, but never waits: chunks of a list that has not been read yet are not found."""
        self.refresh()
        if not self.has_index(root):
            self.prepare(root)
            return prompt
        return self.match(root, prompt)

    def near_misses(self, root: BlockName, plan: BlendPlan) -> int:
        """Tokens of a plan's missed chunks that other listed chunks have, which begin or end otherwise; for people, who
        wonder why nothing was found. Never waits: 0 for a root whose index is not there yet."""
        missed = [span for span in plan.spans if span.source is Source.MISS and span.name not in plan.left_out]
        if not missed:
            return 0
        self.refresh()
        if (index := self._indexes.get(root)) is None:
            self.prepare(root)
            return 0
        tokens = 0
        for number, spans in groupby(missed, attrgetter("segment")):
            token_ids = plan.prompt.segments[number].token_ids
            is_near = np.zeros(len(token_ids), dtype=bool)
            for match in index.match(token_ids):  # but the chunk itself, which may be listed and evicted
                is_near[match.start : match.stop] = match.chunk.chunk_id != plan.chunk_ids.get(number)
            for span in spans:
                tokens += int(is_near[span.chunk_offset :][: len(span)].sum())
        return tokens

    def prepare(self, root: BlockName) -> "Future[ChunkIndex] | None":
        """Has the index of a root made in a thread, once the list has been read; None: it is closed."""
        with self._starting:
            making = self._making.get(root)
            if making is None and not self._is_closed:
                if self._refresh_s and not self.has_read and self._reading is None:
                    self._start_reading()
                first = None if self.has_read else self._reading
                making = self._making[root] = self._index_pool.submit(self._make_index, root, first)
                making.add_done_callback(lambda _: self._making.pop(root, None))
        return making

    @property
    def age_s(self) -> float:
        """Seconds since the reading that is under way began; 0: none is."""
        return 0.0 if self._reading is None else time.monotonic() - self._read_at

    def has_index(self, root: BlockName) -> bool:
        """Whether `match` finds an index ready."""
        return root in self._indexes

    def add(self, chunks: Sequence[ChunkManifest]) -> None:
        """Adds chunks that were stored by this process, before the store's list is read again."""
        with self._applying:
            self._forgotten.difference_update(chunk.chunk_id for chunk in chunks)
            new = [chunk for chunk in chunks if chunk.chunk_id not in self._listed and self._is_wanted(chunk)]
            self._apply(ListChanges(added=new))
            self.observe({chunk.chunk_id: True for chunk in chunks})

    def forget(self, chunk_ids: Iterable[BlockName]) -> None:
        """Removes chunks that were dropped by this process, before the store's list is read again."""
        with self._applying:
            gone = [self._listed[name] for name in dict.fromkeys(chunk_ids) if name in self._listed]
            self._forgotten.update(chunk.chunk_id for chunk in gone)
            self._apply(ListChanges(removed=gone))

    def names(self, root: BlockName) -> Sequence[BlockName]:
        """The ids of a root's known chunks, ordered; takes constant time, unless these have changed."""
        with self._lock:
            if root in self._by_root and root not in self._ordered:
                self._ordered[root] = sorted(self._by_root[root])
            return self._ordered.get(root, ())

    def get(self, chunk_id: BlockName) -> ChunkManifest | None:
        """A known chunk of any root."""
        return self._listed.get(chunk_id)

    def observe(self, held: Mapping[BlockName, bool]) -> None:
        """Reports chunks as removed or back, by whether a look-up found their blocks: evicted chunks stay listed."""
        if not self._keeps_changes:
            return
        with self._lock:
            lost = {name for name, is_held in held.items() if not is_held and name in self._listed} - self._lost
            back = {name for name, is_held in held.items() if is_held and name in self._lost}
            self._lost = (self._lost | lost) - back
            self._note([self._listed[name] for name in back], [self._listed[name] for name in lost])

    def take_changes(self, most: int) -> ListChanges:
        """At most so many changes since the last call; none unless `keeps_changes`. Waits for no lock: one thread calls
        this, and `withdraw`."""
        taken, seen = ListChanges(), set[BlockName]()
        while self._changes and len(seen) < most and self._changes[0][1].chunk_id not in seen:
            is_added, chunk = self._changes.popleft()  # in their order: of a chunk one at a time
            (taken.added if is_added else taken.removed).append(chunk)
            seen.add(chunk.chunk_id)
        return taken

    def withdraw(self) -> None:
        """Reports every chunk as removed: still listed, but no longer found by this engine."""
        with self._lock:
            if self._keeps_changes:
                self._changes = deque(change for change in self._changes if not change[0])
                self._note([], [chunk for name, chunk in self._listed.items() if name not in self._lost])

    def close(self) -> None:
        """Stops reading without waiting; known chunks are still found."""
        with self._starting:
            self._is_closed = True
        self._pool.close()
        self._index_pool.close()

    def _start_reading(self) -> None:
        self._read_at = time.monotonic()
        if not self._is_closed:
            self._reading = self._pool.submit(self._read)

    def _read(self) -> None:
        began, stamp = time.monotonic(), self._store.listing_stamp()
        if stamp is None or stamp != self._stamp:
            self._forgotten.clear()
            before = set(self._listed)  # a chunk added meanwhile may be missing in what is read
            found = {m.chunk_id: m for m in standing_aside(self._store.manifests()) if self._is_wanted(m)}
            with self._applying:
                found = {name: chunk for name, chunk in found.items() if name not in self._forgotten}
                added = [chunk for name, chunk in found.items() if name not in self._listed]
                removed = [chunk for name, chunk in self._listed.items() if name in before and name not in found]
                self._apply(ListChanges(added, removed))
                self._stamp = stamp
            self._reading_s = time.monotonic() - began  # of a list that has changed: asking whether it has is quick
        self.has_read = True

    def _is_waited_for(self, reading: Future[None] | None) -> bool:
        return reading is not None and not reading.done() and self._reading_s <= self._fresh_s

    def _is_wanted(self, chunk: ChunkManifest) -> bool:
        return self._anchor is None or bool(chunk.anchor_ids.tolist() == self._anchor)

    def _apply(self, changes: ListChanges) -> None:
        """The caller holds `_applying`."""
        roots, changed = {chunk.root for chunk in (*changes.added, *changes.removed)}, dict[BlockName, ChunkIndex]()
        for root in roots:
            if (old := self._indexes.get(root)) is None:  # there is none, or another tenant's took its place
                continue
            changed[root] = index = old.copy()
            index.remove(chunk.chunk_id for chunk in changes.removed if chunk.root == root)
            index.add(chunk for chunk in standing_aside(changes.added) if chunk.root == root)
        with self._lock:
            for chunk in changes.removed:
                del self._listed[chunk.chunk_id]
                self._by_root[chunk.root].pop(chunk.chunk_id, None)
            for chunk in changes.added:
                self._listed[chunk.chunk_id] = chunk
                self._by_root.setdefault(chunk.root, {})[chunk.chunk_id] = chunk
            for root in roots:
                self._ordered.pop(root, None)
                if not self._by_root.get(root):  # one of each salt, of which there may be as many as users
                    self._by_root.pop(root, None)
            for root in roots & self._indexes.keys():
                if root in changed:
                    self._indexes[root] = changed[root]
                else:  # made meanwhile, of the list as it was
                    del self._indexes[root]
            if self._keeps_changes:
                self._note(changes.added, [chunk for chunk in changes.removed if chunk.chunk_id not in self._lost])
                self._lost.difference_update(chunk.chunk_id for chunk in changes.removed)

    def _note(self, added: Iterable[ChunkManifest], removed: Iterable[ChunkManifest]) -> None:
        self._changes.extend((False, chunk) for chunk in removed)
        self._changes.extend((True, chunk) for chunk in added)

    def _index(self, root: BlockName) -> ChunkIndex:
        if (index := self._indexes.get(root)) is not None:
            return index
        making = self.prepare(root)
        return self._make_index(root) if making is None else making.result()

    def _make_index(self, root: BlockName, first_reading: Future[None] | None = None) -> ChunkIndex:
        if first_reading is not None:
            first_reading.result()
        if (found := self._indexes.get(root)) is not None:
            return found
        index, known = ChunkIndex(self._min_tokens), dict[BlockName, ChunkManifest]()
        while True:  # until nothing has changed meanwhile
            with self._lock:
                chunks = dict(self._by_root.get(root, {}))
            index.remove(known.keys() - chunks.keys())
            index.add(standing_aside(chunks.values()))
            with self._lock:
                if self._by_root.get(root, {}).keys() == chunks.keys():
                    self._indexes[root] = index
                    while len(self._indexes) > MOST_INDEXES:
                        held = [*self._indexes]  # a single call, see `match`
                        del self._indexes[next((each for each in held if not self._indexes[each]), held[0])]
                    return index
            known = chunks


def with_matches(prompt: Prompt, index: ChunkIndex, start: int = 0, *, moved: bool = False) -> Prompt:
    """The prompt with the runs of its plain text from position `start` on, but not of what its conversation has begun
    with, that the index finds as chunks, or as moved ones; marked chunks stay as they are."""
    segments, position, start = list[Segment](), 0, max(start, prompt.begun)
    for segment in prompt.segments:
        begin, position = max(0, start - position), position + len(segment)
        if segment.is_chunk or begin >= len(segment):
            segments.append(segment)
            continue
        at = 0
        for match in index.match(segment.token_ids[begin:]):
            run = run_of(match.chunk, match.offset, len(match), moved=moved)
            segments += [text(segment.token_ids[at : begin + match.start]), run]
            at = begin + match.stop
        segments.append(text(segment.token_ids[at:]) if at else segment)
    return replace(prompt, segments=Prompt.of(segments, prompt.changed_contents, prompt.front).segments)
