"""Text that recurs is stored without being marked; the store's list (`chunk_index`) then finds it in plain text.

    watch     after its first token: what recurs is learnt, in a thread
    take      when there is time: the most valuable run, to be computed alone and stored
    stored    it can be found now

Knows prompts, plans and the list. Does not know how a chunk is computed, or when.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import StoreError
from cacheblend.core.failures import count_failure
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName, join_ids
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Anchor
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.plan.recurrence import Learnt, Recurrences, Run
from cacheblend.engines.chunk_index import ChunkListing
from cacheblend.store import KVStore
from cacheblend.store.documents import DocumentRecord

MOST_WANTED = 1024  # runs that wait to be stored; those of least worth go
MOST_BEHIND = 64  # requests that wait to be watched; further ones are not, and counted
STUCK_S = 10.0
"""Seconds without a watched request after which the rest waits for the next one: a store hangs that is asked to take
something off."""

REFRESH_S = 30.0  # seconds after which the store's list is read again: others may have stored chunks
Asker = TypeVar("Asker")
logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class DiscoveryFigures:
    """What discovery has done since the engine was opened."""

    runs: int = 0  # that were learnt; a part of a run that was split counts anew
    stored_tokens: int = 0  # tokens of the runs that were computed and stored
    hit_tokens: int = 0  # tokens of prompts that were loaded from these
    wasted_tokens: int = 0  # of `stored_tokens`, those of runs that no prompt was given since
    unwatched: int = 0  # requests that came too fast to be watched
    watched_tokens: int = 0  # ids of recent prompts that are kept now


@dataclass
class _Stored:
    manifest: ChunkManifest
    computed: bool  # for this
    runs: set[BlockName]  # that are found in it: the one it was made of, or what that was split into
    is_split: bool = False
    hits: int = 0  # tokens

    @property
    def is_wasted(self) -> bool:
        return self.computed and not self.hits

    def __len__(self) -> int:
        return len(self.manifest.token_ids)


class Discovery(Generic[Asker]):
    """Learns recurring text for one engine. Thread-safe. Raises as `Recurrences`; the caller closes store and
    listing."""

    def __init__(self, store: KVStore, listing: ChunkListing, min_run_tokens: int, watch_tokens: int) -> None:
        self._store, self.listing = store, listing
        self._recurrences = Recurrences(min_run_tokens, watch_tokens)
        self._lock = threading.Lock()  # of everything below; never held while the store is asked
        self._wanted: dict[BlockName, tuple[Run, Asker]] = {}  # with the asker of the last request
        self._stored: dict[BlockName, _Stored] = {}  # by chunk
        self._chunk_of: dict[BlockName, BlockName] = {}  # by run
        self.figures, self._resets = DiscoveryFigures(), 0
        self._pool, self._behind = DaemonPool(1, "cacheblend-discovery"), 0
        self._progress_at = float("-inf")  # when a request had been watched, or the first of those that wait came

    @property
    def has_work(self) -> bool:
        """A request is being watched or a run is wanted; False while the store hangs, so that no idle engine keeps
        stepping."""
        return bool(self._wanted) or (bool(self._behind) and not self.is_stuck)

    @property
    def is_stuck(self) -> bool:
        return bool(self._behind) and time.monotonic() - self._progress_at >= STUCK_S

    def watch(
        self,
        root: BlockName,
        prompt: Prompt,
        plan: BlendPlan | None,
        asker: Asker,
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        """Has a request taken note of, in a thread: its prompt with the chunks that were marked or found, its plan with
        what was loaded, None: nothing was. The asker is kept with the runs that are to be stored because of it; if
        there are such, `wanted` is called, which may use `take`."""
        with self._lock:
            if self._behind >= MOST_BEHIND:
                self._add(unwatched=1)
                return
            if not self._behind:
                self._progress_at = time.monotonic()
            self._behind, resets = self._behind + 1, self._resets
        try:
            self._pool.submit(self._watch, resets, root, prompt, plan, asker, wanted)
        except RuntimeError:  # closed while the request was answered
            with self._lock:
                self._behind -= 1

    def take(self, suits: Callable[[Run], bool] = lambda run: True) -> tuple[Run, Asker] | None:
        """Removes the most valuable wanted run that suits; returns it with the asker of the last request that contained
        it; None: there is none."""
        with self._lock:
            suiting = [run for run, _ in self._wanted.values() if suits(run)]
            best = max(suiting, key=lambda run: run.worth(self._recurrences.number), default=None)
            return None if best is None else self._wanted.pop(best.name)

    def stored(self, run: Run, manifest: ChunkManifest, *, computed: bool = True) -> None:
        """Notes that a run is in the store, computed for it or already there; it is found from now on."""
        with self._lock:
            before = self._stored.get(manifest.chunk_id) or _Stored(manifest, computed, set())
            stored = _Stored(manifest, True, before.runs) if computed else before
            stored.is_split = False
            stored.runs.add(run.name)
            self._stored[manifest.chunk_id], self._chunk_of[run.name] = stored, manifest.chunk_id
            if computed:
                self._add(stored_tokens=len(run), wasted_tokens=len(run))
        self.listing.add([manifest])

    def reset(self) -> None:
        """Forgets everything: the names of all stored chunks have changed. What was asked before is not wanted
        afterwards, since it would be computed with new weights and stored under old names."""
        with self._lock:
            self._wanted, self._stored, self._chunk_of = {}, {}, {}
            self._resets += 1
        with suppress(RuntimeError):  # closed
            self._pool.submit(self._recurrences.forget)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all requests have been watched; False if that took longer than `timeout` seconds."""
        try:
            self._pool.submit(int).exception(timeout)  # behind them in the one thread, whatever was interrupted
        except TimeoutError:
            return False
        except (RuntimeError, CancelledError):  # closed
            pass
        return True

    def close(self) -> None:
        """Ends the thread without waiting; requests not yet watched are discarded."""
        self._pool.close()
        with self._lock:
            self._behind = 0

    def _watch(
        self,
        resets: int,
        root: BlockName,
        prompt: Prompt,
        plan: BlendPlan | None,
        asker: Asker,
        wanted: Callable[[], None],
    ) -> None:
        try:
            stops = list(accumulate(map(len, prompt.segments)))
            segments = zip(prompt.segments, stops, strict=True)
            begun = prompt.begun  # a conversation's earlier prompt again is no text that recurs
            chunks = [(stop - len(segment), stop) for segment, stop in segments if segment.is_chunk]  # marked or found
            chunks = [(0, begun)] * (begun > 0) + chunks
            learnt = self._recurrences.see(root, prompt.token_ids, chunks)
            with self._lock:
                if resets != self._resets:
                    return
                gone = [] if plan is None else self._count_hits(plan)
                gone += self._give_up(learnt)
                forgotten = set(learnt.forgotten)
                self._want([run for run in (*learnt.new, *learnt.seen) if run not in forgotten], asker)
                self._add(runs=len(learnt.new))
                self.figures = replace(self.figures, watched_tokens=self._recurrences.watched_tokens)
                is_any_wanted = bool(self._wanted)
            if is_any_wanted:
                wanted()
            self._delete(gone)
        except Exception:
            logger.warning("a request is not watched for recurring text; its answer is not affected", exc_info=True)
            count_failure("discovery")
        finally:
            with self._lock:
                self._behind, self._progress_at = max(0, self._behind - 1), time.monotonic()

    def _count_hits(self, plan: BlendPlan) -> list[ChunkManifest]:
        """Returns the chunks to be deleted: evicted chunks of runs that were split, which would hide their parts."""
        lost = {name for name, is_held in plan.held_chunks().items() if not is_held and name in self._stored}
        for span in plan.spans:
            name = plan.chunk_ids.get(span.segment)
            stored = None if name is None else self._stored.get(name)
            if stored is not None and span.source in (Source.LOADED, Source.PREFIX):
                self._add(hit_tokens=len(span), wasted_tokens=-len(stored) if stored.is_wasted else 0)
                stored.hits += len(span)
        evicted = [self._forget(name) for name in lost]  # their runs are stored again if they are seen again
        return [each.manifest for each in evicted if each.computed and each.is_split]

    def _want(self, runs: Sequence[Run], asker: Asker) -> None:
        for run in runs:
            if run.name not in self._chunk_of:
                self._wanted[run.name] = run, asker
        if len(self._wanted) > MOST_WANTED:
            worth = sorted(self._wanted.values(), key=lambda each: -each[0].worth(self._recurrences.number))
            self._wanted = {run.name: (run, asker) for run, asker in worth[: MOST_WANTED * 3 // 4]}

    def _give_up(self, learnt: Learnt) -> list[ChunkManifest]:
        """Forgets runs. Of the stored ones, chunks that were used stay and serve the parts that their run was split
        into; the others are returned, to be deleted."""
        gone, parts = [], dict[BlockName, set[BlockName]]()
        for part in learnt.new:
            if part.part_of is not None:
                parts.setdefault(part.part_of, set()).add(part.name)
        for run in (*learnt.split, *learnt.forgotten):
            self._wanted.pop(run.name, None)
            name = self._chunk_of.pop(run.name, None)
            if name is None:
                continue
            stored, found = self._stored[name], parts.get(run.name, set())
            if stored.is_wasted:
                gone.append(self._forget(name).manifest)
                continue
            stored.runs = (stored.runs - {run.name}) | found
            stored.is_split |= run in learnt.split
            self._chunk_of |= dict.fromkeys(found, name)
            if not stored.runs and run not in learnt.split:
                del self._stored[name]  # nothing of it was seen for long
        return gone

    def _forget(self, name: BlockName) -> _Stored:
        stored = self._stored.pop(name)
        for run in stored.runs:
            self._chunk_of.pop(run, None)
        return stored

    def _add(self, **more: int) -> None:
        self.figures = replace(self.figures, **{name: getattr(self.figures, name) + n for name, n in more.items()})

    def _delete(self, chunks: Sequence[ChunkManifest]) -> None:
        """Deletes chunks, so that others keep their place and parts are found elsewhere; pinned chunks and those of a
        document stay."""
        for root in dict.fromkeys(chunk.root for chunk in chunks):
            with self._store.documents.changing(root):
                kept = self._store.pinned() | {
                    name
                    for record in self._store.documents.all(root)
                    if isinstance(record, DocumentRecord)
                    for blocks in record.chunks
                    for name in blocks
                }
                gone = [each for each in chunks if each.root == root and each.chunk_id not in kept]
                self.listing.forget(chunk.chunk_id for chunk in gone)
                with self._lock:
                    kept = kept.union(*(each.manifest.block_names for each in self._stored.values()))
                listed = (self.listing.get(name) for name in self.listing.names(root))  # which may begin alike
                kept = kept.union(*(each.block_names for each in listed if each is not None))
                try:
                    for chunk in gone:
                        self._store.delete_chunk(chunk.block_names, kept)
                except StoreError as error:  # of one of several stores, perhaps; each chunk would wait for it
                    logger.warning("chunks stay in the store, and are listed again: %s", error)


def open_discovery(store: KVStore, config: BlendConfig, anchor: Anchor) -> Discovery[Any] | None:
    """The discovery that learns chunks, with a listing of its own, which finds them in plain text; None unless
    `BlendConfig.discover` asks for it, or if the anchor depends on the prompt, since a run's KV would differ in
    each."""
    if not config.discover or anchor.rule == "system":
        return None
    listing = ChunkListing(store, join_ids(anchor.segments(None)), config.min_run_tokens, REFRESH_S)
    return Discovery(store, listing, config.min_run_tokens, config.watch_tokens)
