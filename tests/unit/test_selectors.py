"""Selectors: how many rows, which, and when they decide."""

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import (
    AllRows,
    Candidates,
    Gradual,
    Head,
    Hkvd,
    NoRows,
    RandomRows,
    Recorded,
    Selector,
    Threshold,
    row_count,
)
from selections import masked

EVERY = [Hkvd(), Threshold(0.5), Head(0.5), RandomRows(0.5), AllRows(), NoRows(), Query(0.5), Hybrid()]
shares = st.floats(0, 1)
deviations = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1e30]) | st.floats(0, 100, width=32), max_size=40)


def candidates(deviation: list[float], layer: int | None = 1, total: int | None = None, chunk: int = 8) -> Candidates:
    n = len(deviation)
    positions = torch.arange(n) * 2 + 3
    return Candidates(
        positions=positions,
        chunk_offsets=torch.arange(n) % chunk,
        total=n if total is None else total,
        layer=layer,
        deviation=torch.tensor(deviation, dtype=torch.float32),
        attention=torch.tensor(deviation, dtype=torch.float32),
        segments=torch.arange(n) // chunk,
    )


@pytest.mark.parametrize("selector", EVERY, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_every_selector_fills_the_protocol(selector: Selector, rows: int) -> None:
    asked = candidates([1.0] * rows)
    selected = selector.select(asked)
    if selected.dtype == torch.bool:
        assert selected.shape == (rows,)
    else:
        assert selected.dtype == torch.int64
        assert selected.tolist() == sorted(set(selected.tolist()) & set(range(rows)))
    assert list(selector.check_layers) == sorted(set(selector.check_layers))
    assert selector.measure in ("kv", "k", "v")
    assert selector.at_start or selector.check_layers
    assert selector.question_rows == 0 or selector.question_rows >= 2
    assert asked.positions.tolist() == [3 + 2 * i for i in range(rows)]
    with pytest.raises(FrozenInstanceError):
        selector.measure = "k"  # type: ignore[misc]


@given(deviations, shares)
def test_hkvd_keeps_the_highest_and_as_many_as_the_share_comes_to(deviation: list[float], ratio: float) -> None:
    keep = masked(Hkvd(ratios=(ratio,)), candidates(deviation))
    assert int(keep.sum()) == round(ratio * len(deviation))
    kept = [d for d, k in zip(deviation, keep.tolist(), strict=True) if k]
    dropped = [d for d, k in zip(deviation, keep.tolist(), strict=True) if not k]
    assert not kept or not dropped or min(kept) >= max(dropped)


def test_ties_do_not_change_the_count() -> None:
    assert int(masked(Hkvd(ratios=(0.3,)), candidates([1.0] * 10)).sum()) == 3


@given(deviations.filter(lambda d: len(d) > 4), st.lists(shares, min_size=2, max_size=3))
def test_gradual_ratios_refer_to_all_candidates(deviation: list[float], ratios: list[float]) -> None:
    falling = tuple(sorted(ratios, reverse=True))
    layers = tuple(range(1, len(falling) + 1))
    selector = Hkvd(layers, falling)
    left = deviation
    for layer, ratio in zip(layers, falling, strict=True):
        keep = masked(selector, candidates(left, layer=layer, total=len(deviation)))
        assert int(keep.sum()) == round(ratio * len(deviation))
        left = [d for d, k in zip(left, keep.tolist(), strict=True) if k]


def test_a_share_of_all_never_exceeds_what_is_left() -> None:
    assert masked(Hkvd((1, 2), (0.5, 0.5)), candidates([1.0, 2.0], layer=2, total=10)).all()


@given(deviations, st.floats(0, 100, width=32))
def test_threshold_keeps_what_exceeds_the_bound(deviation: list[float], bound: float) -> None:
    keep = masked(Threshold(bound), candidates(deviation))
    assert keep.tolist() == [d > bound for d in deviation]


def test_head_spends_its_rows_evenly_over_the_chunks() -> None:
    asked = candidates([0.0] * 24, layer=None, chunk=8)
    keep = masked(Head(0.25), asked)
    assert asked.chunk_offsets[keep].tolist() == [0, 1] * 3
    keep = masked(Head(7 / 24), asked)  # one more than even: the first chunk's
    assert asked.chunk_offsets[keep].tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_random_rows_are_the_same_for_the_same_seed() -> None:
    asked = candidates([0.0] * 50, layer=None)
    one, same, other = (masked(RandomRows(0.5, seed), asked) for seed in (7, 7, 8))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert int(one.sum()) == int(other.sum()) == 25


def test_random_rows_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    RandomRows(0.5).select(candidates([0.0] * 50, layer=None))
    assert torch.equal(torch.rand(3), expected)


def test_the_baselines() -> None:
    asked = candidates([1.0] * 5, layer=None)
    assert masked(AllRows(), asked).all()
    assert not masked(NoRows(), asked).any()


@pytest.mark.parametrize("selector", [Hkvd(), Threshold(1.0)])
def test_a_selector_that_needs_deviations_says_so(selector: Selector) -> None:
    with pytest.raises(InvalidInputError, match="decides at check layers"):
        selector.select(Candidates(torch.arange(3), torch.arange(3), 3))


@pytest.mark.parametrize("kind", [Head, RandomRows])
@pytest.mark.parametrize("ratio", [-0.5, 1.5, math.nan])
def test_a_share_lies_in_0_to_1(kind: type[Head] | type[RandomRows], ratio: float) -> None:
    with pytest.raises(InvalidInputError, match=rf"0\.\.1, got {ratio}"):
        kind(ratio)


@given(shares, st.integers(0, 10**6))
def test_row_count_is_within_the_rows(ratio: float, total: int) -> None:
    count = row_count(ratio, total)
    assert 0 <= count <= total
    assert abs(count - ratio * total) <= 0.5


# ---- gradual filtering ------------------------------------------------------------------------------------


@given(ratio=shares, layers=st.integers(2, 100))
def test_gradual_filtering_costs_what_one_check_with_its_ratio_costs(ratio: float, layers: int) -> None:
    selector = Gradual(ratio).of_model(layers)
    if isinstance(selector, AllRows):
        assert ratio > 1 - 1e-9
        return
    assert isinstance(selector, Hkvd)  # which also refuses ratios that rise or leave 0..1
    assert selector.check_layers[-1] == min(4, layers - 1) and selector.ratios[0] < 1
    ends = (*selector.check_layers[1:], layers)
    rows = (
        selector.check_layers[0]
        - 1
        + sum(
            share * (end - start)
            for share, start, end in zip(selector.ratios, selector.check_layers, ends, strict=True)
        )
    )
    assert rows == pytest.approx(ratio * (layers - 1))


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 12, 80])
def test_gradual_filtering_of_all_rows_checks_nothing_and_of_none_keeps_none(layers: int) -> None:
    assert Gradual(1.0).of_model(layers) == AllRows()
    selector = Gradual(0.0).of_model(layers)
    assert isinstance(selector, Hkvd) and set(selector.ratios) == {0.0}


def test_gradual_filtering_is_asked_for_a_model_first() -> None:
    with pytest.raises(InvalidInputError, match="of_model"):
        Gradual(0.15).select(candidates([1.0] * 4))
    assert Gradual(0.15, "v").of_model(12) == Gradual(0.15, "v").of_model(12).of_model(12)
    with pytest.raises(InvalidInputError, match=r"0\.\.1"):
        Gradual(1.5)


def test_a_record_of_gradual_filtering_tells_the_ratio_that_was_asked_for() -> None:
    recorded = Recorded(Gradual(0.2))
    of_model = recorded.of_model(3)
    assert (recorded.name, recorded.share) == (Gradual(0.2).name, 0.2)
    assert of_model.check_layers == (1, 2)
    of_model.select(candidates([3.0, 1.0, 2.0, 0.0], layer=1))
    recorded.inner = Head(0.5)
    assert recorded.of_model(3).check_layers == ()
    assert len(recorded.asked) == 1
