"""Fingerprints of watched texts: where a run of token ids may have been seen before.

Of the hashes of all windows of `WINDOW` tokens only the smallest of each `span` neighbours is kept (winnowing:
Schleimer, Wilkerson, Aiken, SIGMOD 2003). Two texts that share a run of `WINDOW + span - 1` tokens keep an equal hash
inside it, wherever the run stands; about 2 of `span + 1` hashes are kept. An equal hash is a candidate: the ids decide.
"""

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.chunk_matches import repeats, window_hashes

MOST_PLACES = 16
"""Places of a hash that are looked at, the newest ones: a hash of more texts identifies none of them."""

MOST_COPIES = 4
"""Equal windows of one text that are kept."""

_MERGE_FROM = 8192  # new fingerprints that a dictionary holds before they are sorted in
_OFFSET_BITS = 32

Places = npt.NDArray[np.int64]
"""Places in texts: the text's number times 2 ** 32, plus the position in it."""


def winnowed(token_ids: TokenIds, root: BlockName, span: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The fingerprints of a text.

    Args:
        token_ids: [tokens].
        root: texts of different roots share no fingerprint, but by chance.
        span: neighbouring windows of which the smallest hash is kept.

    Returns:
        ([n] hashes, [n] positions of their windows, ascending); none for a text shorter than ``WINDOW + span - 1``. Of
        equal windows only the first `MOST_COPIES`: a text that repeats itself, on purpose even, has few.
    """
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
    """Places by hash, of texts with ascending numbers. Not thread-safe.

    Newer places come first in answers. Those of forgotten texts are dropped when new ones are sorted in; until then
    they are answered.
    """

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
        alive = np.zeros(
            max((number for number in held), default=-1) + 2, bool
        )  # the last one: those above all that are held
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
