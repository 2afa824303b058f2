"""Selectors that ask the question: the loaded rows it attends to, alone or beside those of high deviation.

What the question attends to stands in `Candidates.attention` (see `core.fuse.question`). It is pooled over spans of the
text, since the row that is attended to is rarely the only one of its sentence that must be right.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard, get_args

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import (
    Candidates,
    Measure,
    check_measure,
    check_ratio,
    check_schedule,
    measured,
    row_count,
)

Pool = Literal["sentence"] | int
"""What attention is pooled over: sentences, or spans of so many tokens (1: single rows). A span's attention is its
highest row's."""

Rank = Literal["deviation", "either"]
"""What `Hybrid` ranks rows by at check layers; ``either``: the better of its ranks by deviation and by attention."""

SPAN_WITHOUT_SENTENCES = 16  # tokens
_LONGEST_SPAN = 1 << 31


@dataclass(frozen=True)
class Query:
    """The rows that the question attends to most, span by span (ProphetKV and InfoFlow-KV select rows alike).

    Attributes:
        ratio: share of all candidates that is recomputed.
        pool: see `Pool`; where nobody knows sentences, spans of `SPAN_WITHOUT_SENTENCES` tokens.
        lead: spans in front of an attended one that are taken with it.
        question_rows: of the question, at most, that are asked.
        words: weight of the question's rare words beside its attention, see `core.select.text_cues`; 0: none.
    """

    ratio: float
    pool: Pool = "sentence"
    lead: int = 1
    question_rows: int = 64
    words: float = 0.0
    check_layers: ClassVar[tuple[int, ...]] = ()
    measure: ClassVar[Measure] = "kv"
    at_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        _check_asking(self.pool, self.lead, self.question_rows, self.words)

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Whole spans in order of attention; of the one that no longer fits, the rows attended to most."""
        ranks = ranks_by_attention(candidates, self.pool, self.lead, self.words)
        return _first_rows(ranks, row_count(self.ratio, candidates.total))


@dataclass(frozen=True)
class Hybrid:
    """A share kept by the question's attention before layer 0, then falling shares at check layers.

    With `early` 1 and rank ``either`` it is the union of both rankings at the check layers.

    Attributes:
        check_layers: ascending, each at least 1.
        ratios: for each check layer, the share of all candidates that stays active behind it.
        early: share of all candidates that is active from layer 0 on, at least `ratios[0]`; 1: all of them.
        rank: see `Rank`.
        measure: deviation over K and V, or one of them.
        pool: see `Pool`.
        lead: as for `Query`.
        question_rows: of the question, at most, that are asked.
        words: as for `Query`.
    """

    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    early: float = 0.45
    rank: Rank = "either"
    measure: Measure = "kv"
    pool: Pool = "sentence"
    lead: int = 1
    question_rows: int = 64
    words: float = 0.0
    at_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_schedule(self.check_layers, self.ratios)
        check_measure(self.measure)
        check_ratio(self.early)
        _check_asking(self.pool, self.lead, self.question_rows, self.words)
        if self.early < self.ratios[0]:
            raise InvalidInputError(
                f"the early share {self.early} is below the first check layer's ratio {self.ratios[0]}; "
                "rows that were dropped cannot be brought back, so raise it or lower the ratios"
            )
        if self.rank not in get_args(Rank):
            raise InvalidInputError(f"rank must be one of {', '.join(get_args(Rank))}, got {self.rank!r}")

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Before layer 0 by attention; at check layers the best ranks."""
        by_attention = ranks_by_attention(candidates, self.pool, self.lead, self.words)
        if candidates.layer is None:
            return _first_rows(by_attention, row_count(self.early, candidates.total))
        deviation, layer = measured(candidates)
        ranks = _ranks(torch.argsort(deviation, descending=True, stable=True))
        if self.rank == "either":  # rows in turns: no two keys are alike, and of equal ranks deviation's comes first
            ranks = torch.minimum(2 * ranks, 2 * by_attention + 1)
        ratio = self.ratios[self.check_layers.index(layer)]
        return _first_rows(ranks, row_count(ratio, candidates.total))


def ranks_by_attention(candidates: Candidates, pool: Pool, lead: int = 0, words: float = 0.0) -> torch.Tensor:
    """[n] int64 from 0: spans by their highest attention, rows of a span by their own; of equal ones the first.

    A row with a rare word of the question counts as attended to by so much more: `words` times what the word tells.
    The `lead` spans in front of one (of the same segment) count as attended to as much: what a sentence says is often
    kept where the next one begins, and the row that is read there is only as right as the sentence it was made from.

    Raises:
        InvalidInputError: the candidates come without attention.
    """
    if candidates.attention is None or candidates.segments is None:
        raise InvalidInputError("this selector decides by the question's attention and was asked without it")
    attention = candidates.attention
    if words and candidates.words is not None:
        attention = attention + words * candidates.words
    _, span = torch.unique(_spans(candidates, candidates.segments, pool), return_inverse=True)
    best = attention.new_full((len(attention),), -torch.inf).scatter_reduce(0, span, attention, "amax")
    best = _with_lead(best, torch.zeros_like(span).scatter(0, span, candidates.segments), lead)
    by_row = torch.argsort(attention, descending=True, stable=True)
    span_ranks = _ranks(torch.argsort(best, descending=True, stable=True))
    return _ranks(by_row[torch.argsort(span_ranks[span[by_row]], stable=True)])


def _with_lead(best: torch.Tensor, segment: torch.Tensor, lead: int) -> torch.Tensor:
    """Attention of spans [n], raised to that of the next `lead` spans of the same segment."""
    raised = best.clone()
    for ahead in range(1, min(lead, len(best) - 1) + 1):
        within = segment[ahead:] == segment[:-ahead]
        raised[:-ahead] = torch.where(within, torch.maximum(raised[:-ahead], best[ahead:]), raised[:-ahead])
    return raised


def _spans(candidates: Candidates, segments: torch.Tensor, pool: Pool) -> torch.Tensor:
    """[n] int64: equal for rows of one span, ascending; no span crosses segments."""
    if pool == "sentence":
        if candidates.sentences is not None:
            return candidates.sentences
        pool = SPAN_WITHOUT_SENTENCES
    return segments * 2**32 + candidates.chunk_offsets // pool


def _ranks(order: torch.Tensor) -> torch.Tensor:
    """Each row's place in an order of rows, [n]."""
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks


def _first_rows(ranks: torch.Tensor, count: int) -> torch.Tensor:
    """Boolean [n]: the `count` rows of lowest rank; ranks are unique."""
    keep = torch.zeros(len(ranks), dtype=torch.bool, device=ranks.device)
    keep[torch.argsort(ranks)[:count]] = True
    return keep


def _check_asking(pool: Pool, lead: int, question_rows: int, words: float) -> None:
    if pool != "sentence" and not (_is_whole(pool) and 1 <= pool <= _LONGEST_SPAN):
        raise InvalidInputError(f"pool must be 'sentence' or 1 to {_LONGEST_SPAN} tokens, got {pool!r}")
    if not _is_whole(lead) or lead < 0:
        raise InvalidInputError(f"lead must be a whole number of spans, at least 0, got {lead!r}")
    if not _is_whole(question_rows) or question_rows < 2:
        raise InvalidInputError(
            f"question_rows must be a whole number, at least 2 (the first row is generic), got {question_rows!r}"
        )
    if not isinstance(words, int | float) or isinstance(words, bool) or not (math.isfinite(words) and words >= 0):
        raise InvalidInputError(f"question_words must be a finite weight of at least 0, got {words!r}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
