"""Selectors that use the question: rows that it attends to, alone or combined with rows of high deviation.

`Candidates.attention` holds the question's attention (see `core.fuse.question`). It is pooled over spans of the text,
because a row that is attended to is rarely the only row of its sentence that must be right.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard, get_args

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.select.checks import check_measure, check_ratio, check_schedule
from cacheblend.core.select.selectors import (
    Candidates,
    FoundSpan,
    Selector,
    measured,
    row_count,
)

Pool = Literal["sentence"] | int
"""What attention is pooled over: sentences, or spans of this many tokens (1: single rows). The attention of a span is
the highest of its rows."""

Rank = Literal["deviation", "either"]
"""What `Hybrid` ranks rows by at check layers; ``either``: the better of the ranks by deviation and by attention."""

SPAN_WITHOUT_SENTENCES = 16  # tokens
MOST_HOPS = 4
MOST_HOP_SPANS = 8
_LONGEST_SPAN = 1 << 31


@dataclass(frozen=True)
class Query(Selector):
    """The rows that the question attends to most, span by span (ProphetKV and InfoFlow-KV select rows similarly).

    Attributes:
        ratio: share of all candidates that is recomputed.
        pool: see `Pool`; where sentences are unknown, spans of `SPAN_WITHOUT_SENTENCES` tokens.
        lead: spans in front of an attended span that are selected with it.
        head_rows: rows at the head of a chunk that count half as much as the chunk's most attended row; 0: none. What a
            chunk's first rows hold was computed without any text in front of it, and the rows behind build on it.
        question_rows: most rows of the question whose attention is used.
        words: weight of the question's rare words, added to its attention, see `core.select.text_cues`; 0: none.
        hops: how often the best spans found so far are asked in turn, see `core.fuse.question`; 0: not at all.
        hop_spans: most spans that a hop asks.
        hop_rows: most rows of a span that ask with their attention, at least 2; 0: only its rare words are looked for,
            which computes nothing.
    """

    ratio: float
    pool: Pool = "sentence"
    lead: int = 1
    head_rows: int = 0
    question_rows: int = 64
    words: float = 0.0
    hops: int = 0
    hop_spans: int = 2
    hop_rows: int = 64

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        _check_question(self)
        _check_hops(self)

    def found_spans(self, candidates: Candidates, count: int) -> list[FoundSpan]:
        """See `Selector`."""
        return spans_by_attention(candidates, self.pool, self.words, count)

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Whole spans in order of attention; of the first span that does not fit, the rows with the most attention."""
        ranks = ranks_by_attention(candidates, self.pool, self.lead, self.words, self.head_rows)
        return _first_rows(ranks, row_count(self.ratio, candidates.total))


@dataclass(frozen=True)
class Hybrid(Selector):
    """A share selected by the question's attention before layer 0, then smaller shares at check layers.

    With `early` 1 and rank ``either`` it selects the union of both rankings at the check layers.

    Attributes:
        check_layers: ascending, each at least 1.
        ratios: for each check layer, the share of all candidates that stays active after it.
        early: share of all candidates that is active from layer 0 on, at least `ratios[0]`; 1: all candidates.
        rank: see `Rank`.
        measure: deviation over K and V, or one of them.
        pool: see `Pool`.
        lead: as for `Query`.
        head_rows: as for `Query`.
        question_rows: as for `Query`.
        words: as for `Query`.
        hops: as for `Query`.
        hop_spans: as for `Query`.
        hop_rows: as for `Query`.
    """

    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    early: float = 0.45
    rank: Rank = "either"
    measure: Measure = "kv"
    pool: Pool = "sentence"
    lead: int = 1
    head_rows: int = 0
    question_rows: int = 64
    words: float = 0.0
    hops: int = 0
    hop_spans: int = 2
    hop_rows: int = 64
    at_start: ClassVar[bool] = True  # besides the check layers

    def __post_init__(self) -> None:
        check_schedule(self.check_layers, self.ratios)
        check_measure(self.measure)
        check_ratio(self.early)
        _check_question(self)
        _check_hops(self)
        if self.early < self.ratios[0]:
            raise InvalidInputError(
                f"the early share {self.early} is below the first check layer's ratio {self.ratios[0]}; "
                "rows that were dropped cannot be brought back, so raise it or lower the ratios"
            )
        if self.rank not in get_args(Rank):
            raise InvalidInputError(f"rank must be one of {', '.join(get_args(Rank))}, got {self.rank!r}")

    @property
    def share(self) -> float:
        """The last check layer's ratio."""
        return self.ratios[-1]

    def found_spans(self, candidates: Candidates, count: int) -> list[FoundSpan]:
        """See `Selector`."""
        return spans_by_attention(candidates, self.pool, self.words, count)

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Before layer 0 the rows of highest attention; at check layers the rows of best rank."""
        by_attention = ranks_by_attention(candidates, self.pool, self.lead, self.words, self.head_rows)
        if candidates.layer is None:
            return _first_rows(by_attention, row_count(self.early, candidates.total))
        deviation, layer = measured(candidates)
        ranks = _ranks(torch.argsort(deviation, descending=True, stable=True))
        if self.rank == "either":  # alternates between the rankings, deviation first; all keys are distinct
            ranks = torch.minimum(2 * ranks, 2 * by_attention + 1)
        ratio = self.ratios[self.check_layers.index(layer)]
        return _first_rows(ranks, row_count(ratio, candidates.total))


def ranks_by_attention(
    candidates: Candidates, pool: Pool, lead: int = 0, words: float = 0.0, head_rows: int = 0
) -> torch.Tensor:
    """The rank of each row, [n] int64 from 0: spans by their highest attention, then the rows of a span by their own.

    Ties go to the first. For the attention of a row see `_attention_of`. The attention of a span is also given to the
    `lead` spans in front of it in the same segment: models often keep the content of a sentence in the first tokens of
    the next one, and the KV of those tokens is only right if the sentence itself was recomputed. The first `head_rows`
    rows of a segment have at least half of the segment's highest attention: they rank behind what was found, and in
    front of what is hardly attended to.

    Raises:
        InvalidInputError: the candidates have no attention.
    """
    attention, segments = _attention_of(candidates, words)
    span = _span_numbers(candidates, segments, pool)
    best = attention.new_full((len(attention),), -torch.inf).scatter_reduce(0, span, attention, "amax")
    best = _with_lead(best, torch.zeros_like(span).scatter(0, span, segments), lead)
    by_row = torch.argsort(attention, descending=True, stable=True)
    span_ranks = _ranks(torch.argsort(best, descending=True, stable=True))
    order = by_row[torch.argsort(span_ranks[span[by_row]], stable=True)]
    if head_rows:
        wanted = _with_heads(best[span], attention, segments, candidates.chunk_offsets < head_rows)
        order = order[torch.argsort(wanted[order], descending=True, stable=True)]
    return _ranks(order)


def spans_by_attention(candidates: Candidates, pool: Pool, words: float, count: int) -> list[FoundSpan]:
    """The spans of highest attention, at most `count`, the highest first; ties go to the first, and spans without any
    are left out. Waits for the device.

    Raises:
        InvalidInputError: the candidates have no attention.
    """
    attention, segments = _attention_of(candidates, words)
    span = _span_numbers(candidates, segments, pool)
    best = attention.new_full((len(attention),), -torch.inf).scatter_reduce(0, span, attention, "amax")
    order = torch.argsort(best, descending=True, stable=True)[:count]
    rows = torch.arange(len(span), device=span.device)
    first = torch.full_like(rows, len(rows)).scatter_reduce(0, span, rows, "amin")
    length = torch.zeros_like(rows).scatter_add(0, span, torch.ones_like(rows))
    found = torch.stack([first[order].float(), length[order].float(), best[order]])  # exact: below 2**24 rows
    return [FoundSpan(int(at), int(at + n), most) for at, n, most in zip(*found.tolist(), strict=True) if most > 0]


def _attention_of(candidates: Candidates, words: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How much the rows are wanted, [n] fp32, and their segments, [n].

    The question's attention, raised by `words` times the weight of its rare words; or what the hops found, where that
    is more: the attention of the spans that were asked, or `words` times the weight of their rare words.
    """
    if candidates.attention is None or candidates.segments is None:
        raise InvalidInputError("this selector decides by the question's attention and was called without it")
    attention = candidates.attention
    if words and candidates.words is not None:
        attention = attention + words * candidates.words
    if candidates.hops is not None:
        attention = torch.maximum(attention, candidates.hops)
    if words and candidates.hop_words is not None:
        attention = torch.maximum(attention, words * candidates.hop_words)
    return attention, candidates.segments


def _span_numbers(candidates: Candidates, segments: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Each row's span, [n] int64 from 0, ascending without gaps."""
    spans = _spans(candidates, segments, pool)
    numbers = torch.zeros_like(spans)
    numbers[1:] = (spans[1:] != spans[:-1]).cumsum(0)
    return numbers


def _with_lead(best: torch.Tensor, segment: torch.Tensor, lead: int) -> torch.Tensor:
    """Attention of spans [n], raised to the highest of the next `lead` spans of the same segment."""
    raised = best.clone()
    for ahead in range(1, min(lead, len(best) - 1) + 1):
        within = segment[ahead:] == segment[:-ahead]
        raised[:-ahead] = torch.where(within, torch.maximum(raised[:-ahead], best[ahead:]), raised[:-ahead])
    return raised


def _with_heads(
    wanted: torch.Tensor, attention: torch.Tensor, segments: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """How much rows are wanted [n], raised for `heads` (boolean [n]) to half of their segment's highest attention."""
    numbers = torch.zeros_like(segments)
    numbers[1:] = (segments[1:] != segments[:-1]).cumsum(0)
    most = torch.full_like(attention, -torch.inf).scatter_reduce(0, numbers, attention, "amax")[numbers]
    return torch.where(heads, torch.maximum(wanted, most / 2), wanted)


def _spans(candidates: Candidates, segments: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Each row's span, [n] int64, ascending; no span crosses segments."""
    if pool == "sentence":
        if candidates.sentences is not None:
            return candidates.sentences
        pool = SPAN_WITHOUT_SENTENCES
    return segments * 2**32 + candidates.chunk_offsets // pool


def _ranks(order: torch.Tensor) -> torch.Tensor:
    """Inverse of an order of rows: each row's place in it, [n]."""
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks


def _first_rows(ranks: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` rows of lowest rank, ascending; ranks are unique."""
    return torch.argsort(ranks)[:count].sort().values


def _check_question(selector: Query | Hybrid) -> None:
    pool, lead, heads = selector.pool, selector.lead, selector.head_rows
    question_rows, words = selector.question_rows, selector.words
    if pool != "sentence" and not (_is_whole(pool) and 1 <= pool <= _LONGEST_SPAN):
        raise InvalidInputError(f"pool must be 'sentence' or 1 to {_LONGEST_SPAN} tokens, got {pool!r}")
    if not _is_whole(lead) or lead < 0:
        raise InvalidInputError(f"lead must be a whole number of spans, at least 0, got {lead!r}")
    if not _is_whole(heads) or heads < 0:
        raise InvalidInputError(f"head_rows must be a whole number of rows, at least 0, got {heads!r}")
    if not _is_whole(question_rows) or question_rows < 2:
        raise InvalidInputError(
            f"question_rows must be a whole number, at least 2 (the first row is generic), got {question_rows!r}"
        )
    if not isinstance(words, int | float) or isinstance(words, bool) or not (math.isfinite(words) and words >= 0):
        raise InvalidInputError(f"question_words must be a finite weight of at least 0, got {words!r}")


def _check_hops(selector: Query | Hybrid) -> None:
    hops, spans, rows = selector.hops, selector.hop_spans, selector.hop_rows
    if not _is_whole(hops) or not 0 <= hops <= MOST_HOPS:
        raise InvalidInputError(f"hops must be a whole number, 0 to {MOST_HOPS} (0: only the question), got {hops!r}")
    if not _is_whole(spans) or not 1 <= spans <= MOST_HOP_SPANS:
        raise InvalidInputError(f"hop_spans must be a whole number of spans, 1 to {MOST_HOP_SPANS}, got {spans!r}")
    if not _is_whole(rows) or rows < 0 or rows == 1:
        raise InvalidInputError(
            f"hop_rows must be a whole number, at least 2 (the first row is generic), or 0 (words alone), got {rows!r}"
        )
    if hops and not rows and not selector.words:
        raise InvalidInputError("hops with hop_rows 0 look for words alone; set question_words above 0, or hop_rows")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
