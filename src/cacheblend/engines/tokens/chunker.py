"""Cuts a document's tokens into chunks at places that its content chooses, so that an edit moves few of them.

A cut depends on the tokens in front of it: of all sentence ends in a piece that is too long, the one of lowest hash is
cut at, then both halves in the same way. A sentence that is inserted, replaced or removed changes the hashes near it
alone, so the cuts elsewhere stay, and so do the chunks between them:

    before   |  chunk A  |  chunk B  |  chunk C  |
    after    |  chunk A  |  chunk B' , edited  |  chunk C  |
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError, check_fields
from cacheblend.core.names import TokenIds

WINDOW = 8  # tokens in front of a cut that its hash covers
STOPS = tuple(".?!\n\r\u3002\uff0e\uff61\uff1f\uff01\u2026\u061f\u06d4\u0964")  # including CJK, Arabic, Urdu and Hindi
AFTER_A_STOP = " \t\"'\u201d\u2019\u00bb\u300d\u300f)]*_"  # may follow a stop inside its token

_HASHED_AT_ONCE = 1 << 18  # tokens: what is computed in between takes 32 bytes for each of them
_DEEPEST = 64  # halvings, after which a cut is made near the middle: ids that are sorted by their hashes
_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Cutting:
    """How documents are cut. Two documents that are cut alike share the chunks of what they have in common. Raises
    `InvalidInputError`: one is no whole number, `most` is not at least twice `least`, or `least` is below 1."""

    most: int = 512  # tokens of a chunk, at most
    least: int = 64  # tokens of a chunk of a longer document, at least

    def __post_init__(self) -> None:
        check_fields(self)
        if self.least < 1 or self.most < 2 * self.least:
            raise InvalidInputError(
                f"chunks of {self.least} to {self.most} tokens: at least 1 to 2 are needed, and the most has to be "
                "twice the least, so that a longer piece can always be cut in two"
            )

    def cut(self, ids: TokenIds, sentence_end_ids: npt.NDArray[Any] | None = None) -> list[TokenIds]:
        """The chunks of a document, in order: all of its tokens. Takes time by the tokens times the halvings. Without
        ids of sentence ends, [n], and where none is in reach, it is cut at any token."""
        if len(ids) <= self.most:
            return [ids] if len(ids) else []
        hashes = _hashes(ids)
        is_end = np.zeros(len(ids), bool) if sentence_end_ids is None else np.isin(ids, sentence_end_ids)
        ends = np.flatnonzero(is_end) + 1  # a cut at p is in front of token p
        pieces: list[TokenIds] = []
        waiting = [(0, len(ids), 0)]
        while waiting:
            start, stop, depth = waiting.pop()
            if stop - start <= self.most:
                pieces.append(ids[start:stop])
                continue
            at = self._place(start, stop, ends, hashes, depth)
            waiting += [(at, stop, depth + 1), (start, at, depth + 1)]
        return pieces

    def _place(
        self, start: int, stop: int, ends: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], depth: int
    ) -> int:
        """Where a piece is cut: the allowed place of lowest hash; of equal ones, the nearest to the middle."""
        first, last = start + self.least, stop - self.least
        inside = ends[np.searchsorted(ends, first) : np.searchsorted(ends, last, side="right")]
        places = inside if len(inside) else np.arange(first, last + 1)
        if depth < _DEEPEST:
            found = hashes[places - 1]
            places = places[found == found.min()]
        return int(places[np.abs(places - (start + stop) // 2).argmin()])


def _hashes(ids: TokenIds) -> npt.NDArray[np.uint64]:
    """A hash of the last `WINDOW` tokens up to each one, [tokens]; the same on every machine."""
    hashes = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), _HASHED_AT_ONCE):
        stop, first = start + _HASHED_AT_ONCE, max(0, start - WINDOW + 1)
        mixed = _scramble(ids[first:stop].astype(np.uint64) + np.uint64(1))
        total = np.zeros(len(mixed), np.uint64)
        for back in range(min(WINDOW, len(mixed))):
            total[back:] += mixed[: len(mixed) - back] * np.uint64(pow(_MIX, back + 1, 1 << 64))
        hashes[start:stop] = _scramble(total)[start - first :]
    return hashes


def _scramble(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: each bit of the number changes half of the bits of the result."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def find_sentence_end_ids(tokenizer: Any) -> npt.NDArray[np.int64]:
    """Ids of all tokens whose text ends a sentence, [n] ascending; no special token does. Takes about a second for a
    vocabulary of 150,000. The tokenizer needs a ``tokenizers`` backend."""
    backend = tokenizer.backend_tokenizer
    ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    texts = backend.decode_batch([[i] for i in ids], skip_special_tokens=True)
    ends = [i for i, text in zip(ids, texts, strict=True) if text.rstrip(AFTER_A_STOP).endswith(STOPS)]
    return np.array(ends, dtype=np.int64)
