"""The gate's statistics against known values and slow sums; its grid; summaries of samples."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.question_selectors import Hybrid
from cacheblend.core.select.selectors import Gradual, Hkvd, NoRows
from cacheblend.engines.bounds import allowed_errors, lower_bound, needed_rows, reaches, share_interval
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.evaluation import gate
from cacheblend.evaluation.bootstrap import mean_lower_bound
from cacheblend.evaluation.candidates import Candidate, expected_compute, grid
from cacheblend.evaluation.gate import (
    Bar,
    GateRun,
    Sample,
    Skipped,
    Summary,
    Tried,
    attempts_for,
    promising,
    run_gate,
    summarise,
)
from cacheblend.evaluation.scorers import equal_share
from cacheblend.nano import model_path

confidences = st.floats(0.5, 0.999)


def exact_tail(successes: int, trials: int, proportion: float) -> float:
    """Probability of so many successes or more, by exact coefficients."""
    return math.fsum(
        math.comb(trials, k) * proportion**k * (1 - proportion) ** (trials - k) for k in range(successes, trials + 1)
    )


# ---- bounds -----------------------------------------------------------------------------------------------
def test_bounds_of_counts_and_means() -> None:
    for successes, trials, confidence, bound in (
        (299, 299, 0.95, 0.05 ** (1 / 299)),  # 0.99003
        (298, 299, 0.95, 0.984233),
        (8, 10, 0.95, 0.493099),  # a two-sided 90 % interval's end in Clopper and Pearson's tables: 0.493
        (682, 925, 0.975, 0.7076683),  # R, binom.test(682, 925)
        (0, 10, 0.95, 0.0),
        (1, 10, 0.95, 1 - 0.95 ** (1 / 10)),
    ):
        assert lower_bound(successes, trials, confidence) == pytest.approx(bound, abs=1e-6)
    # R, binom.test(k, 6)$conf.int
    assert share_interval(6, 6, 0.95) == (pytest.approx(0.5407419, abs=1e-6), 1)
    assert share_interval(0, 6, 0.95) == (0, pytest.approx(0.4592581, abs=1e-6))
    assert share_interval(3, 6, 0.95) == (pytest.approx(0.1181172, abs=1e-6), pytest.approx(0.8818828, abs=1e-6))
    # 299 rows without an error show 99 percent and 298 do not
    assert lower_bound(299, 299, 0.95) >= 0.99 > lower_bound(298, 298, 0.95)
    # Success-run tables for 99 % reliability at 95 % confidence, with 0..3 failures.
    assert [needed_rows(0.99, 0.95, errors) for errors in range(4)] == [299, 473, 628, 773]
    assert [allowed_errors(rows, 0.99, 0.95) for rows in (298, 299, 472, 473)] == [-1, 0, 0, 1]
    with pytest.raises(InvalidInputError, match=r"0\.999999 at the confidence 0\.95 needs 299573\d rows, .*lower one"):
        needed_rows(0.999999, 0.95, 4)
    # The bound errs as seldom as it says
    proportion, trials = 0.9, 50
    wrong = sum(
        math.comb(trials, k) * proportion**k * (1 - proportion) ** (trials - k)
        for k in range(trials + 1)
        if lower_bound(k, trials, 0.95) > proportion
    )
    assert 0 < wrong <= 0.05
    # Many trials do not overflow
    assert lower_bound(50_000, 100_000, 0.95) == pytest.approx(0.5 - 1.645 * math.sqrt(0.25 / 100_000), abs=1e-4)
    # A means bound
    assert mean_lower_bound([0.25] * 7, 0.95) == 0.25
    values = np.random.default_rng(1).normal(0.5, 1.0, 400)
    normal = values.mean() - 1.645 * values.std() / math.sqrt(400)
    assert mean_lower_bound(values, 0.95) == pytest.approx(normal, abs=0.01)
    assert mean_lower_bound(values, 0.99) < mean_lower_bound(values, 0.95) < values.mean()
    assert mean_lower_bound(values, 0.95, seed=3) == mean_lower_bound(values, 0.95, seed=3)
    with pytest.raises(InvalidInputError):
        mean_lower_bound([], 0.95)


@given(st.data(), st.integers(1, 60), confidences)
def test_the_bound_is_where_the_tail_has_the_error(data: st.DataObject, trials: int, confidence: float) -> None:
    successes = data.draw(st.integers(1, trials))
    bound = lower_bound(successes, trials, confidence)
    assert 0 < bound < successes / trials or bound == pytest.approx(successes / trials)
    assert exact_tail(successes, trials, bound) == pytest.approx(1 - confidence, rel=1e-6)


@given(st.data(), st.integers(1, 400), confidences, st.floats(0.01, 0.999))
def test_reaches_holds_the_bound_against_a(
    data: st.DataObject, trials: int, confidence: float, threshold: float
) -> None:
    successes = data.draw(st.integers(0, trials))
    bound = lower_bound(successes, trials, confidence)
    if abs(bound - threshold) > 1e-9:
        assert reaches(successes, trials, threshold, confidence) == (bound > threshold)


# ---- the plan ---------------------------------------------------------------------------------------------
def test_the_grid() -> None:
    # The grid goes from cheap to dear
    found = grid(12)
    computes = [expected_compute(candidate, 12) for candidate in found]
    assert computes == sorted(computes)
    assert {candidate.settings["selector"] for candidate in found} == {"head", "hkvd", "query", "hybrid"}
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        assert BlendConfig(**candidate.settings).make_selector() == candidate.selector()
    # The grid takes what a user names
    found = grid(12, ["hkvd", "none"], [0.2])
    assert [candidate.name for candidate in found] == ["none", "hkvd@1 r=0.2", "hkvd@2 r=0.2"]
    assert found[1].selector() == Hkvd((1,), (0.2,))
    assert found[0].selector() == NoRows()
    assert grid(12, ["gradual"], [0.2])[0].selector() == Gradual(0.2)
    found = grid(2, ["hkvd", "gradual"], [0.2])
    assert [candidate.name for candidate in found] == ["hkvd@1 r=0.2", "gradual r=0.2"]
    # The grid takes further settings of a selector
    found = grid(12, ["query:pool=8", "hkvd:measure=v"], [0.2])
    assert [candidate.name for candidate in found] == ["query:pool=8 r=0.2", "hkvd@1:measure=v r=0.2",
                                                       "hkvd@2:measure=v r=0.2"]  # fmt: skip
    assert found[0].settings == {"selector": "query", "pool": 8, "recompute_ratio": 0.2}
    assert found[1].selector() == Hkvd((1,), (0.2,), "v")
    # Equal selectors are measured once, and one without a ratio is named without it
    found = grid(12, ["threshold:threshold=5", "hkvd", "hkvd:measure=kv", "head", "head"], [0.2, 0.3])
    assert [each.name for each in found if "threshold" in each.name] == ["threshold:threshold=5"]
    assert len(found) == 1 + 4 + 2
    # Expected compute of rows that are all loaded
    by_name = {candidate.name: expected_compute(candidate, 10) for candidate in grid(10, ratios=[0.2])}
    assert by_name["hkvd@1 r=0.2"] == pytest.approx((1 + 0.2 * 9) / 10)
    assert by_name["gradual r=0.2"] == pytest.approx((1 + 0.2 * 9) / 10)
    assert by_name["query r=0.2"] == pytest.approx(0.2)
    # The kind of setting that ships: at its mean share of rows the shipped profile; deeper models check deeper
    (found,) = grid(12, ["narrowing"], [1.55 / 12])
    shipped, selector = read_profile(model_path() / PROFILE_NAME).selection.make_selector(), found.selector()
    assert isinstance(shipped, Hybrid) and isinstance(selector, Hybrid)
    assert (selector.early, *selector.ratios) == pytest.approx((shipped.early, *shipped.ratios))
    assert replace(selector, early=shipped.early, ratios=shipped.ratios) == shipped
    assert expected_compute(found, 12) == pytest.approx(1.55 / 12)
    (deep,) = grid(32, ["narrowing:hops=1"], [0.15])
    assert deep.selector().check_layers == (5, 8, 10) and deep.settings["hops"] == 1
    assert expected_compute(deep, 32) == pytest.approx(0.15)
    (most,) = grid(12, ["narrowing"], [1.0])
    assert most.selector() == replace(shipped, early=1.0, ratios=(1.0, 1.0, 1.0))
    with pytest.raises(InvalidInputError, match="too few for the check layers of narrowing"):
        grid(8, ["narrowing"])


def test_counts_bars_and_grids_that_cannot_be_are_refused() -> None:
    for counts in ((3, 2, 0.95), (-1, 2, 0.95), (0, 0, 0.95), (1, 2, 1.0), (1, 2, math.nan)):
        with pytest.raises(InvalidInputError):
            lower_bound(*counts)
    for wrong in ({"threshold": 1.0}, {"threshold": 0.0}, {"confidence": 1.0}, {"answer_tokens": 0}):
        with pytest.raises(InvalidInputError):
            Bar(**wrong)  # type: ignore[arg-type]
    few = "too few for the check layers of gradual"
    for arguments, message in (
        ((12, ["best"]), "'best'"),
        ((12, [], [2.0]), "0..1"),
        ((2, ["all"]), "compared with"),
        ((1, ["gradual"]), few),
    ):
        with pytest.raises(InvalidInputError, match=message):
            grid(*arguments)  # type: ignore[arg-type]


# ---- samples ----------------------------------------------------------------------------------------------
def sample(
    top_1: bool = True, scores: tuple[float, float] | None = None, equal: float | None = None, compute: float = 0.2
) -> Sample:
    score, full = scores or (None, None)
    return Sample(top_1, 0.1, equal, None if equal is None else equal == 1, compute, 1.0, 4.0, score, full)


def test_summaries_are_held_against_the_bar_and_who_is_tried_after_the_search() -> None:
    # A summary
    found = summarise([sample(), sample(top_1=False, compute=0.4, equal=0.5), sample(equal=1.0, scores=(0.5, 1.0))])
    assert (found.rows, found.agreed, found.f1_rows) == (3, 2, 1)
    assert found.bound == lower_bound(2, 3, 0.95)
    assert found.compute == pytest.approx(0.8 / 3)
    assert found.ttft_ratio == 4
    assert (found.equal_tokens, found.equal_answers) == (0.75, 0.5)
    assert (found.f1, found.f1_difference, found.f1_bound) == (0.5, -0.5, -0.5)
    without = summarise([sample()])
    assert (without.f1_bound, without.equal_tokens, without.f1_rows) == (None, None, 0)
    # F1 is held to the margin on its lower bound
    bar = Bar(threshold=0.9)
    same = [sample(scores=(1.0, 1.0))] * 40
    assert bar.is_reached(summarise(same))
    assert bar.is_reached(summarise([sample()] * 40))
    worse = [*same, *[sample(scores=(0.0, 1.0))] * 2]
    assert not bar.is_reached(summarise(worse))
    assert not bar.is_reached(summarise([*same, *[sample(top_1=False)] * 6]))
    # Attempts share the error and depend on rows alone
    bar = Bar()
    assert [attempts_for(rows, bar) for rows in (298, 299, 367, 368, 407, 408, 10_000)] == [0, 1, 1, 2, 2, 3, 3]
    assert bar.part(1).confidence == bar.confidence
    assert bar.part(3).confidence == pytest.approx(1 - 0.05 / 3)
    # Who passed the search is tried cheapest first
    searched = [tried("a", False, 99), tried("b", True, 100), tried("c", False, 80, stopped=True), tried("d", True, 99)]
    assert [one.candidate.name for one in promising(searched, Bar())] == ["b", "d"]
    # Where none passed the one that failed least is tried
    searched = [tried("a", False, 90), tried("b", False, 99), tried("c", False, 100, stopped=True)]
    assert [one.candidate.name for one in promising(searched, Bar())] == ["b"]
    assert promising([tried("a", False, 90)], Bar()) == []


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_equal_share_counts_to_the_first_difference(a: list[int], b: list[int]) -> None:
    longest = max(len(a), len(b))
    equal = 0
    while equal < min(len(a), len(b)) and a[equal] == b[equal]:
        equal += 1
    assert equal_share(a, b) == (equal / longest if longest else 1.0)
    assert (equal_share(a, b) == 1.0) == (a == b)


def tried(name: str, passes: bool, agreed: int, *, rows: int = 100, stopped: bool = False) -> Tried:
    found = summarise([sample(i < agreed) for i in range(rows)])
    assert isinstance(found, Summary)
    return Tried(Candidate(name, {}), found, passes, stopped)


# ---- the whole of it --------------------------------------------------------------------------------------
def test_settings_that_just_miss_the_bar_pass_as_seldom_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve settings of 90 % agreement, 90 % asked for, 150 gates: choosing the luckiest would pass most of them."""
    draw = np.random.default_rng(0)
    agree, differ = sample(), sample(top_1=False)

    def measure(run: GateRun, row: object, selectors: list[object], *, with_answers: bool) -> list[Sample]:
        return [agree if lucky else differ for lucky in draw.random(len(selectors)) < 0.9]

    monkeypatch.setattr(GateRun, "measure", measure)
    monkeypatch.setattr(gate, "prepare", lambda engine, rows, seed: ([[row] for row in rows], Skipped()))
    candidates = [Candidate(str(i), {"selector": "all"}) for i in range(12)]
    bar = Bar(threshold=0.9)
    gates = [run_gate(None, [None] * 120, candidates, bar) for _ in range(150)]  # type: ignore[arg-type, list-item]
    assert {found.attempts for found in gates} == {3}
    assert sum(found.verdict == "passed" for found in gates) <= 150 * 0.05 + 3 * math.sqrt(150 * 0.05 * 0.95)
    assert sum(any(tried.passes for tried in found.searched) for found in gates) > 150 * 0.15
