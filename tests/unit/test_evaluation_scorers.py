"""Scorers against values worked out by hand, and against the definitions they follow."""

import importlib.util

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation import scorers
from cacheblend.evaluation.scorers import ExactMatch, TokenF1, WordF1, best, make_scorers, normalise


def letters(text: str) -> list[int]:
    return [ord(c) for c in text if c != " "]


def test_normalisation_is_squads() -> None:
    assert normalise(" The  Exeter-College, an (old) one!\n") == "exetercollege old one"
    assert normalise("Theatre and another") == "theatre and another"


@pytest.mark.parametrize(
    ("answer", "gold", "em", "f1"),
    [
        ("the Exeter College.", "exeter college", 1, 1),
        ("Exeter", "Exeter College", 0, 2 / 3),
        ("Exeter College in Oxford", "Exeter College", 0, 2 * 2 / 6),
        ("Oxford", "Exeter College", 0, 0),
        ("one one two", "one two two", 0, 2 / 3),
        ("", "Exeter", 0, 0),
        ("the", "a", 1, 1),
    ],
)
def test_exact_match_and_f1_by_words(answer: str, gold: str, em: float, f1: float) -> None:
    assert ExactMatch().score(answer, gold) == em
    assert WordF1().score(answer, gold) == pytest.approx(f1)


def test_f1_by_tokens_counts_ids_of_the_normalised_first_line() -> None:
    scorer = TokenF1(letters)
    assert scorer.score("\nABC.\nand more", "abd") == pytest.approx(2 / 3)
    assert scorer.score("Yes, because", "yes") == 1
    assert scorer.score("no, not at all", "no") == 1
    assert scorer.score("", "abc") == 0
    assert scorer.score("\n", "the") == 1


def test_the_best_gold_answer_counts() -> None:
    assert best(WordF1(), "Exeter", ["Oxford", "Exeter College", "Exeter"]) == 1
    assert best(WordF1(), "Exeter", ["Oxford", "Exeter College"]) == pytest.approx(2 / 3)


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    (rouge,) = make_scorers(["rouge-l"], letters)
    # "police the gunman" is not in order in the answer; "the gunman" or "police gunman" is: 2 of 4 and 2 of 4.
    assert rouge.score("the gunman police killed", "police killed the gunman") == pytest.approx(0.5)
    assert rouge.score("running", "run") == 1  # stemmed


def test_scorers_are_made_once_each_in_order() -> None:
    assert [scorer.name for scorer in make_scorers(["f1", "em", "f1", "f1-tokens"], letters)] == [
        "f1",
        "em",
        "f1-tokens",
    ]


def test_an_unknown_scorer_and_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="there is no scorer 'bleu'; choose from em, f1, f1-tokens, rouge-l"):
        make_scorers(["bleu"], letters)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(scorers, "find_spec", lambda name: None if name == "rouge_score" else find_spec(name))
    with pytest.raises(InvalidInputError, match=r"needs the package rouge-score: pip install 'cacheblend\[evaluate\]'"):
        make_scorers(["rouge-l"], letters)
