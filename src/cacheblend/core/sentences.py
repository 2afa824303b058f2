"""Where sentences begin in a prompt. Knows token ids only: which of them end a sentence, an engine has to say."""

import numpy as np
import numpy.typing as npt

from cacheblend.core.prompt import Prompt

LONGEST = 64  # tokens: text without full stops (tables, code, Thai) would be one sentence otherwise


def sentence_indices(prompt: Prompt, end_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """For every token, which sentence of the prompt it belongs to.

        tokens    | The fox . Who ? ! | It is here | ...
        ends      |         *     * * |            |
        sentence  |  0   0  0  1  1 1 |  2  2   2  | 3

    A run of ending tokens ends one sentence; no sentence spans two segments; none is longer than `LONGEST` tokens.

    Args:
        prompt: its tokens.
        end_ids: [n] ids of the tokens that end a sentence.

    Returns:
        [len(prompt)] int64, from 0, ascending without gaps.
    """
    at = np.arange(len(prompt))
    ends = np.isin(prompt.token_ids, end_ids)
    begins = np.zeros(len(prompt), dtype=bool)
    begins[1:] = ends[:-1] & ~ends[1:]
    begins[np.cumsum([0, *(len(segment) for segment in prompt.segments[:-1])])] = True
    start = np.maximum.accumulate(np.where(begins, at, 0))
    begins |= (at - start) % LONGEST == 0
    indices: npt.NDArray[np.int64] = np.cumsum(begins, dtype=np.int64) - 1
    return indices
