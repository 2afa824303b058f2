"""Content matching: finds stored chunks in a prompt by their token ids, at any position, without any marker.

    chunk A       a0 a1 a2 a3 a4 ... a497 a498 a499
    prompt   t t  b0 b1 a2 a3 a4 ... a497 c0 t t t
    match              [start               stop)          A[offset:] with offset = 2

Next to other text a chunk's first and last tokens may be tokenised differently; only those are not matched. Of a
stored chunk the windows of `WINDOW` tokens at multiples of `WINDOW` are hashed; of a prompt all windows are looked up.
Hits are verified id by id, so a hash collision costs time but never gives a wrong match.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, TokenIds, equal_length
from cacheblend.core.plan.blocks import ChunkManifest

WINDOW = 32
SHORTEST = 2 * WINDOW - 1
"""An equal run of this length contains a hashed window wherever it begins; shorter runs may be missed."""

_MOST_OWNERS = 16  # chunks compared for one window: a text that thousands of chunks share identifies none of them
_MOST_SEEN = 256  # with those that are no longer listed, until the index is made anew
_MOST_REPEATS = 64  # equal windows of a prompt that are looked up: a text of one token would match at every shift
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: 2 ** 64 over the golden ratio


@dataclass(frozen=True, eq=False)
class Match:
    """A run of a prompt that equals a part of a stored chunk."""

    # start, stop: first position in the prompt, and that after the last
    start: int
    stop: int
    chunk: ChunkManifest
    offset: int  # place of the run's first token in the chunk

    def __len__(self) -> int:
        return self.stop - self.start


class ChunkIndex:
    """The chunks of one store and model, by content. Not thread-safe. `min_tokens`: shorter runs are not matched.
    Raises `InvalidInputError`: `min_tokens` is below `SHORTEST`."""

    def __init__(self, min_tokens: int = 64) -> None:
        if min_tokens < SHORTEST:
            raise InvalidInputError(f"runs of at least {SHORTEST} tokens can be matched, got min_tokens={min_tokens}")
        self._min_tokens = min_tokens
        self._chunks: list[ChunkManifest | None] = []  # None: removed
        self._numbers: dict[BlockName, int] = {}
        self._old, self._new = _Windows(), _Windows()

    def __len__(self) -> int:
        return len(self._numbers)

    def copy(self) -> "ChunkIndex":
        """An index of the same chunks that can be changed while this one is used."""
        copied = ChunkIndex(self._min_tokens)
        copied._chunks, copied._numbers = list(self._chunks), dict(self._numbers)
        copied._old, copied._new = self._old, self._new
        return copied

    def add(self, chunks: Iterable[ChunkManifest]) -> None:
        """Adds chunks; known chunks and chunks of fewer than `min_tokens` are ignored."""
        first = len(self._chunks)
        for chunk in chunks:
            if chunk.chunk_id in self._numbers or len(chunk.token_ids) < self._min_tokens:
                continue
            self._numbers[chunk.chunk_id] = len(self._chunks)
            self._chunks.append(chunk)
        added = [chunk.token_ids for chunk in self._chunks[first:] if chunk is not None]
        if not added:
            return
        self._new = _Windows.merged([self._new, _Windows.of(added, first)])
        if len(self._new.hashes) > len(self._old.hashes) // 8:  # merging rarely keeps adding cheap for any number
            self._old, self._new = _Windows.merged([self._old, self._new]), _Windows()

    def remove(self, chunk_ids: Iterable[BlockName]) -> None:
        """Removes chunks; unknown ids are ignored."""
        for chunk_id in chunk_ids:
            number = self._numbers.pop(chunk_id, None)
            if number is not None:
                self._chunks[number] = None
        if len(self._chunks) > 2 * len(self._numbers) + 1024:
            kept = [chunk for chunk in self._chunks if chunk is not None]
            self._chunks, self._numbers, self._old, self._new = [], {}, _Windows(), _Windows()
            self.add(kept)

    def match(self, token_ids: TokenIds) -> list[Match]:
        """The runs of a prompt, or a part of it, that equal parts of stored chunks, ascending, without overlap. Of
        overlapping runs the one that begins first is taken whole, and of several the longest. The rest of another run
        counts if it is long enough."""
        matches: list[Match] = []
        covered = 0
        for start, stop, number, offset in sorted(self._runs(token_ids), key=lambda run: (run[0], -run[1])):
            hidden = max(0, covered - start)
            chunk = self._chunks[number]
            if chunk is not None and stop - start - hidden >= self._min_tokens:
                matches.append(Match(start + hidden, stop, chunk, offset + hidden))
                covered = stop
        return matches

    def _runs(self, token_ids: TokenIds) -> Iterator[tuple[int, int, int, int]]:
        """Maximal equal runs: (start, stop, number of the chunk, offset in it), each once."""
        hashes = window_hashes(token_ids)
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by chunk and position of its first token
        for windows in (self._old, self._new):
            for at, number, offset in windows.find(hashes, self._chunks):
                known = found.setdefault((number, at - offset), [])
                if not any(start <= at < stop for start, stop in known):
                    run = self._run_around(token_ids, at, number, offset)
                    if run is not None:
                        known.append(run)
                        yield run[0], run[1], number, offset - at + run[0]

    def _run_around(self, token_ids: TokenIds, at: int, number: int, offset: int) -> tuple[int, int] | None:
        """The equal run around the window at `at`; None if only the hash is equal."""
        chunk = self._chunks[number]
        if chunk is None:
            return None
        start, stop = equal_around(token_ids, at, chunk.token_ids, offset)
        return (start, stop) if stop - at >= WINDOW else None


@dataclass(frozen=True, eq=False)
class _Windows:
    """Windows of stored chunks, [n] ascending by hash: the chunks' numbers, and places in them."""

    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    offsets: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @staticmethod
    def of(texts: Sequence[TokenIds], first: int) -> "_Windows":
        """Windows at multiples of `WINDOW`; each text has at least one. `first`: number of the first text."""
        lengths = np.array([len(text) for text in texts])
        counts = lengths // WINDOW
        numbers = np.repeat(np.arange(len(texts)), counts)
        offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * WINDOW
        hashes = window_hashes(np.concatenate(texts))[(np.cumsum(lengths) - lengths)[numbers] + offsets]
        return _Windows(hashes, (numbers + first).astype(np.int32), offsets.astype(np.int32))

    @staticmethod
    def merged(parts: "list[_Windows]") -> "_Windows":
        hashes = np.concatenate([part.hashes for part in parts])
        order = np.argsort(hashes, kind="stable")
        numbers = np.concatenate([part.numbers for part in parts])
        return _Windows(hashes[order], numbers[order], np.concatenate([part.offsets for part in parts])[order])

    def find(
        self, hashes: npt.NDArray[np.uint64], chunks: Sequence[ChunkManifest | None]
    ) -> Iterator[tuple[int, int, int]]:
        """(position, chunk, offset) of the windows that are known of `chunks`, by number, ascending by position."""
        first = np.searchsorted(self.hashes, hashes, side="left")
        there = np.flatnonzero(first < len(self.hashes))
        there = there[self.hashes[first[there]] == hashes[there]]
        there = there[repeats(hashes[there]) < _MOST_REPEATS]
        beyond = np.searchsorted(self.hashes, hashes[there], side="right")
        for at, begin, end in zip(there.tolist(), first[there].tolist(), beyond.tolist(), strict=True):
            some = range(begin, min(end, begin + _MOST_SEEN))
            alive = (entry for entry in some if chunks[int(self.numbers[entry])] is not None)
            for entry in islice(alive, _MOST_OWNERS):
                yield at, int(self.numbers[entry]), int(self.offsets[entry])


def equal_around(ours: TokenIds, here: int, theirs: TokenIds, place: int) -> tuple[int, int]:
    """The maximal equal run around ``ours[here]`` and ``theirs[place]``, in ours; empty if these two differ."""
    back = equal_length(ours[:here][::-1], theirs[:place][::-1])
    return here - back, here + equal_length(ours[here:], theirs[place:])


def window_hashes(token_ids: TokenIds) -> npt.NDArray[np.uint64]:
    """[tokens - WINDOW + 1] hash of the window that begins at each token; empty for a text shorter than a window. hash
    = sum of ids[j] * M ** (WINDOW - 1 - j), modulo 2 ** 64; computed by doubling the width: the hash of a window is
    that of its two halves."""
    if len(token_ids) < WINDOW:
        return np.empty(0, dtype=np.uint64)
    hashes = token_ids.astype(np.uint64) + np.uint64(1)
    power, width = _MULTIPLIER, 1
    with np.errstate(over="ignore"):  # the modulus
        while width < WINDOW:
            hashes = hashes[: len(hashes) - width] * power + hashes[width:]
            power, width = power * power, 2 * width
    return hashes


def repeats(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """[n] how many equal ones stand in front of each."""
    order = np.argsort(hashes, kind="stable")
    is_first = np.concatenate([[True], hashes[order][1:] != hashes[order][:-1]])[: len(order)]
    counted = np.arange(len(order)) - np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    found = np.empty(len(order), np.int64)
    found[order] = counted
    return found
