"""Cues from token ids: where sentences begin, and the question's words, of which rarer ones weigh more."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import Candidates
from cacheblend.core.select.text_cues import LONGEST_SENTENCE, repeated_words, sentence_indices, shared_words
from selections import masked

STOP, MARK = 1, 2


def test_a_shared_word_weighs_more_the_rarer_it_is() -> None:
    for ids, question, weights in (
        ([5, 6, 5, 7, 8, 5, 6], [5, 6], [0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ([5, 6, 7, 6, 5], [3], [0.0, 1.0, 0.0, 0.0, 0.0]),  # only the question's rows count as the question
        ([5, 5, 6], [0, 1, 2], [0.0, 0.0, 0.0]),  # a question at the start gives no weights
    ):
        assert shared_words(np.array(ids, dtype="<u4"), np.array(question)).tolist() == weights


def test_words_of_a_span_count_outside_it_and_in_front_of_the_question() -> None:
    ids = np.array([5, 6, 5, 7, 5, 8, 6, 5], dtype="<u4")
    assert repeated_words(ids, np.array([1, 2]), 6).tolist() == [0.5, 0, 0, 0, 0.5, 0, 0, 0]
    assert repeated_words(ids, np.array([0, 1, 2, 3, 4, 5]), 6).tolist() == [0] * 8
    assert repeated_words(ids, np.array([3]), 6).tolist() == [0] * 8


def test_a_rare_word_selects_its_whole_span() -> None:
    candidates = Candidates(
        positions=torch.arange(8),
        chunk_offsets=torch.arange(8),
        total=8,
        attention=torch.tensor([0.3, 0, 0, 0, 0.1, 0, 0, 0.2]),
        words=torch.tensor([0.0, 0, 0, 0, 0, 1.0, 0, 0.1]),
        segments=torch.zeros(8, dtype=torch.int64),
    )
    assert masked(Query(0.5, pool=4), candidates).tolist() == [True] * 4 + [False] * 4
    assert masked(Query(0.5, pool=4, lead=0, words=0.5), candidates).tolist() == [False] * 4 + [True] * 4


def test_sentences_end_after_a_run_of_stops_and_with_their_segment() -> None:
    prompt = Prompt.of([text([5, 6, STOP, 7]), chunk([8, STOP, MARK, STOP, 9]), chunk([STOP, 5, 5]), text([5])])
    found = sentence_indices(prompt, np.array([STOP, MARK]))
    assert found.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 5, 5, 6]
    # Without stops a sentence is a segment, cut at the longest.
    prompt = Prompt.of([chunk([5] * (2 * LONGEST_SENTENCE + 3)), chunk([5] * LONGEST_SENTENCE)])
    found = sentence_indices(prompt, np.array([], dtype=np.int64))
    assert np.bincount(found).tolist() == [LONGEST_SENTENCE, LONGEST_SENTENCE, 3, LONGEST_SENTENCE]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=150), min_size=1, max_size=4))
def test_sentences_lie_in_segments_and_in_bounds(segments: list[list[int]]) -> None:
    prompt = Prompt.of([chunk(ids) for ids in segments])
    found = sentence_indices(prompt, np.array([STOP, MARK]))
    assert found[0] == 0 and set(np.diff(found)) <= {0, 1}
    assert np.bincount(found).max() <= LONGEST_SENTENCE
    segment = np.repeat(np.arange(len(segments)), [len(ids) for ids in segments])
    assert all(len(set(segment[found == i])) == 1 for i in range(found[-1] + 1))
    for i in range(len(prompt) - 1):  # a stop ends its sentence unless another stop follows
        stops = prompt.token_ids[i] <= MARK, prompt.token_ids[i + 1] <= MARK
        assert found[i + 1] > found[i] or stops != (True, False)
