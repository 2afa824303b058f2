"""Which tokens tell of the question: those that it shares, the rarer the more."""

import numpy as np
import torch

from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import Candidates
from cacheblend.core.select.text_cues import shared_words


def told(ids: list[int], question: list[int]) -> list[float]:
    return shared_words(np.array(ids, dtype="<u4"), np.array(question)).tolist()


def test_a_shared_word_tells_more_the_rarer_it_is() -> None:
    assert told([5, 6, 5, 7, 8, 5, 6], [5, 6]) == [0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_only_the_rows_that_ask_are_the_question() -> None:
    assert told([5, 6, 7, 6, 5], [3]) == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_a_question_in_front_of_everything_tells_nothing() -> None:
    assert told([5, 5, 6], [0, 1, 2]) == [0.0, 0.0, 0.0]


def test_a_rare_word_brings_its_whole_span() -> None:
    candidates = Candidates(
        positions=torch.arange(8),
        chunk_offsets=torch.arange(8),
        total=8,
        attention=torch.tensor([0.3, 0, 0, 0, 0.1, 0, 0, 0.2]),
        words=torch.tensor([0.0, 0, 0, 0, 0, 1.0, 0, 0.1]),
        segments=torch.zeros(8, dtype=torch.int64),
    )
    assert Query(0.5, pool=4).select(candidates).tolist() == [True] * 4 + [False] * 4
    assert Query(0.5, pool=4, lead=0, words=0.5).select(candidates).tolist() == [False] * 4 + [True] * 4
