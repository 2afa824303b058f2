"""Prompts: what is refused, and in which words."""

import numpy as np
import pytest

from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.prompt import Prompt, check_ids, chunk, text


def test_segments_in_order_without_the_empty_ones() -> None:
    prompt = Prompt.of([text([]), text([1]), chunk([2, 3], "title"), text([]), chunk([2, 3]), text([4])])
    assert prompt.token_ids.tolist() == [1, 2, 3, 2, 3, 4]
    assert prompt.token_ids.dtype == np.dtype("<u4")
    assert len(prompt) == 6
    assert [s.is_chunk for s in prompt.segments] == [False, True, True, False]
    assert [s.label for s in prompt.chunks] == ["title", ""]


@pytest.mark.parametrize("make", [text, chunk])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -5], r"-5\.\.1"),
        ([2**40], "1099511627776"),
        ([2**70], "integers"),
        ([1.5], "float64"),
        ([float("nan")], "float64"),
        (["1"], "integers"),
        ([[1], [2, 3]], "inhomogeneous"),
        ([[1, 2], [3, 4]], "one list"),
        (3, "one list"),
    ],
)
def test_bad_ids_are_refused(make: object, ids: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"token ids.*{message}"):
        make(ids)  # type: ignore[operator]


def test_empty_prompts_ids_outside_the_vocabulary_and_long_prompts_are_refused_with_the_limit() -> None:
    for segments in ([], [text([])]):
        with pytest.raises(InvalidInputError, match="prompt is empty; it needs at least one token"):
            Prompt.of(segments)
    with pytest.raises(InvalidInputError, match="chunk has no tokens; leave empty passages out"):
        chunk([])
    prompt = Prompt.of([text([1, 2]), chunk([9, 3])])
    prompt.check(vocab_size=10, max_length=4)
    with pytest.raises(InvalidInputError, match=r"token id 9 at index 2.*0\.\.8.*another model's tokenizer"):
        prompt.check(vocab_size=9, max_length=None)
    with pytest.raises(InvalidInputError, match=r"4 tokens.*context 3; use fewer or shorter chunks"):
        prompt.check(vocab_size=10, max_length=3)
    check_ids(as_token_ids([]), 0, "nothing")
    assert issubclass(InvalidInputError, ValueError) and issubclass(InvalidInputError, CacheBlendError)
