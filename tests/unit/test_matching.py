"""Stored chunks are found in prompts by their ids: against an oracle that compares every place with every place."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import TokenIds, block_name, root_name
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import SHORTEST, WINDOW, ChunkIndex, repeats, window_hashes

ROOT = root_name("a model", "float32")


def stored(ids: TokenIds) -> ChunkManifest:
    name = block_name(ROOT, ids)
    return ChunkManifest(name, ROOT, np.empty(0, "<u4"), ids, (name,))


def draw(seed: int, tokens: int, vocabulary: int = 1000) -> TokenIds:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).astype("<u4")


def index_of(*chunks: TokenIds, min_tokens: int = 64) -> ChunkIndex:
    index = ChunkIndex(min_tokens)
    index.add(map(stored, chunks))
    return index


def found(index: ChunkIndex, *parts: TokenIds) -> list[tuple[int, int, int]]:
    return [(match.start, match.stop, match.offset) for match in index.match(np.concatenate(parts))]


def test_what_is_found_of_a_prompt() -> None:
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


def test_removed_chunks_are_found_no_more_and_may_come_back() -> None:
    a, b = draw(1, 100), draw(2, 100)
    index = index_of(a, b)
    index.remove([stored(a).chunk_id, stored(draw(9, 80)).chunk_id])
    assert found(index, a, b) == [(100, 200, 0)] and len(index) == 1
    index.add([stored(a)])
    assert found(index, a, b) == [(0, 100, 0), (100, 200, 0)] and stored(a).chunk_id in index
    # An index that forgets most of its chunks still finds the rest.
    chunks = [draw(seed, 64) for seed in range(1100)]
    index = index_of(*chunks)
    index.remove(stored(chunk).chunk_id for chunk in chunks[:-2])
    assert found(index, *chunks[-4:]) == [(128, 192, 0), (192, 256, 0)]


def test_texts_shorter_than_a_window_match_nothing() -> None:
    assert index_of(draw(1, 10)).match(draw(1, 10)) == []
    assert len(window_hashes(draw(1, WINDOW - 1))) == 0 and len(window_hashes(draw(1, WINDOW))) == 1
    with pytest.raises(InvalidInputError, match=f"at least {SHORTEST} tokens.*min_tokens=40"):  # they may be missed
        ChunkIndex(40)


def runs_by_comparing(prompt: TokenIds, chunk: TokenIds, at_least: int) -> set[tuple[int, int, int]]:
    """Oracle: all maximal runs of agreement of at least so many tokens."""
    runs = set()
    for shift in range(-len(chunk) + 1, len(prompt)):
        start = None
        for position in range(max(0, shift), min(len(prompt), shift + len(chunk)) + 1):
            inside = position < min(len(prompt), shift + len(chunk))
            if inside and prompt[position] == chunk[position - shift]:
                start = position if start is None else start
            elif start is not None:
                if position - start >= at_least:
                    runs.add((start, position, start - shift))
                start = None
    return runs


@given(st.integers(0, 2**32), st.lists(st.tuples(st.booleans(), st.integers(0, 90), st.integers(1, 130)), max_size=5))
def test_what_is_found_is_what_comparing_finds(seed: int, cuts: list[tuple[bool, int, int]]) -> None:
    chunk = draw(seed, 160, vocabulary=50)
    parts = [chunk[at : at + size] if mine else draw(seed + size, size, 50) for mine, at, size in cuts]
    prompt = np.concatenate([draw(seed + 1, 3, 50), *parts])
    runs = runs_by_comparing(prompt, chunk, SHORTEST)
    alone = {run for run in runs if not any(run != other and run[0] < other[1] and other[0] < run[1] for other in runs)}
    matches = set(found(index_of(chunk, min_tokens=SHORTEST), prompt))
    assert alone <= matches
    for start, stop, offset in matches:
        assert np.array_equal(prompt[start:stop], chunk[offset : offset + stop - start]) and stop - start >= SHORTEST


def test_equal_windows_of_a_prompt_are_counted_from_the_front() -> None:
    values = np.random.default_rng(0).integers(0, 9, 200).astype(np.uint64)
    assert repeats(values).tolist() == [values[:at].tolist().count(value) for at, value in enumerate(values.tolist())]
    assert repeats(values[:0]).tolist() == []


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
