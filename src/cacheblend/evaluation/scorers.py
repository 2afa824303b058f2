"""Scores of an answer against gold answers, 0..1. Knows texts only."""

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol

from cacheblend.core.errors import InvalidInputError

INSTALL = "pip install 'cacheblend[evaluate]'"
Encode = Callable[[str], list[int]]


class Scorer(Hashable, Protocol):
    """One way to score: a frozen dataclass."""

    @property
    def name(self) -> str:
        """For options and reports."""
        ...

    def score(self, answer: str, gold: str) -> float:
        """Of one answer against one gold answer, 0..1."""
        ...


@dataclass(frozen=True)
class ExactMatch:
    """1 if both are the same text, normalised as SQuAD's (Rajpurkar et al. 2016)."""

    name: str = "em"

    def score(self, answer: str, gold: str) -> float:
        """See `Scorer`."""
        return float(normalise(answer) == normalise(gold))


@dataclass(frozen=True)
class WordF1:
    """F1 of the normalised texts' words, as LongBench's `qa_f1_score`."""

    name: str = "f1"

    def score(self, answer: str, gold: str) -> float:
        """See `Scorer`."""
        return _f1(normalise(answer).split(), normalise(gold).split())


@dataclass(frozen=True)
class TokenF1:
    """F1 of the normalised texts' token ids, as the CacheBlend authors': the first line of the answer counts, and one
    that begins with yes or no is just that.

    Attributes:
        encode: a text's ids, without special tokens.
    """

    encode: Encode
    name: str = "f1-tokens"

    def score(self, answer: str, gold: str) -> float:
        """See `Scorer`."""
        line = answer.lstrip("\n").split("\n")[0].strip()
        if line.startswith(("Yes", "yes")):
            line = "yes"
        elif line.startswith(("No", "no")):
            line = "no"
        return _f1(self.encode(normalise(line)), self.encode(normalise(gold)))


@dataclass(frozen=True)
class RougeL:
    """F-measure of the longest common subsequence of words, stemmed (`rouge-score`)."""

    rouge: Any
    name: str = "rouge-l"

    def score(self, answer: str, gold: str) -> float:
        """See `Scorer`."""
        return float(self.rouge.score(gold, answer)["rougeL"].fmeasure)


SCORERS = ("em", "f1", "f1-tokens", "rouge-l")


def make_scorers(names: Sequence[str], encode: Encode) -> list[Scorer]:
    """The named scorers.

    Args:
        names: of `SCORERS`.
        encode: a text's token ids, without special tokens (`PromptBuilder.encode`).

    Raises:
        InvalidInputError: an unknown name, or a package that is not installed.
    """
    check_scorers(names)
    makers: dict[str, Callable[[], Scorer]] = {
        "em": ExactMatch,
        "f1": WordF1,
        "f1-tokens": lambda: TokenF1(encode),
        "rouge-l": _rouge,
    }
    return [makers[name]() for name in dict.fromkeys(names)]


def check_scorers(names: Sequence[str]) -> None:
    """Raises `InvalidInputError` for an unknown name, or a package that is not installed; imports nothing."""
    for name in names:
        if name not in SCORERS:
            raise InvalidInputError(f"no scorer is called {name!r}; there are {', '.join(SCORERS)}")
    if "rouge-l" in names and find_spec("rouge_score") is None:
        raise InvalidInputError(f"the scorer rouge-l needs the package rouge-score: {INSTALL}")


def best(scorer: Scorer, answer: str, golds: Sequence[str]) -> float:
    """The best score over the gold answers, at least one."""
    return max(_score(scorer, answer, gold) for gold in golds)


def normalise(text: str) -> str:
    """Lower case, without punctuation (ASCII), articles and superfluous white space."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@lru_cache(maxsize=1 << 16)  # arms often give the same answer
def _score(scorer: Any, answer: str, gold: str) -> float:
    found: float = scorer.score(answer, gold)
    return found


def _f1(found: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    if not found or not wanted:  # nothing is right where nothing is wanted
        return float(not found and not wanted)
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted))


def _rouge() -> Scorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeL(RougeScorer(["rougeL"], use_stemmer=True))
