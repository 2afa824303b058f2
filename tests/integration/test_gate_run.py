"""The gate on tiny models with random weights: what passes, on which rows it is searched and confirmed."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.evaluation import gate
from cacheblend.evaluation.candidates import Candidate, grid
from cacheblend.evaluation.gate import Bar, GateRow, check, profile_of, run_gate
from cacheblend.evaluation.scorers import WordF1
from gate_rows import EXACT, LOW, WORDS, built, passages, rows, surroundings

__all__ = ["built", "surroundings"]  # fixtures


@pytest.fixture(scope="module")
def engine(built: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(built, config=BlendConfig(capture=False)) as opened:
        yield opened


def test_on_random_weights_nothing_but_full_recompute_passes(engine: BlendEngine) -> None:
    candidates = [*grid(3, ["hkvd", "none"], [0.05, 0.3]), EXACT]
    found = run_gate(engine, rows(24), candidates, LOW)
    assert found.verdict == "passed"
    assert found.chosen is not None
    assert found.chosen.candidate == EXACT
    assert found.chosen.found is not None
    assert found.chosen.found.kl < 1e-6
    assert found.chosen.found.equal_answers == 1
    assert (found.search_rows, found.confirm_rows, found.attempts) == (12, 12, 3)
    measured = {tried.candidate.name: tried.found for tried in found.searched}
    reuse, hkvd = measured["none"], measured["hkvd@1 r=0.3"]
    assert reuse is not None
    assert hkvd is not None
    assert reuse.kl > hkvd.kl > 1e-3
    assert [t.found.compute for t in found.searched if t.found] == sorted(m.compute for m in measured.values() if m)


def test_no_candidate_passes(engine: BlendEngine) -> None:
    found = run_gate(engine, rows(80), grid(3, ["none", "hkvd"], [0.1]), Bar(threshold=0.9, answer_tokens=3))
    assert (found.verdict, found.chosen, found.confirmed) == ("none passes", None, [])
    for tried in found.searched:
        assert tried.stopped
        assert tried.found is not None
        assert tried.found.rows == gate.STOP_AFTER
    profile = profile_of(engine, found)
    assert not profile.blend
    assert profile.config().make_selector() == AllRows()
    assert profile.measured.agreement is None


def test_too_few_rows_are_all_searched_and_nothing_is_confirmed(engine: BlendEngine) -> None:
    found = run_gate(engine, rows(7), [EXACT], Bar(answer_tokens=3))
    assert (found.verdict, found.search_rows, found.confirm_rows, found.confirmed) == ("too few rows", 7, 0, [])
    assert found.searched[0].found is not None
    assert found.searched[0].found.agreement == 1
    assert not found.searched[0].passes
    with pytest.raises(InvalidInputError, match="598 are needed"):
        profile_of(engine, found)


def test_what_confirms_was_not_searched(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def spy(asked: Any, *arguments: Any) -> Any:
        seen.append(asked.prompt.token_ids.tobytes())
        return original(asked, *arguments)

    original = gate.compare
    monkeypatch.setattr(gate, "compare", spy)
    progress: list[tuple[int, int]] = []
    run_gate(engine, rows(16), [EXACT], LOW, progress=lambda done, total: progress.append((done, total)))
    assert len(set(seen)) == len(seen) == 16
    assert progress == [(i, 16) for i in range(1, 17)]
    split = seen[:8]
    seen.clear()
    run_gate(engine, rows(16), [EXACT], LOW, seed=1)
    assert set(seen[:8]) != set(split)


def test_a_failed_attempt_is_followed_by_the_next_dearer(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that was lucky in the search fails on fresh rows, and the next one is tried at the split level."""
    calls = 0

    def lucky(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        sample, report = original(*arguments, **options)
        calls += 1
        is_first = arguments[1] == NoRows()
        return (gate.Sample(**{**vars(sample), "top_1": calls <= 16}) if is_first else sample), report

    original = gate.compare
    monkeypatch.setattr(gate, "compare", lucky)
    found = run_gate(engine, rows(16), [Candidate("none", {"selector": "none"}), EXACT], LOW)
    assert [tried.candidate.name for tried in found.confirmed] == ["none", "all"]
    failed, chosen = found.confirmed
    assert (failed.passes, failed.stopped, chosen.passes) == (False, True, True)
    assert found.attempts == 2
    assert chosen.found is not None
    assert chosen.found.bound == pytest.approx(0.025 ** (1 / 8))


def test_agreement_alone_does_not_pass_where_f1_falls(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = cycle([1.0, 0.0])  # full recompute is asked first
    monkeypatch.setattr(gate, "best", lambda scorer, answer, golds: next(scores))
    bar = Bar(threshold=0.6, answer_tokens=3, scorer=WordF1())
    found = run_gate(engine, rows(16, answers=("lamp",)), [EXACT], bar)
    assert found.verdict == "none passes"
    assert found.searched[0].found is not None
    assert found.searched[0].found.f1_difference == -1
    assert run_gate(engine, rows(16), [EXACT], bar).verdict == "passed", "without gold answers F1 is not asked for"


def test_rows_that_say_nothing_are_left_out_and_counted(engine: BlendEngine) -> None:
    long = GateRow([Passage(" ".join(WORDS * 12)), "?"])
    only_prefix = GateRow([Passage(passages(1)[0]), " Which?"])
    plain = GateRow(["Which lamp?"])
    found = run_gate(engine, [*rows(6), *rows(3), long, only_prefix, plain], [EXACT], LOW)
    assert vars(found.skipped) == {"too_long": 1, "repeated": 3, "nothing_to_blend": 2, "same_passages": 0}
    assert found.search_rows + found.confirm_rows == 6
    with pytest.raises(InvalidInputError, match="1 exceed the model's context"):
        run_gate(engine, [long], [EXACT], LOW)
    with pytest.raises(InvalidInputError, match="no candidate"):
        run_gate(engine, rows(2), [], LOW)


def test_rows_of_the_same_passages_stay_on_one_side_and_count_once(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three questions to each of 12 pairs of passages, one of them with the pair the other way round."""
    asked = [
        GateRow(["Town. ", *map(Passage, passages(i)[:: (1, 1, -1)[n]]), f" Which {WORDS[n]}?"])
        for n in range(3)
        for i in range(12)
    ]
    seen: list[frozenset[bytes]] = []

    def spy(asked: Any, *arguments: Any) -> Any:
        seen.append(frozenset(chunk.token_ids.tobytes() for chunk in asked.prompt.chunks))
        return original(asked, *arguments)

    original = gate.compare
    monkeypatch.setattr(gate, "compare", spy)
    found = run_gate(engine, asked, [EXACT], LOW)
    assert (found.search_rows, found.confirm_rows, found.passage_sets, found.skipped.same_passages) == (18, 6, 12, 12)
    searched, confirmed = seen[:18], seen[18:]
    assert {searched.count(one) for one in searched} == {3}
    assert len(set(confirmed)) == 6
    assert not set(searched) & set(confirmed)
    assert found.attempts == 1, "36 rows, but 6 independent ones to confirm on"
    assert found.chosen is not None
    assert found.chosen.found is not None
    assert found.chosen.found.bound == pytest.approx(0.05 ** (1 / 6))
    assert check(engine, asked, AllRows(), LOW)[1].rows == 12


def test_what_computes_as_much_as_full_recompute_never_passes(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dear(*arguments: Any, **options: Any) -> Any:
        sample, report = original(*arguments, **options)
        return gate.Sample(**{**vars(sample), "compute": 1.0}), report

    original = gate.compare
    monkeypatch.setattr(gate, "compare", dear)
    found = run_gate(engine, rows(24), [EXACT], LOW)
    assert (found.verdict, found.confirmed) == ("none passes", [])
    assert found.searched[0].found is not None
    assert found.searched[0].found.agreement == 1


def test_a_store_without_room_is_no_proof_of_agreement(built: Path) -> None:
    with (
        BlendEngine.from_pretrained(built, store="memory://?max_bytes=4KiB", config=BlendConfig(block_size=4)) as small,
        pytest.raises(InvalidInputError, match="give a larger store"),
    ):
        run_gate(small, rows(4), [EXACT], LOW)


def test_a_chosen_setting_is_checked_on_fresh_data(engine: BlendEngine) -> None:
    holds, found = check(engine, rows(8, seed=1), AllRows(), LOW)
    assert holds
    assert (found.rows, found.agreed) == (8, 8)
    holds, found = check(engine, rows(8, seed=1), Hkvd(ratios=(0.0,)), LOW)
    assert not holds
    assert found.rows == 8
