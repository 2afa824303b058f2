"""Cues for selectors from token ids alone: where sentences begin, and which words a prompt shares with its question.
The engine says which token ids end a sentence."""

import numpy as np
import numpy.typing as npt

from cacheblend.core.names import TokenIds
from cacheblend.core.plan.prompt import Prompt

LONGEST_SENTENCE = 64  # tokens: text without full stops (tables, code, Thai) would be one sentence otherwise


def sentence_indices(prompt: Prompt, end_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The sentence that each token of a prompt belongs to.

        tokens    | The fox . Who ? ! | It is here | ...
        ends      |         *     * * |            |
        sentence  |  0   0  0  1  1 1 |  2  2   2  | 3

    A run of ending tokens ends one sentence. No sentence spans two segments or has more than `LONGEST_SENTENCE`
    tokens. Returns [len(prompt)] int64, from 0, ascending without gaps.
    """
    at = np.arange(len(prompt))
    ends = np.isin(prompt.token_ids, end_ids)
    begins = np.zeros(len(prompt), dtype=bool)
    begins[1:] = ends[:-1] & ~ends[1:]
    begins[np.cumsum([0, *(len(segment) for segment in prompt.segments[:-1])])] = True
    start = np.maximum.accumulate(np.where(begins, at, 0))
    begins |= (at - start) % LONGEST_SENTENCE == 0
    indices: npt.NDArray[np.int64] = np.cumsum(begins, dtype=np.int64) - 1
    return indices


def rare_words(token_ids: TokenIds, asking: npt.NDArray[np.int64], stop: int) -> npt.NDArray[np.float32]:
    """Weight of each token as a rare word of the question, or of a span in front of it; `asking`: positions of the one
    or the other, `stop`: the question's first. [tokens] fp32: 1 / (occurrences of the token in front of `stop`, outside
    of `asking`) where `asking` contains the token, too; 0 elsewhere, at `asking` itself and from `stop` on."""
    places = np.setdiff1d(np.arange(stop), asking, assume_unique=True)
    ids, place, count = np.unique(token_ids[places], return_inverse=True, return_counts=True)
    weight_of_id = np.where(np.isin(ids, token_ids[asking]), 1 / np.maximum(count, 1), 0)
    weights = np.zeros(len(token_ids), dtype=np.float32)
    weights[places] = weight_of_id[place] if len(places) else 0
    return weights
