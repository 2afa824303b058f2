"""Rows that stay active after any selections, against plain lists."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.rows import ActiveRows


def opened(candidates: list[int], length: int, first: int = 0) -> ActiveRows:
    """The rows of a prompt; its row i has the hidden state [i]."""
    plan: Any = SimpleNamespace(
        candidate_rows=np.array(candidates, dtype=np.int64),
        prefix_length=first,
        chunk_offsets=np.arange(length),
        segment_indices=np.zeros(length, dtype=np.int64),
    )
    return ActiveRows(plan, torch.arange(first, length, dtype=torch.float32)[:, None])


@given(st.data())
def test_selections_drop_what_they_do_not_name_and_nothing_else(data: st.DataObject) -> None:
    length, first = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 5))
    first = min(first, length - 1)
    candidates = sorted(data.draw(st.sets(st.integers(first, length - 2)) if length - 2 >= first else st.just(set())))
    rows, left = opened(candidates, length, first), list(range(first, length))
    others = [row for row in left if row not in candidates]
    for _ in range(3):
        kept = sorted(data.draw(st.sets(st.sampled_from(candidates))) if candidates else [])
        asked = rows.candidates(2, deviation=rows.hidden[:, 0])
        assert asked.positions.tolist() == candidates
        assert asked.deviation is not None and asked.deviation.tolist() == candidates
        mask = torch.tensor([row in kept for row in candidates], dtype=torch.bool)
        rows.keep(mask if data.draw(st.booleans()) else mask.nonzero().flatten())
        candidates, left = kept, sorted([*others, *kept])
        assert rows.positions(slice(0, len(rows))).tolist() == left
        assert rows.hidden[:, 0].tolist() == left
        assert (rows.recomputed, rows.has_candidates) == (len(kept), bool(kept))
    rows.keep_last()
    assert rows.positions(slice(0, 1)).tolist() == [length - 1] and not rows.has_candidates


@pytest.mark.parametrize(
    "selected",
    [
        torch.tensor([1, 1]),
        torch.tensor([2, 0]),
        torch.tensor([-1, 0]),
        torch.tensor([0, 3]),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.tensor([1, 0, 1], dtype=torch.uint8),
        torch.tensor([[0]]),
        torch.tensor([0.0, 1.0]),
    ],
    ids=str,
)
def test_what_is_no_selection_is_refused_and_changes_nothing(selected: torch.Tensor) -> None:
    rows = opened([2, 3, 5], 8)
    with pytest.raises(InvalidInputError, match=r"for 3 candidates; it gives their indices"):
        rows.keep(selected)
    assert rows.positions(slice(0, 8)).tolist() == list(range(8)) and rows.has_candidates


def test_rows_of_a_tile_are_the_same_tensors_until_rows_are_dropped() -> None:
    rows = opened([2, 3, 4, 5], 9, 1)
    tiles = list(rows.tiles(5))
    before = [(rows.index_of(tile), rows.positions(tile)) for tile in tiles]
    for tile, (index, positions) in zip(tiles, before, strict=True):
        assert rows.index_of(tile) is index and rows.positions(tile) is positions
        assert torch.equal(index, rows.index[tile]) and torch.equal(positions, index + 1)
    rows.keep(torch.tensor([0, 3]))
    assert rows.positions(slice(0, 5)).tolist() == [1, 2, 5, 6, 7]
    assert rows.index_of(slice(0, 5)).tolist() == [0, 1, 4, 5, 6]
    rows.keep_last(2)
    assert rows.positions(slice(0, 2)).tolist() == [7, 8]
