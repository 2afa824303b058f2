"""The question's own words in what stands before it, by token ids: a word that stands there once tells more than "the".

Beside the question's attention, which cannot find what loaded KV does not know: computed alone, a passage that begins
"He took the boot." knows no owner of the boot, and the question may look past it.
"""

import numpy as np
import numpy.typing as npt

from cacheblend.core.naming import TokenIds


def shared_words(token_ids: TokenIds, question: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """How much each token tells of the question.

    Args:
        token_ids: [tokens] of the prompt.
        question: positions of the question's tokens, ascending, at least one.

    Returns:
        [tokens]: 1 / (how often the token stands in front of the question) where the question has it too; 0 elsewhere,
        and from the question's first position on.
    """
    front = token_ids[: question[0]]
    ids, place, count = np.unique(front, return_inverse=True, return_counts=True)
    telling = np.where(np.isin(ids, token_ids[question]), 1 / np.maximum(count, 1), 0)
    told = np.zeros(len(token_ids), dtype=np.float32)
    told[: len(front)] = telling[place] if len(front) else 0
    return told
