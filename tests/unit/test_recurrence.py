"""Text that recurs is learnt from requests: against an oracle that compares every place of every pair of requests.

Situations: passages in other orders; a run that the next request cuts in two; a common beginning; marked chunks; equal
requests; other tenants with the same text; a text that repeats itself; prompts shorter than a run, and longer than all
that is watched; so many prompts that old ones go; so many runs that some go.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import TokenIds, root_name
from cacheblend.core.plan.chunk_matches import WINDOW
from cacheblend.core.plan.recurrence import (
    HALF_LIFE,
    MOST_COPIES,
    Interval,
    Recurrences,
    Run,
    equal_around,
    pieces_of,
    winnowed,
)
from campaign import share

ROOT, OTHER = root_name("a model", "float32"), root_name("a model", "float32", salt="another tenant")


def draw(seed: int, tokens: int, vocabulary: int = 1000) -> TokenIds:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).astype("<u4")


def joined(*parts: TokenIds) -> TokenIds:
    return np.concatenate(parts)


A, B, C, D = (draw(seed, tokens) for seed, tokens in ((1, 200), (2, 150), (3, 90), (4, 300)))


def ids_of(runs: list[Run]) -> set[tuple[int, ...]]:
    return {tuple(run.token_ids.tolist()) for run in runs}


def texts(*parts: TokenIds) -> set[tuple[int, ...]]:
    return {tuple(part.tolist()) for part in parts}


def runs_in(ours: TokenIds, theirs: TokenIds, shortest: int) -> list[tuple[int, int, bool]]:
    """Oracle: all maximal equal runs of two texts, (start, stop, both begin with it), place by place."""
    found = []
    for shift in range(-len(theirs) + 1, len(ours)):
        first, stop = max(0, shift), min(len(ours), shift + len(theirs))
        same = np.concatenate([[False], ours[first:stop] == theirs[first - shift : stop - shift], [False]])
        edges = np.flatnonzero(np.diff(same.astype(int)))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - start >= shortest:
                found.append((first + start, first + end, shift == 0 and first + start == 0))
    return found


def behind_the_beginning(ours: TokenIds, theirs: TokenIds) -> list[Interval]:
    """Oracle: what of the runs of 64 tokens or more is behind what both begin with, and as long."""
    runs = runs_in(ours, theirs, 1)
    beginning = max((stop for _, stop, is_prefix in runs if is_prefix), default=0)
    clipped = [(max(start, beginning), stop) for start, stop, _ in runs if stop - start >= 64]
    return [(start, stop) for start, stop in clipped if stop - start >= 64]


def test_boundaries_are_where_requests_differ() -> None:
    watch = Recurrences()
    assert not watch.see(ROOT, joined(A, B, C)).new
    assert ids_of(watch.see(ROOT, joined(B, D, A)).new) == texts(A, B)
    again = watch.see(ROOT, joined(C, A, B))
    assert ids_of(again.seen) == texts(A, B) and ids_of(again.new) == texts(C)
    assert sorted(run.sightings for run in watch.runs) == [2, 3, 3]


def test_a_run_is_split_when_its_halves_recur_separately() -> None:
    watch, x, y = Recurrences(), draw(8, 20), draw(9, 30)
    watch.see(ROOT, joined(A, B))
    assert ids_of(watch.see(ROOT, joined(x, A, B)).new) == texts(joined(A, B))
    told = watch.see(ROOT, joined(y, B, x))
    assert ids_of(told.new) == texts(A, B) == ids_of(watch.runs) and ids_of(told.split) == texts(joined(A, B))
    assert ids_of(watch.see(ROOT, joined(B, x, A)).seen) == texts(A, B)


def test_a_beginning_that_requests_share_is_left_to_the_exact_prefix() -> None:
    watch = Recurrences()
    for other in (B, C, D):
        assert not watch.see(ROOT, joined(A, other)).new
    assert ids_of(watch.see(ROOT, joined(B, A)).new) == texts(A, B)  # now it stands elsewhere, too


def test_an_equal_request_and_a_longer_conversation_tell_nothing() -> None:
    watch = Recurrences()
    repeating = np.tile(draw(5, 7), 40)
    for turns in (joined(A), joined(A), joined(A, B), joined(A, B, C), repeating, repeating, joined(repeating, D)):
        assert not watch.see(ROOT, turns).new
    assert ids_of(watch.see(ROOT, joined(A, C)).new) == texts(C)  # a turn was dropped


def test_what_is_a_chunk_already_is_not_learnt() -> None:
    watch = Recurrences()
    watch.see(ROOT, joined(A, B))
    assert ids_of(watch.see(ROOT, joined(B, D, A), [(0, len(B))]).new) == texts(A)


def test_another_root_learns_nothing_and_learns_its_own() -> None:
    watch = Recurrences()
    watch.see(ROOT, joined(A, B))
    assert not watch.see(OTHER, joined(B, A)).new
    assert ids_of(watch.see(OTHER, joined(C, B)).new) == texts(B)
    assert {run.root for run in watch.runs} == {OTHER}
    watch.forget(OTHER)
    assert not watch.runs and watch.watched_tokens == len(A) + len(B)
    assert ids_of(watch.see(ROOT, joined(B, C)).new) == texts(B)


def test_a_text_that_repeats_itself_stands_in_one_request_only() -> None:
    watch = Recurrences()
    assert not watch.see(ROOT, joined(A, B, A, B, A)).new
    assert not watch.see(ROOT, np.zeros(5000, "<u4")).new
    found = watch.see(ROOT, joined(draw(7, 10), np.zeros(3000, "<u4"))).new
    assert [len(run) for run in found] == [3000]


def test_texts_that_are_too_short_or_too_long_are_not_watched() -> None:
    watch = Recurrences(watch_tokens=400)
    watch.see(ROOT, A[:63])
    watch.see(ROOT, draw(5, 500))
    assert watch.watched_tokens == 0 and not watch.see(ROOT, A[:0]).new
    for _ in range(3):
        watch.see(ROOT, draw(6, 63))
    assert not watch.runs


def test_the_prompts_that_were_useful_last_are_kept() -> None:
    watch = Recurrences(watch_tokens=1000)
    watch.see(ROOT, joined(draw(10, 3), A))
    for seed in range(11, 20):
        watch.see(ROOT, joined(draw(seed, 100), A))  # the first request is of use each time
    assert watch.watched_tokens <= 1000
    assert ids_of(watch.runs) == texts(A)


def test_of_too_many_runs_those_of_least_worth_go() -> None:
    watch = Recurrences(watch_tokens=2000)
    kept, forgotten = draw(99, 300), list[Run]()
    for seed in range(20):
        passage = draw(seed, 250)
        for n in (0, 1):
            told = watch.see(ROOT, joined(draw(100 + seed + n, 9), passage, kept[:: 1 - 2 * n]))
            forgotten += told.forgotten
        watch.see(ROOT, joined(draw(200 + seed, 8), kept))
    assert sum(map(len, watch.runs)) <= 2000 and len(set(forgotten)) > 8
    assert tuple(kept.tolist()) in ids_of(watch.runs)


def test_worth_halves_and_grows_with_length() -> None:
    run = Run(b"", ROOT, A)  # type: ignore[arg-type]
    run.see(10, times=2)
    assert run.worth(10) == 2 * len(A)
    assert run.worth(10 + HALF_LIFE) == pytest.approx(len(A))
    run.see(10 + HALF_LIFE)
    assert run.decayed(10 + HALF_LIFE) == pytest.approx(2.0) and run.sightings == 3


@pytest.mark.parametrize(("shortest", "watched"), [(62, 1000), (64, 63)])
def test_limits_that_cannot_work_are_refused(shortest: int, watched: int) -> None:
    with pytest.raises(InvalidInputError, match=str(shortest)):
        Recurrences(shortest, watched)


@given(seed=st.integers(0, 2**31), tokens=st.integers(0, 400), vocabulary=st.integers(1, 50))
def test_a_run_long_enough_has_a_fingerprint_wherever_it_stands(seed: int, tokens: int, vocabulary: int) -> None:
    span, text = 33, draw(seed, tokens, vocabulary)
    hashes, at = winnowed(text, ROOT, span)
    assert max(Counter(hashes.tolist()).values(), default=0) <= MOST_COPIES
    kept = {tuple(text[place : place + WINDOW].tolist()) for place in at.tolist()}
    for start in range(len(text) - WINDOW - span + 2):
        assert any(tuple(text[start + n : start + n + WINDOW].tolist()) in kept for n in range(span))
        assert set(winnowed(text[start : start + WINDOW + span - 1], ROOT, span)[0].tolist()) & set(hashes.tolist())
    assert not set(hashes.tolist()) & set(winnowed(text, OTHER, span)[0].tolist())


@st.composite
def histories(draws: st.DrawFn) -> list[tuple[bool, TokenIds, list[Interval]]]:
    """Requests of passages and parts of them, in any order, with texts between; some chunks marked, of two tenants."""
    pool = [draw(100 + number, draws(st.integers(20, 180)), 30) for number in range(4)]
    history = []
    for number in range(draws(st.integers(2, 5))):
        parts, marked, at = [], [], 0
        for place in range(draws(st.integers(1, 3))):
            passage = pool[draws(st.integers(0, 3))][draws(st.integers(0, 60)) :]
            between = draw(1000 * number + place, draws(st.integers(0, 8)), 30)
            parts += [between, passage]
            if draws(st.integers(0, 5)) == 0:
                marked.append((at + len(between), at + len(between) + len(passage)))
            at += len(between) + len(passage)
        history.append((draws(st.integers(0, 4)) == 0, joined(*parts), marked))
    return history


@settings(max_examples=share(200), deadline=None)
@given(histories())
def test_all_that_recurs_is_learnt_and_nothing_else(history: list[tuple[bool, TokenIds, list[Interval]]]) -> None:
    watch = Recurrences()
    for number, (is_other, ids, marked) in enumerate(history):
        root = OTHER if is_other else ROOT
        before = [theirs for other, theirs, _ in history[:number] if other == is_other]
        told = watch.see(root, ids, marked)
        assert not [run for run in (*told.new, *told.seen) if run.root != root]
        recurring = [run for theirs in before for run in behind_the_beginning(ids, theirs)]
        for run in told.new:  # it stands here and in an earlier request
            places = [start for start, stop, _ in runs_in(ids, run.token_ids, len(run)) if stop - start == len(run)]
            assert len(run) >= 64 and (places or told.split)
            assert any(runs_in(theirs, run.token_ids, len(run)) for theirs in before)
        is_known = np.zeros(len(ids), bool)  # all that recurs is known now, but for what is too short
        for start, stop in marked:
            is_known[start:stop] = True
        for run in (each for each in watch.runs if each.root == root):
            for start, stop, _ in runs_in(ids, run.token_ids, 64):
                is_known[start:stop] = True
        for start, stop in recurring:
            missing = np.concatenate([[False], ~is_known[start:stop], [False]])
            edges = np.flatnonzero(np.diff(missing.astype(int)))
            assert all(edges[1::2] - edges[::2] < 64)


@given(seed=st.integers(0, 2**31), shift=st.integers(-40, 40))
def test_a_run_is_extended_as_far_as_it_goes(seed: int, shift: int) -> None:
    ours = draw(seed, 120, 2)
    theirs = np.roll(ours, shift)
    here = int(np.random.default_rng(seed).integers(0, 120))
    place = (here + shift) % 120
    start, stop = equal_around(ours, here, theirs, place)
    expected = [(a, b) for a, b, _ in runs_in(ours, theirs, 1) if a <= here < b and a - start == 0]
    assert (start, stop) in expected


def test_pieces_are_cut_where_something_begins_or_ends() -> None:
    assert pieces_of([(0, 300)], [], 64) == [(0, 300)]
    assert pieces_of([(0, 300), (100, 300)], [], 64) == [(0, 100), (100, 300)]
    assert pieces_of([(0, 300), (10, 290)], [], 64) == [(0, 300)]  # ends too short for pieces of their own
    assert pieces_of([(0, 300)], [(100, 150)], 64) == [(0, 100), (150, 300)]
    assert pieces_of([(0, 300)], [(60, 240)], 64) == []
    assert pieces_of([(0, 100), (100, 200)], [], 64) == [(0, 100), (100, 200)]
    assert pieces_of([(0, 100), (90, 130)], [], 64) == [(0, 100)]  # no request has both
    assert pieces_of([(0, 100), (90, 200)], [], 64) == [(0, 100), (100, 200)]


def test_a_text_of_one_token_costs_no_more_than_another() -> None:
    hashes, _ = winnowed(np.zeros(100_000, "<u4"), ROOT, 33)
    assert len(hashes) == MOST_COPIES
