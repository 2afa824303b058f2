"""Scores of an answer against gold answers, or another answer, 0..1. Knows only texts and token ids."""

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from cacheblend.core.errors import InvalidInputError

INSTALL = "pip install 'cacheblend[evaluate]'"
Encode = Callable[[str], list[int]]


class Scorer(Hashable, Protocol):
    """One way to score: a frozen dataclass."""

    @property
    def name(self) -> str:
        """The name, for options and reports."""

    def score(self, answer: str, gold: str) -> float:
        """Score of an answer against one gold answer, 0..1."""


@dataclass(frozen=True)
class ExactMatch:
    """1 if both texts are equal after normalisation as in SQuAD (Rajpurkar et al. 2016)."""

    name: str = "em"

    def score(self, answer: str, gold: str) -> float:
        return float(normalise(answer) == normalise(gold))


@dataclass(frozen=True)
class WordF1:
    """F1 over the words of the normalised texts, as `qa_f1_score` of LongBench."""

    name: str = "f1"

    def score(self, answer: str, gold: str) -> float:
        return _f1(normalise(answer).split(), normalise(gold).split())


@dataclass(frozen=True)
class TokenF1:
    """F1 over the token ids of the normalised texts, as the CacheBlend authors compute it. Only the first line of the
    answer counts; if it begins with these letters, it is reduced to yes or no."""

    encode: Encode  # gives the token ids of a text, without special tokens
    name: str = "f1-tokens"

    def score(self, answer: str, gold: str) -> float:
        line = answer.lstrip("\n").split("\n")[0].strip()
        if line.startswith(("Yes", "yes")):
            line = "yes"
        elif line.startswith(("No", "no")):
            line = "no"
        return _f1(self.encode(normalise(line)), self.encode(normalise(gold)))


@dataclass(frozen=True)
class RougeL:
    """F-measure of the longest common subsequence of stemmed words (package `rouge-score`)."""

    rouge: Any
    name: str = "rouge-l"

    def score(self, answer: str, gold: str) -> float:
        return float(self.rouge.score(gold, answer)["rougeL"].fmeasure)


@dataclass(frozen=True)
class Contains:
    """1 if the gold answer stands in the answer, as whole words normalised as in SQuAD; fit for whole sentences."""

    name: str = "contains"

    def score(self, answer: str, gold: str) -> float:
        wanted = normalise(gold)
        return float(bool(wanted) and f" {wanted} " in f" {normalise(answer)} ")


SCORERS = ("em", "contains", "f1", "f1-tokens", "rouge-l")


def make_scorers(names: Sequence[str], encode: Encode) -> list[Scorer]:
    """Makes the named scorers.

    Args:
        names: names in `SCORERS`.
        encode: gives the token ids of a text, without special tokens (`PromptBuilder.encode`).

    Raises:
        InvalidInputError: an unknown name, or a package that is not installed.
    """
    check_scorers(names)
    makers: dict[str, Callable[[], Scorer]] = {
        "em": ExactMatch,
        "contains": Contains,
        "f1": WordF1,
        "f1-tokens": lambda: TokenF1(encode),
        "rouge-l": lambda: RougeL(import_module("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)),
    }
    return [makers[name]() for name in dict.fromkeys(names)]


def check_scorers(names: Sequence[str]) -> None:
    """Raises `InvalidInputError` for an unknown name or a missing package; imports nothing."""
    for name in names:
        if name not in SCORERS:
            raise InvalidInputError(f"there is no scorer {name!r}; choose from {', '.join(SCORERS)}")
    if "rouge-l" in names and find_spec("rouge_score") is None:
        raise InvalidInputError(f"the scorer rouge-l needs the package rouge-score: {INSTALL}")


def best(scorer: Scorer, answer: str, golds: Sequence[str]) -> float:
    """The best score over one or more gold answers."""
    return max(_score(scorer, answer, gold) for gold in golds)


def equal_share(ids: Sequence[int], full: Sequence[int]) -> float:
    """Number of tokens before the first difference, as a share of the longer answer."""
    longest = max(len(ids), len(full))
    equal = next((i for i, (a, b) in enumerate(zip(ids, full, strict=False)) if a != b), min(len(ids), len(full)))
    return equal / longest if longest else 1.0


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and repeated white space."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@lru_cache(maxsize=1 << 16)  # several methods often give the same answer
def _score(scorer: Any, answer: str, gold: str) -> float:
    found: float = scorer.score(answer, gold)
    return found


def _f1(found: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    if not found or not wanted:  # an empty answer is correct if the gold answer is empty
        return float(not found and not wanted)
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted))
