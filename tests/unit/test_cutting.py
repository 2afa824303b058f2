"""Cuts by content: all tokens, within bounds, and an edit moves few of them."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import as_token_ids, join_ids
from cacheblend.engines.tokens import chunker
from cacheblend.engines.tokens.chunker import Cutting
from campaign import share

END = 1


def sentence(rng: random.Random) -> list[int]:
    return [rng.randrange(2, 30_000) for _ in range(rng.randint(3, 40))] + [END]


@given(
    st.lists(st.integers(0, 6), max_size=3000),
    st.integers(1, 40),
    st.integers(0, 300),
    st.booleans(),
)
@settings(max_examples=share(150), deadline=None)
def test_chunks_are_the_document_within_bounds(ids: list[int], least: int, more: int, has_ends: bool) -> None:
    cutting = Cutting(2 * least + more, least)
    ends = np.array([END]) if has_ends else None
    pieces = cutting.cut(as_token_ids(ids), ends)
    assert join_ids(pieces).tolist() == ids
    assert all(len(piece) <= cutting.most for piece in pieces)
    assert len(pieces) == 1 or all(len(piece) >= least for piece in pieces)
    assert [piece.tolist() for piece in pieces] == [p.tolist() for p in cutting.cut(as_token_ids(ids), ends)]


def test_cuts_are_behind_sentences_where_there_are_any() -> None:
    rng = random.Random(0)
    ids = as_token_ids([i for _ in range(200) for i in sentence(rng)])
    pieces = Cutting().cut(ids, np.array([END]))
    assert len(pieces) > 8
    assert all(piece[-1] == END for piece in pieces)


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_changes_few_chunks_wherever_it_is(seed: int) -> None:
    """On average over 60 documents; single ones may be cut anew, where the edit has the lowest hash."""
    rng, changed, of = random.Random(seed), 0, 0
    for _ in range(60):
        before = [sentence(rng) for _ in range(92)]
        after, at = list(before), rng.choice([0, len(before) // 2, len(before) - 1])
        edit = rng.choice(["replace", "insert", "delete"])
        after[at : at + (edit != "insert")] = [] if edit == "delete" else [sentence(rng)]
        cut = [
            Cutting().cut(as_token_ids([i for each in text for i in each]), np.array([END])) for text in (before, after)
        ]
        held = {piece.tobytes() for piece in cut[0]}
        changed += sum(len(piece) for piece in cut[1] if piece.tobytes() not in held)
        of += sum(map(len, cut[1]))
    assert changed / of < 0.22


def test_what_is_put_in_front_moves_no_cut_behind_it() -> None:
    rng = random.Random(3)
    text = [i for _ in range(300) for i in sentence(rng)]
    old = {piece.tobytes() for piece in Cutting().cut(as_token_ids(text), np.array([END]))}
    new = Cutting().cut(as_token_ids([*sentence(rng), *text]), np.array([END]))
    assert sum(piece.tobytes() not in old for piece in new) <= 4 < len(new) // 2


@pytest.mark.parametrize(
    "ids", [np.zeros(300_000), np.arange(300_000) % 2, np.arange(300_000)], ids=["equal", "two", "all"]
)
def test_a_text_without_sentences_is_cut_as_well(ids: np.ndarray) -> None:
    cutting = Cutting(256, 64)
    pieces = cutting.cut(as_token_ids(ids.astype("<u4")), np.array([END + 10**6]))
    assert sum(map(len, pieces)) == len(ids)
    assert max(map(len, pieces)) <= 256


def test_sentences_sorted_by_their_hashes_do_not_take_quadratic_time() -> None:
    """Each cut would take one sentence off the front: the number of places looked at is bounded all the same."""
    looked_at = 0

    class Counting(Cutting):
        def _place(self, start, stop, ends, hashes, depth):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += stop - start
            return super()._place(start, stop, ends, np.arange(len(hashes)).astype(np.uint64), depth)

    ids = as_token_ids(np.full(100_000, END))
    Counting(128, 16).cut(ids, np.array([END]))
    assert looked_at < 100 * len(ids)


@pytest.mark.parametrize(("most", "least"), [(100, 64), (2, 0), (1, 1), (-5, -3)])
def test_bounds_that_cannot_be_kept_are_refused(most: int, least: int) -> None:
    with pytest.raises(InvalidInputError, match=f"{least} to {most}"):
        Cutting(most, least)


@given(st.integers(0, 40), st.integers(1, 12))
def test_cuts_do_not_depend_on_how_many_tokens_are_hashed_at_once(length: int, at_once: int) -> None:
    ids = as_token_ids(np.random.default_rng(length).integers(0, 50, length))
    with pytest.MonkeyPatch.context() as patch:
        whole = chunker._hashes(ids)
        patch.setattr(chunker, "_HASHED_AT_ONCE", at_once)
        assert np.array_equal(chunker._hashes(ids), whole)
