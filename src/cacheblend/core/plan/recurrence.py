"""Recurring text: learns runs of token ids that recur across requests, at any position, without markers.

    request 1   A B C          nothing is known
    request 2   x B D A        B and A stand in request 1: both are learnt, cut where the requests differ
    request 3   y A B          both are seen again
    request 4   z B' D         only B' of B recurs: B is split into B' and its rest

Candidates come from fingerprints: of the hashes of all windows of `WINDOW` tokens only the smallest of each `span`
neighbours is kept (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD 2003). Two texts that share a run of
`WINDOW + span - 1` tokens keep an equal hash inside it, wherever the run stands; about 2 of `span + 1` hashes are kept.
A candidate is extended in both directions by comparing ids, so that a run is maximal. What two requests begin with is
left to the exact prefix. Nothing is learnt across roots: a root stands for model, tenant and salt.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, TokenIds, block_name, equal_length
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import SHORTEST, WINDOW, ChunkIndex, equal_around, repeats, window_hashes

HALF_LIFE = 1000  # requests after which a sighting counts half
MOST_PLACES = 16  # places of a hash that are looked at, the newest ones: a hash of more texts identifies none of them
MOST_COPIES = 4  # equal windows of one text that are kept
_MERGE_FROM = 8192  # new fingerprints that a dictionary holds before they are sorted in
_OFFSET_BITS = 32

Places = npt.NDArray[np.int64]  # places in texts: the text's number times 2 ** 32, plus the position in it
Interval = tuple[int, int]  # [start, stop) of a prompt's tokens


@dataclass(eq=False)
class Run:
    """A text that recurs."""

    name: BlockName  # its identity: a hash of root and ids
    root: BlockName  # model, tenant and salt that it was seen under
    token_ids: TokenIds
    sightings: int = 0  # requests that had it, or the run that it was split from; at least two
    seen_at: int = 0  # number of the last request that had it
    weight: float = 0.0  # its sightings, decayed, at `seen_at`
    part_of: BlockName | None = None  # name of the run that it was split from

    def __len__(self) -> int:
        return len(self.token_ids)

    def see(self, at: int, times: int = 1) -> None:
        self.weight = self.decayed(at) + times
        self.sightings += times
        self.seen_at = at

    def decayed(self, at: int) -> float:
        """Sightings, each worth half of what it was `HALF_LIFE` requests ago."""
        return float(self.weight * 0.5 ** ((at - self.seen_at) / HALF_LIFE))

    def worth(self, at: int) -> float:
        """Expected tokens saved by storing it, up to a factor: decayed sightings x tokens."""
        return self.decayed(at) * len(self)


@dataclass(frozen=True)
class Learnt:
    """What one request taught."""

    new: Sequence[Run] = ()  # runs that were seen for the second time, those of split runs among them
    seen: Sequence[Run] = ()  # runs that were known
    split: Sequence[Run] = ()  # runs that were replaced by the parts that they were split into
    forgotten: Sequence[Run] = ()  # runs that were dropped because there were too many


@dataclass(eq=False)
class _KnownText:
    """The runs of one root."""

    index: ChunkIndex
    runs: dict[BlockName, Run] = field(default_factory=dict)


class Recurrences:
    """Watches requests of any roots, and learns what recurs; shorter runs than `min_run_tokens` are not learnt. Not
    thread-safe. `watch_tokens`: ids of recent prompts that are kept (4 bytes each), and at most as many of learnt runs;
    the least recently useful go first. A longer prompt is not watched. Raises `InvalidInputError`: `min_run_tokens` is
    below `chunk_matches.SHORTEST`, or `watch_tokens` below `min_run_tokens`."""

    def __init__(self, min_run_tokens: int = 64, watch_tokens: int = 16 * 1024 * 1024) -> None:
        if min_run_tokens < SHORTEST:
            raise InvalidInputError(
                f"recurring runs of at least {SHORTEST} tokens can be found, got min_run_tokens={min_run_tokens}"
            )
        if watch_tokens < min_run_tokens:
            raise InvalidInputError(
                f"watch_tokens={watch_tokens} holds no run of min_run_tokens={min_run_tokens}; "
                "use a larger one, or turn discovery off"
            )
        self._shortest, self._budget = min_run_tokens, watch_tokens
        self._span = min_run_tokens - WINDOW + 1
        self._watched = OrderedDict[int, tuple[BlockName, TokenIds]]()  # by number; the least recently useful first
        self._fingerprints = Fingerprints()
        self._known: dict[BlockName, _KnownText] = {}
        self._known_tokens = 0
        self.watched_tokens = self.number = 0  # ids of prompts that are kept; requests seen so far

    @property
    def runs(self) -> list[Run]:  # all learnt runs
        return [run for known in self._known.values() for run in known.runs.values()]

    def see(self, root: BlockName, token_ids: TokenIds, chunks: Iterable[Interval] = ()) -> Learnt:
        """Learns from a request; nothing is learnt inside `chunks`, intervals that are already chunks."""
        self.number += 1
        known = self._known.setdefault(root, _KnownText(ChunkIndex(self._shortest)))
        seen, new, split, covered = self._recognise(known, token_ids)
        hashes, at = winnowed(token_ids, root, self._span)
        taken = sorted([*covered, *chunks])
        is_free = is_outside(at, WINDOW, taken)
        found = self._recurring(root, token_ids, hashes[is_free], at[is_free])
        for start, stop in pieces_of(found, taken, self._shortest):
            run = self._learn(known, root, token_ids[start:stop], sightings=2)
            if run is not None:
                new.append(run)
        kept = (run for run in new if run.name in known.runs)
        known.index.add(ChunkManifest(run.name, root, run.token_ids[:0], run.token_ids, (run.name,)) for run in kept)
        self._watch(root, token_ids, hashes, at)
        if not known.runs:
            del self._known[root]
        forgotten = []
        if self._known_tokens > self._budget:  # the least valuable runs go, a quarter at once, so that it is rare
            for run in sorted(self.runs, key=lambda run: run.worth(self.number)):
                if self._known_tokens <= self._budget * 3 // 4:
                    break
                self._drop(self._known[run.root], run)
                forgotten.append(run)
            self._known = {root: known for root, known in self._known.items() if known.runs}
        return Learnt(new, seen, split, forgotten)

    def forget(self) -> None:
        """Forgets all that was seen, and learnt."""
        self._watched.clear()
        self._known.clear()
        self._fingerprints = Fingerprints()
        self.watched_tokens = self._known_tokens = 0

    def _recognise(
        self, known: _KnownText, token_ids: TokenIds
    ) -> tuple[list[Run], list[Run], list[Run], list[Interval]]:
        """(runs seen again, those that came of splitting, those that were split, what all of them cover)."""
        seen, new, split, covered = dict[BlockName, Run](), list[Run](), list[Run](), list[Interval]()
        for match in known.index.match(token_ids):
            covered.append((match.start, match.stop))
            run = known.runs.get(match.chunk.chunk_id)
            if run is None:  # split by an earlier match of this request
                continue
            ends, shortest = (match.offset, match.offset + len(match)), self._shortest
            cuts = [cut for cut in ends if shortest <= cut <= len(run) - shortest]
            if not cuts:
                seen[run.name] = run
                continue
            split.append(run)
            self._drop(known, run)
            for start, stop in zip([0, *cuts], [*cuts, len(run)], strict=True):
                part = self._learn(known, run.root, run.token_ids[start:stop], run.sightings)
                if part is not None:
                    part.part_of = run.name
                    new.append(part)
        for run in seen.values():
            run.see(self.number)
        return list(seen.values()), new, split, covered

    def _learn(self, known: _KnownText, root: BlockName, token_ids: TokenIds, sightings: int) -> Run | None:
        """A new run; None if it is known, and then it is seen once more."""
        name = block_name(root, token_ids)
        if name in known.runs:
            known.runs[name].see(self.number)
            return None
        run = Run(name, root, token_ids.copy())
        run.see(self.number, sightings)
        known.runs[name] = run
        self._known_tokens += len(run)
        return run

    def _drop(self, known: _KnownText, run: Run) -> None:
        del known.runs[run.name]
        known.index.remove([run.name])
        self._known_tokens -= len(run)

    def _recurring(
        self, root: BlockName, token_ids: TokenIds, hashes: npt.NDArray[np.uint64], at: npt.NDArray[np.int64]
    ) -> list[Interval]:
        """The maximal runs that a watched prompt contains as well, without the beginning that both share."""
        found: set[Interval] = set()
        beginnings: dict[int, int] = {}  # tokens that a prompt begins with as this one does
        stops: dict[tuple[int, int], int] = {}  # by prompt and shift against it: compared up to here
        for index, number, place in self._fingerprints.find(hashes):
            here, (seen_under, text) = int(at[index]), self._watched.get(number, (None, token_ids))
            if seen_under != root or here < stops.get((number, here - place), 0):
                continue
            start, stop = equal_around(token_ids, here, text, place)
            stops[number, here - place] = max(stop, here + 1)
            if stop - start < self._shortest:
                continue
            self._watched.move_to_end(number)
            if number not in beginnings:
                beginnings[number] = equal_length(token_ids, text)
            start = max(start, beginnings[number])  # also a text that repeats itself in there is an exact prefix
            if stop - start >= self._shortest:
                found.add((start, stop))
        return sorted(found)

    def _watch(
        self, root: BlockName, token_ids: TokenIds, hashes: npt.NDArray[np.uint64], at: npt.NDArray[np.int64]
    ) -> None:
        if not len(hashes) or len(token_ids) > self._budget:
            return
        self._watched[self.number] = root, token_ids.astype("<u4")
        self.watched_tokens += len(token_ids)
        self._fingerprints.add(self.number, hashes, at)
        while self.watched_tokens > self._budget:
            _, (_, oldest) = self._watched.popitem(last=False)
            self.watched_tokens -= len(oldest)
        if self._fingerprints.needs_tidying():
            self._fingerprints.tidy(self._watched.keys())


# ---- fingerprints -------------------------------------------------------------------------------------------


def winnowed(token_ids: TokenIds, root: BlockName, span: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The fingerprints of a text: ([n] hashes, [n] positions of their windows, ascending), of `span` neighbours one.
    None for a text shorter than ``WINDOW + span - 1``. Of equal windows only the first `MOST_COPIES`: a text that
    repeats itself, on purpose even, has few. Texts of different roots share none, but by chance."""
    hashes = window_hashes(token_ids) ^ np.uint64(int.from_bytes(root[:8], "little"))
    if len(hashes) < span:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    # A sum of neighbouring ids is a poor order: mixed, so that the smallest is as good as drawn.
    mixed = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    smallest = np.lib.stride_tricks.sliding_window_view(mixed, span).argmin(axis=1)
    at = np.unique(smallest + np.arange(len(smallest)))
    at = at[repeats(hashes[at]) < MOST_COPIES]
    return hashes[at], at


class Fingerprints:
    """Places by hash, of texts with ascending numbers. Not thread-safe. Newer places come first in answers. Those of
    forgotten texts are dropped when new ones are sorted in; until then they are answered."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, np.uint64)  # ascending; of equal ones the older place first
        self._places: Places = np.empty(0, np.int64)
        self._new: dict[int, list[int]] = {}
        self._count = 0  # of those in _new

    def __len__(self) -> int:
        return len(self._hashes) + self._count

    def add(self, number: int, hashes: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> None:
        """Adds a text's fingerprints; `number` is above that of all texts before."""
        for value, at in zip(hashes.tolist(), positions.tolist(), strict=True):
            self._new.setdefault(value, []).append((number << _OFFSET_BITS) | at)
        self._count += len(hashes)

    def find(self, hashes: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
        """(index in `hashes`, number of the text, position in it) of equal hashes, newest first for each."""
        order = np.argsort(hashes)  # sorted ones are found several times sooner: neighbours share memory
        low, high = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        low[order] = np.searchsorted(self._hashes, hashes[order], side="left")
        high[order] = np.searchsorted(self._hashes, hashes[order], side="right")
        known = zip(hashes.tolist(), low.tolist(), high.tolist(), strict=True)
        for index, (value, first, beyond) in enumerate(known):
            old = self._places[max(first, beyond - MOST_PLACES) : beyond].tolist()
            for place in [*old, *self._new.get(value, ())][: -MOST_PLACES - 1 : -1]:
                yield index, place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)

    def needs_tidying(self) -> bool:
        """So many fingerprints are new that they should be sorted in."""
        return self._count >= max(_MERGE_FROM, len(self._hashes) // 16)

    def tidy(self, held: Collection[int]) -> None:
        """Sorts new fingerprints in, and drops those of texts that are not `held` (numbers)."""
        alive = np.zeros(max(held, default=-1) + 2, bool)  # the last one: those above all that are held
        alive[list(held)] = True
        counts = [len(places) for places in self._new.values()]
        hashes = np.repeat(np.fromiter(self._new, np.uint64, len(self._new)), counts)
        places = np.fromiter((place for places in self._new.values() for place in places), np.int64, len(hashes))
        order = np.argsort(hashes, kind="stable")  # places of one hash keep their order, and are above all older ones
        hashes, places = hashes[order], places[order]
        at = np.searchsorted(self._hashes, hashes, side="right")
        hashes, places = np.insert(self._hashes, at, hashes), np.insert(self._places, at, places)
        kept = alive[np.minimum(places >> _OFFSET_BITS, len(alive) - 1)]
        self._hashes, self._places, self._new, self._count = hashes[kept], places[kept], {}, 0


# ---- intervals ----------------------------------------------------------------------------------------------


def pieces_of(found: Sequence[Interval], taken: Sequence[Interval], shortest: int) -> list[Interval]:
    """What the found intervals cover and the taken ones do not, cut where a found one begins or ends. Each piece lies
    within a found interval, and the taken ones ascend. A piece shorter than `shortest` is joined to its neighbour if
    one found interval has both; else it is left out."""
    ascending = sorted(found)
    starts, stops = [start for start, _ in ascending], list(accumulate((stop for _, stop in ascending), max))
    edges = sorted({edge for interval in found for edge in interval})
    pieces: list[Interval] = []
    covered = np.zeros(stops[-1] + 1 if stops else 0, bool)
    for start, stop in ascending:
        covered[start:stop] = True
    for start, stop in taken:
        covered[start:stop] = False
    for start, stop in np.flatnonzero(np.diff(covered, prepend=False)).reshape(-1, 2).tolist():
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        for first, beyond in pairwise([start, *inner, stop]):
            last = pieces[-1] if pieces else (0, -1)
            is_short = min(last[1] - last[0], beyond - first) < shortest
            if last[1] == first and is_short and stops[bisect_right(starts, last[0]) - 1] >= beyond:
                pieces[-1] = (last[0], beyond)
            else:
                pieces.append((first, beyond))
    return [(start, stop) for start, stop in pieces if stop - start >= shortest]


def is_outside(at: npt.NDArray[np.int64], width: int, taken: Sequence[Interval]) -> npt.NDArray[np.bool_]:
    """[n] whether windows that begin at [n] places reach beyond each interval."""
    inside = np.zeros(len(at), bool)
    for start, stop in taken:
        inside |= (at >= start) & (at + width <= stop)
    return ~inside
