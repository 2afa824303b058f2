"""Selectors: how many rows, which, and when they decide; those that ask the question: budgets, whole spans, rankings
that meet, and cues from token ids.
"""

import math
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.question import LONGEST_SENTENCE, rare_words, sentence_indices
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select import selectors
from cacheblend.core.select.question_selectors import SPAN_WITHOUT_SENTENCES, Hybrid, Pool, Query, ranks_by_attention
from cacheblend.core.select.selection import Selection, SelectorChoice
from cacheblend.core.select.selectors import (
    AllRows,
    Candidates,
    Corrected,
    Gradual,
    Head,
    Hkvd,
    Late,
    NoRows,
    RandomRows,
    Selector,
)
from cacheblend.evaluation.methods import make_methods


def masked(selector: Selector, candidates: Candidates) -> torch.Tensor:
    """Boolean [n]: the candidates that stay active."""
    recorded = selectors.Recorded(selector)
    recorded.select(candidates)
    return recorded.keeps[0]


EVERY = [Hkvd(), selectors.Threshold(0.5), Head(0.5), RandomRows(0.5), AllRows(), NoRows(), Query(0.5), Hybrid()]
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


@given(deviations, shares, st.floats(0, 100, width=32))
def test_hkvd_keeps_a_share_and_threshold_what_exceeds_it(deviation: list[float], ratio: float, bound: float) -> None:
    keep = masked(Hkvd(ratios=(ratio,)), candidates(deviation))
    assert int(keep.sum()) == round(ratio * len(deviation))
    kept = [d for d, k in zip(deviation, keep.tolist(), strict=True) if k]
    dropped = [d for d, k in zip(deviation, keep.tolist(), strict=True) if not k]
    assert not kept or not dropped or min(kept) >= max(dropped)
    assert int(masked(Hkvd(ratios=(0.3,)), candidates([1.0] * 10)).sum()) == 3  # ties do not change the count
    keep = masked(selectors.Threshold(bound), candidates(deviation))
    assert keep.tolist() == [d > bound for d in deviation]


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
    assert masked(Hkvd((1, 2), (0.5, 0.5)), candidates([1.0, 2.0], layer=2, total=10)).all()  # no more than are left


def test_head_rows_are_even_random_ones_the_seeds_and_a_record_tells_the_ratio_asked_for() -> None:
    asked = candidates([0.0] * 24, layer=None, chunk=8)
    keep = masked(Head(0.25), asked)
    assert asked.chunk_offsets[keep].tolist() == [0, 1] * 3
    keep = masked(Head(7 / 24), asked)  # one more than even: the first chunk's
    assert asked.chunk_offsets[keep].tolist() == [0, 1, 2, 0, 1, 0, 1]
    keep = masked(Head(0.5, recency=1.0), asked)  # 2, 4 and 6 of 8
    assert asked.chunk_offsets[keep].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert asked.chunk_offsets[masked(Head(0.75, 1.0), asked)].tolist() == [*range(3), *range(7), *range(8)]
    asked = candidates([0.0] * 50, layer=None)
    one, same, other = (masked(RandomRows(0.5, seed), asked) for seed in (7, 7, 8))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert int(one.sum()) == int(other.sum()) == 25
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    RandomRows(0.5).select(asked)
    assert torch.equal(torch.rand(3), expected)  # the global generator is left alone
    recorded = selectors.Recorded(Gradual(0.2))  # a record of gradual filtering
    of_model = recorded.of_model(3)
    assert (recorded.name, recorded.share) == (Gradual(0.2).name, 0.2)
    assert of_model.check_layers == (1, 2)
    of_model.select(candidates([3.0, 1.0, 2.0, 0.0], layer=1))
    recorded.inner = Head(0.5)
    assert recorded.of_model(3).check_layers == ()
    assert len(recorded.asked) == 1


def test_what_a_selector_lacks_and_a_share_outside_of_0_to_1_are_said() -> None:
    by_layers, by_question = (Hkvd(), selectors.Threshold(1.0)), (Query(0.5), Hybrid())
    gradual = (Gradual(0.15),)
    lacking = {"decides at check layers": by_layers, "question's attention": by_question, "of_model": gradual}
    for message, each in lacking.items():
        for selector in each:
            with pytest.raises(InvalidInputError, match=message):
                selector.select(Candidates(torch.arange(3), torch.arange(3), 3))
    for kind, ratio in product((Head, RandomRows, Gradual), (-0.5, 1.5, math.nan)):
        with pytest.raises(InvalidInputError, match=rf"0\.\.1, got {ratio}"):
            kind(ratio)
    with pytest.raises(InvalidInputError, match=r"early share 0.2 is below .* ratio 0.3"):
        Hybrid((1,), (0.3,), early=0.2)
    for weight, settings in product(
        (-0.1, 1.5, math.nan, "half"), ({"correction": 0}, {"recency": 0, "selector": "head"})
    ):
        (name, *_) = settings
        with pytest.raises(InvalidInputError, match=rf"{name} must be in 0\.\.1, got "):
            Selection(**settings | {name: weight})  # type: ignore[arg-type]


def test_a_corrected_selector_chooses_as_the_one_it_corrects_beside() -> None:
    selector = Selection(recompute_ratio=0.3, correction=0.5).make_selector()
    assert selector == Corrected(Gradual(0.3), 0.5)
    assert (selector.name, selector.share, selector.correction) == ("hkvd", 0.3, 0.5)
    assert selector.of_model(9) == Corrected(Gradual(0.3).of_model(9), 0.5)
    late = Late.of(Corrected(Hkvd((1,), (0.3,)), 0.5), [2, 4])
    assert (late.check_layers, late.correction) == ((2,), 0.5)
    assert SelectorChoice.parse("head:correction=0.25").selector((0.1,), None) == Corrected(Head(0.1), 0.25)
    assert Selection(selector="none").make_selector().correction == 0
    (method,) = make_methods(["blend"], selectors=["hkvd:correction=0.5"])
    assert method.label.name == "blend hkvd:correction=0.5 gradual r=0.15"


@given(ratio=shares, layers=st.integers(2, 100))
def test_gradual_filtering_costs_what_one_check_with_its_ratio_costs(ratio: float, layers: int) -> None:
    selector = Gradual(ratio).of_model(layers)
    if isinstance(selector, AllRows):
        assert ratio > 1 - 1e-9
        return
    assert isinstance(selector, Hkvd)  # which also refuses ratios that rise or leave 0..1
    assert selector.check_layers[-1] == min(4, layers - 1) and selector.ratios[0] < 1
    spans = pairwise((*selector.check_layers, layers))
    rows = [share * (end - start) for share, (start, end) in zip(selector.ratios, spans, strict=True)]
    assert selector.check_layers[0] - 1 + sum(rows) == pytest.approx(ratio * (layers - 1))

    assert Gradual(1.0).of_model(layers) == AllRows()  # checks nothing
    none = Gradual(0.0, "v").of_model(layers)
    assert isinstance(none, Hkvd) and set(none.ratios) == {0.0} and none.of_model(layers) == none


pools = st.sampled_from(["sentence", 1, 2, 5, 100])


@st.composite
def asked(draw: st.DrawFn, layer: int | None = None) -> Candidates:
    """Some rows of a prompt of several chunks and sentences, with attention and deviations that often tie."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    offsets = np.concatenate([np.arange(n) for n in lengths])
    segments = np.repeat(np.arange(len(lengths)) * 2, lengths)
    begins = np.array(draw(st.lists(st.booleans(), min_size=len(offsets), max_size=len(offsets)))) | (offsets == 0)
    rows = np.flatnonzero(draw(st.lists(st.booleans(), min_size=len(offsets), max_size=len(offsets))))
    values = st.lists(st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0, 9, width=32), min_size=len(rows))
    attention, deviation = (torch.tensor(draw(values)[: len(rows)], dtype=torch.float32) for _ in range(2))
    return Candidates(
        positions=torch.from_numpy(rows) + 3,
        chunk_offsets=torch.from_numpy(offsets[rows]),
        total=draw(st.integers(len(rows), len(offsets))),
        layer=layer,
        deviation=None if layer is None else deviation,
        attention=attention,
        segments=torch.from_numpy(segments[rows]),
        sentences=torch.from_numpy(np.cumsum(begins)[rows]) if draw(st.booleans()) else None,
    )


def spans_of(candidates: Candidates, pool: Pool) -> list[tuple[int, ...]]:
    """The span of every row, in plain words."""
    if pool == "sentence" and candidates.sentences is not None:
        return [(s,) for s in candidates.sentences.tolist()]
    tokens = SPAN_WITHOUT_SENTENCES if pool == "sentence" else pool
    assert candidates.segments is not None
    rows = zip(candidates.segments.tolist(), candidates.chunk_offsets.tolist(), strict=True)
    return [(segment, offset // tokens) for segment, offset in rows]


@given(asked(), pools, st.integers(0, 9), shares, st.integers(0, 3))
def test_spans_of_highest_attention_take_the_budget(
    candidates: Candidates, pool: Pool, count: int, ratio: float, lead: int
) -> None:
    best: dict[tuple[int, ...], list[float]] = {}
    assert candidates.attention is not None
    for span, attention in zip(spans_of(candidates, pool), candidates.attention.tolist(), strict=True):
        best.setdefault(span, []).append(attention)
    spans, first = [], 0
    for attentions in best.values():
        spans.append(selectors.FoundSpan(first, first + len(attentions), max(attentions)))
        first += len(attentions)
    expected = [span for span in sorted(spans, key=lambda span: -span.attention)[:count] if span.attention > 0]
    for selector in (Query(0.5, pool=pool, words=1.0, hops=1), Hybrid(pool=pool, words=1.0, hops=1)):
        assert selector.found_spans(candidates, count) == expected
    # the budget is spent on spans taken whole, in order, and one in part
    keep = masked(Query(ratio, pool=pool, lead=lead), candidates).tolist()
    assert sum(keep) == min(round(ratio * candidates.total), len(candidates.positions))
    assert candidates.attention is not None
    attention = candidates.attention.tolist()
    members: dict[tuple[int, ...], list[int]] = {}
    for row, span in enumerate(spans_of(candidates, pool)):
        members.setdefault(span, []).append(row)
    best = attention_of_spans(candidates, members, lead)
    whole = [span for span, rows in members.items() if all(keep[row] for row in rows)]
    none = [span for span, rows in members.items() if not any(keep[row] for row in rows)]
    partly = [span for span in members if span not in whole and span not in none]
    assert len(partly) <= 1
    order = [min((best[s] for s in group), default=None) for group in (whole, partly)]
    order += [max((best[s] for s in none), default=None)]
    assert all(a >= b for a, b in pairwise(value for value in order if value is not None))
    for span in partly:
        kept = [attention[row] for row in members[span] if keep[row]]
        assert min(kept) >= max(attention[row] for row in members[span] if not keep[row])
    ranks = ranks_by_attention(candidates, pool).tolist()  # ranks are a permutation and keep spans together
    assert sorted(ranks) == list(range(len(ranks)))
    in_order = [span for _, span in sorted(zip(ranks, spans_of(candidates, pool), strict=True))]
    changes = sum(a != b for a, b in pairwise(in_order))
    assert changes == max(0, len(set(in_order)) - 1)


def test_spans_are_found_by_hops_with_the_sentence_in_front_heads_of_chunks_and_rare_words() -> None:
    candidates = Candidates(
        positions=torch.arange(4),
        chunk_offsets=torch.arange(4),
        total=4,
        attention=torch.tensor([0.4, 0.1, 0.0, 0.0]),
        hop_words=torch.tensor([0.0, 0.0, 0.9, 0.0]),
        segments=torch.zeros(4, dtype=torch.int64),
    )
    assert ranks_by_attention(candidates, 1).tolist() == [0, 1, 2, 3]
    assert ranks_by_attention(candidates, 1, words=0.5).tolist() == [1, 2, 0, 3]
    assert Query(0.5, pool=1, lead=0, words=1.0, hops=1).found_spans(candidates, 2)[0][:2] == (2, 3)
    attention = torch.tensor([0.0, 0.0, 0.1, 0.9, 0.0, 0.0, 0.5, 0.0])  # the sentence in front
    found = Candidates(
        positions=torch.arange(8),
        chunk_offsets=torch.arange(8) % 4,
        total=8,
        attention=attention,
        segments=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        sentences=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    )
    assert masked(Query(0.5, lead=1), found).tolist() == [True] * 4 + [False] * 4
    assert masked(Query(0.5, lead=0), found).tolist() == [False, False, True, True, False, False, True, True]
    # heads of chunks count half as much as what was found in them
    found = Candidates(
        positions=torch.arange(8),
        chunk_offsets=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]),
        total=8,
        attention=torch.tensor([0.0, 0.1, 0.0, 0.9, 0.2, 0.3, 0.0, 0.0]),
        segments=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
    )
    assert torch.argsort(ranks_by_attention(found, 1)).tolist() == [3, 5, 4, 1, 0, 2, 6, 7]
    # of the first chunk 0 and 1 count 0.45, of the second 4 counts its own 0.2, which is more than half of 0.3
    assert torch.argsort(ranks_by_attention(found, 1, head_rows=2)).tolist() == [3, 1, 0, 5, 4, 2, 6, 7]
    assert masked(Query(0.375, pool=1, lead=0, head_rows=2), found).tolist() == [True, True, False, True] + [False] * 4
    assert masked(Query(0.5, pool=1, lead=0, head_rows=10**12), found).tolist() == [True] * 4 + [False] * 4
    # a rare word selects its whole span
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


def attention_of_spans(
    candidates: Candidates, members: dict[tuple[int, ...], list[int]], lead: int
) -> dict[tuple[int, ...], float]:
    """A span's own highest, or that of one of the next `lead` spans of its segment, in plain words."""
    assert candidates.attention is not None and candidates.segments is not None
    segments, attention = candidates.segments.tolist(), candidates.attention.tolist()
    order = list(members)  # rows ascend, and so do their spans
    return {
        span: max(
            attention[row]
            for later in order[place : place + lead + 1]
            for row in members[later]
            if segments[row] == segments[members[span][0]]
        )
        for place, span in enumerate(order)
    }


@given(asked(layer=2), shares, pools)
def test_hybrid_keeps_the_top_of_both_rankings(candidates: Candidates, ratio: float, pool: Pool) -> None:
    assert candidates.deviation is not None
    keep = masked(Hybrid((2,), (ratio,), early=1.0, rank="either", pool=pool), candidates)
    n = len(candidates.positions)
    count = min(round(ratio * candidates.total), n)
    assert int(keep.sum()) == count
    by_deviation = torch.argsort(candidates.deviation, descending=True, stable=True)
    by_attention = torch.argsort(ranks_by_attention(candidates, pool, lead=1))
    for order in (by_deviation, by_attention):
        assert keep[order[: count // 2]].all()
    top = set(by_deviation[:count].tolist()) | set(by_attention[:count].tolist())
    assert set(keep.nonzero()[:, 0].tolist()) <= top
    # by deviation alone it is hkvd
    keep = masked(Hybrid((2,), (ratio,), early=1.0, rank="deviation"), candidates)
    hkvd = masked(Hkvd((2,), (ratio,)), candidates)
    assert candidates.deviation[keep].sort().values.tolist() == candidates.deviation[hkvd].sort().values.tolist()
    candidates = replace(candidates, layer=None, deviation=None)  # at the start its share is query's
    keep = masked(Hybrid((1,), (0.0,), early=ratio, pool=pool), candidates)
    assert torch.equal(keep, masked(Query(ratio, pool=pool), candidates))
    for selector in (Query(1.0), Hybrid((1,), (1.0,), 1.0), AllRows()):  # everything is everything
        assert masked(selector, candidates).all()
    assert not masked(NoRows(), candidates).any()


STOP, MARK = 1, 2


def test_words_weigh_more_the_rarer_they_are_and_sentences_end_with_their_segment() -> None:
    for ids, question, weights in (
        ([5, 6, 5, 7, 8, 5, 6], [5, 6], [0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ([5, 6, 7, 6, 5], [3], [0.0, 1.0, 0.0, 0.0, 0.0]),  # only the question's rows count as the question
        ([5, 5, 6], [0, 1, 2], [0.0, 0.0, 0.0]),  # a question at the start gives no weights
    ):
        assert rare_words(np.array(ids, dtype="<u4"), np.array(question), question[0]).tolist() == weights
    ids = np.array([5, 6, 5, 7, 5, 8, 6, 5], dtype="<u4")
    assert rare_words(ids, np.array([1, 2]), 6).tolist() == [0.5, 0, 0, 0, 0.5, 0, 0, 0]
    assert rare_words(ids, np.array([0, 1, 2, 3, 4, 5]), 6).tolist() == [0] * 8
    assert rare_words(ids, np.array([3]), 6).tolist() == [0] * 8
    # sentences end after a run of stops and with their segment
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
