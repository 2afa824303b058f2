"""Text that recurs: stored chunks are found in prompts by their ids, and runs are learnt from requests; both against
an oracle that compares every place with every place.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import TokenIds, block_name, root_name
from cacheblend.core.plan import recurrence
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import SHORTEST, WINDOW, ChunkIndex, equal_around, repeats, window_hashes
from cacheblend.core.plan.recurrence import Interval, Recurrences, Run, pieces_of, winnowed
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


def runs_in(ours: TokenIds, theirs: TokenIds, shortest: int) -> list[tuple[int, int, int]]:
    """Oracle: all maximal equal runs of two texts, (start, stop, start in theirs), place by place."""
    found = []
    for shift in range(-len(theirs) + 1, len(ours)):
        first, stop = max(0, shift), min(len(ours), shift + len(theirs))
        same = np.concatenate([[False], ours[first:stop] == theirs[first - shift : stop - shift], [False]])
        edges = np.flatnonzero(np.diff(same.astype(int)))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - start >= shortest:
                found.append((first + start, first + end, first + start - shift))
    return found


def behind_the_beginning(ours: TokenIds, theirs: TokenIds) -> list[Interval]:
    """Oracle: what of the runs of 64 tokens or more is behind what both begin with, and as long."""
    runs = runs_in(ours, theirs, 1)
    beginning = max((stop for start, stop, offset in runs if start == offset == 0), default=0)
    clipped = [(max(start, beginning), stop) for start, stop, _ in runs if stop - start >= 64]
    return [(start, stop) for start, stop in clipped if stop - start >= 64]


def test_boundaries_are_where_requests_differ_and_pieces_cut_where_something_begins_or_ends() -> None:
    watch = Recurrences()
    assert not watch.see(ROOT, joined(A, B, C)).new
    assert ids_of(watch.see(ROOT, joined(B, D, A)).new) == texts(A, B)
    again = watch.see(ROOT, joined(C, A, B))
    assert ids_of(again.seen) == texts(A, B) and ids_of(again.new) == texts(C)
    assert sorted(run.sightings for run in watch.runs) == [2, 3, 3]

    watch = Recurrences()
    watch.see(ROOT, joined(A, B))
    told = watch.see(ROOT, joined(B, D, A), [(0, len(B))])
    assert ids_of(told.new) == texts(A), "what is a chunk already is not learnt"

    watch = Recurrences()
    for other in (B, C, D):
        assert not watch.see(ROOT, joined(A, other)).new, "what requests begin with is left to the exact prefix"
    assert ids_of(watch.see(ROOT, joined(B, A)).new) == texts(A, B)  # now it stands elsewhere, too

    watch, repeating = Recurrences(), np.tile(draw(5, 7), 40)
    for turns in (joined(A), joined(A), joined(A, B), joined(A, B, C), repeating, repeating, joined(repeating, D)):
        assert not watch.see(ROOT, turns).new, "an equal request and a longer conversation tell nothing"
    assert ids_of(watch.see(ROOT, joined(A, C)).new) == texts(C)  # a turn was dropped

    watch, x, y = Recurrences(), draw(8, 20), draw(9, 30)
    watch.see(ROOT, joined(A, B))
    assert ids_of(watch.see(ROOT, joined(x, A, B)).new) == texts(joined(A, B))
    told = watch.see(ROOT, joined(y, B, x))
    assert ids_of(told.new) == texts(A, B) == ids_of(watch.runs), "a run is split when its halves recur separately"
    assert ids_of(told.split) == texts(joined(A, B))
    assert ids_of(watch.see(ROOT, joined(B, x, A)).seen) == texts(A, B)
    assert pieces_of([(0, 300)], [], 64) == [(0, 300)]  # pieces
    assert pieces_of([(0, 300), (100, 300)], [], 64) == [(0, 100), (100, 300)]
    assert pieces_of([(0, 300), (10, 290)], [], 64) == [(0, 300)]  # ends too short for pieces of their own
    assert pieces_of([(0, 300)], [(100, 150)], 64) == [(0, 100), (150, 300)]
    assert pieces_of([(0, 300)], [(60, 240)], 64) == []
    assert pieces_of([(0, 100), (100, 200)], [], 64) == [(0, 100), (100, 200)]
    assert pieces_of([(0, 100), (90, 130)], [], 64) == [(0, 100)]  # no request has both
    assert pieces_of([(0, 100), (90, 200)], [], 64) == [(0, 100), (100, 200)]


def test_roots_learn_their_own_of_prompts_that_can_tell_and_the_most_useful_are_kept() -> None:
    watch = Recurrences()
    watch.see(ROOT, joined(A, B))
    assert not watch.see(OTHER, joined(B, A)).new
    assert ids_of(watch.see(OTHER, joined(C, B)).new) == texts(B)
    assert {run.root for run in watch.runs} == {OTHER}
    assert ids_of(watch.see(ROOT, joined(B, C)).new) == texts(B)
    watch.forget()
    assert not watch.runs and watch.watched_tokens == 0 and not watch.see(ROOT, joined(A, B)).new
    watch = Recurrences()  # a text that repeats itself
    assert not watch.see(ROOT, joined(A, B, A, B, A)).new
    assert not watch.see(ROOT, np.zeros(5000, "<u4")).new
    found = watch.see(ROOT, joined(draw(7, 10), np.zeros(3000, "<u4"))).new
    assert [len(run) for run in found] == [3000]
    costs = len(winnowed(np.zeros(100_000, "<u4"), ROOT, 33)[0])
    assert costs == recurrence.MOST_COPIES, "one token costs no more than others"
    watch = Recurrences(watch_tokens=400)  # prompts of a length that can tell are watched, and those last useful kept
    watch.see(ROOT, A[:63])
    watch.see(ROOT, draw(5, 500))
    assert watch.watched_tokens == 0 and not watch.see(ROOT, A[:0]).new
    for _ in range(3):
        watch.see(ROOT, draw(6, 63))
    assert not watch.runs

    watch = Recurrences(watch_tokens=1000)
    watch.see(ROOT, joined(draw(10, 3), A))
    for seed in range(11, 20):
        watch.see(ROOT, joined(draw(seed, 100), A))  # the first request is of use each time, and is kept
    assert watch.watched_tokens <= 1000
    assert ids_of(watch.runs) == texts(A)
    for shortest, watched in ((62, 1000), (64, 63)):
        with pytest.raises(InvalidInputError, match=str(shortest)):
            Recurrences(shortest, watched)
    watch = Recurrences(watch_tokens=2000)  # of too many runs those of least worth go
    kept, forgotten = draw(99, 300), list[Run]()
    for seed in range(20):
        passage = draw(seed, 250)
        for n in (0, 1):
            told = watch.see(ROOT, joined(draw(100 + seed + n, 9), passage, kept[:: 1 - 2 * n]))
            forgotten += told.forgotten
        watch.see(ROOT, joined(draw(200 + seed, 8), kept))
    assert sum(map(len, watch.runs)) <= 2000 and len(set(forgotten)) > 8
    assert tuple(kept.tolist()) in ids_of(watch.runs)
    # Worth halves with time, and grows with length.
    run = Run(b"", ROOT, A)  # type: ignore[arg-type]
    run.see(10, times=2)
    assert run.worth(10) == 2 * len(A)
    assert run.worth(10 + recurrence.HALF_LIFE) == pytest.approx(len(A))
    run.see(10 + recurrence.HALF_LIFE)
    assert run.decayed(10 + recurrence.HALF_LIFE) == pytest.approx(2.0) and run.sightings == 3


@given(st.integers(0, 2**31), st.integers(0, 400), st.integers(1, 50), st.integers(-40, 40))
def test_runs_have_fingerprints_and_are_extended(seed: int, tokens: int, vocabulary: int, shift: int) -> None:
    span, text = 33, draw(seed, tokens, vocabulary)
    hashes, at = winnowed(text, ROOT, span)
    assert max(Counter(hashes.tolist()).values(), default=0) <= recurrence.MOST_COPIES
    kept = {tuple(text[place : place + WINDOW].tolist()) for place in at.tolist()}
    for start in range(len(text) - WINDOW - span + 2):
        assert any(tuple(text[start + n : start + n + WINDOW].tolist()) in kept for n in range(span))
        assert set(winnowed(text[start : start + WINDOW + span - 1], ROOT, span)[0].tolist()) & set(hashes.tolist())
    assert not set(hashes.tolist()) & set(winnowed(text, OTHER, span)[0].tolist())
    ours = draw(seed, 120, 2)  # a run is extended as far as it goes
    theirs = np.roll(ours, shift)
    here = int(np.random.default_rng(seed).integers(0, 120))
    place = (here + shift) % 120
    start, stop = equal_around(ours, here, theirs, place)
    expected = [(a, b) for a, b, _ in runs_in(ours, theirs, 1) if a <= here < b and a - start == 0]
    assert (start, stop) in expected


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


def stored(ids: TokenIds) -> ChunkManifest:
    name = block_name(ROOT, ids)
    return ChunkManifest(name, ROOT, np.empty(0, "<u4"), ids, (name,))


def index_of(*chunks: TokenIds, min_tokens: int = 64) -> ChunkIndex:
    index = ChunkIndex(min_tokens)
    index.add(map(stored, chunks))
    return index


def found(index: ChunkIndex, *parts: TokenIds) -> list[tuple[int, int, int]]:
    return [(match.start, match.stop, match.offset) for match in index.match(np.concatenate(parts))]


def test_what_is_found_of_a_prompt_and_of_chunks_that_were_removed() -> None:
    a, b, question, chunk = draw(1, 200), draw(2, 130), draw(3, 20), draw(1, 300)
    whole = found(index_of(a, b), question, b, a, question, a)
    assert whole == [(20, 150, 0), (150, 350, 0), (370, 570, 0)], "whole chunks in any order, and twice"
    seam = chunk.copy()
    seam[[0, 1, 299]] += 1
    assert found(index_of(chunk), draw(2, 7), seam, draw(3, 9)) == [(9, 306, 2)], "without what the seam changed"
    edited = chunk.copy()
    edited[150] += 1
    assert found(index_of(chunk), edited) == [(0, 150, 0), (151, 300, 151)], "two runs around an edit"
    text = draw(1, 400)  # of overlapping runs the first is whole, and the longest of equal start
    assert found(index_of(text[:100], text[:250], text[200:]), text) == [(0, 250, 0), (250, 400, 50)]
    for least, runs in ((100, []), (99, [(5, 104, 50)])):  # shorter runs than asked for are no matches
        assert found(index_of(chunk, min_tokens=least), draw(2, 5), chunk[50:149], draw(3, 5)) == runs
    a, b = draw(1, 100), draw(2, 100)  # removed chunks
    index = index_of(a, b)
    index.remove([stored(a).chunk_id, stored(draw(9, 80)).chunk_id])
    assert found(index, a, b) == [(100, 200, 0)] and len(index) == 1
    index.add([stored(a)])
    assert found(index, a, b) == [(0, 100, 0), (100, 200, 0)] and len(index) == 2
    # An index that forgets most of its chunks still finds the rest.
    chunks = [draw(seed, 64) for seed in range(1100)]
    index = index_of(*chunks)
    index.remove(stored(chunk).chunk_id for chunk in chunks[:-2])
    assert found(index, *chunks[-4:]) == [(128, 192, 0), (192, 256, 0)]
    assert index_of(draw(1, 10)).match(draw(1, 10)) == []  # shorter than a window
    assert len(window_hashes(draw(1, WINDOW - 1))) == 0 and len(window_hashes(draw(1, WINDOW))) == 1
    with pytest.raises(InvalidInputError, match=f"at least {SHORTEST} tokens.*min_tokens=40"):  # they may be missed
        ChunkIndex(40)


@given(st.integers(0, 2**32), st.lists(st.tuples(st.booleans(), st.integers(0, 90), st.integers(1, 130)), max_size=5))
def test_what_is_found_is_what_comparing_finds(seed: int, cuts: list[tuple[bool, int, int]]) -> None:
    chunk = draw(seed, 160, vocabulary=50)
    parts = [chunk[at : at + size] if mine else draw(seed + size, size, 50) for mine, at, size in cuts]
    prompt = np.concatenate([draw(seed + 1, 3, 50), *parts])
    runs = {(start, stop, offset) for start, stop, offset in runs_in(prompt, chunk, SHORTEST)}
    alone = {run for run in runs if not any(run != other and run[0] < other[1] and other[0] < run[1] for other in runs)}
    matches = set(found(index_of(chunk, min_tokens=SHORTEST), prompt))
    assert alone <= matches
    for start, stop, offset in matches:
        assert np.array_equal(prompt[start:stop], chunk[offset : offset + stop - start]) and stop - start >= SHORTEST


def test_a_text_of_one_token_matches_itself_and_is_compared_at_few_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every window is the same, so every hit says nothing but by its ids."""
    matches = index_of(np.full(200, 7, dtype="<u4")).match(np.full(500, 7, dtype="<u4"))
    assert all(match.stop <= after.start for match, after in pairwise(matches))
    assert sum(map(len, matches)) >= 200
    compared, compare = list[int](), ChunkIndex._run_around

    def counting(*args: Any) -> Any:
        compared.append(1)
        return compare(*args)

    monkeypatch.setattr(ChunkIndex, "_run_around", counting)
    text = np.zeros(20_000, "<u4")
    assert found(index_of(text), text) == [(0, 20_000, 0)]
    assert len(compared) <= 64 * 16
    # Equal windows of a prompt are counted from the front.
    values = np.random.default_rng(0).integers(0, 9, 200).astype(np.uint64)
    assert repeats(values).tolist() == [values[:at].tolist().count(value) for at, value in enumerate(values.tolist())]
    assert repeats(values[:0]).tolist() == []
