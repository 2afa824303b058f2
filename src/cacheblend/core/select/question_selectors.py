"""Selectors that use the question: rows that it attends to, alone or combined with rows of high deviation.
`Candidates.attention` holds the question's attention (see `core.fuse.question`). It is pooled over spans of the text,
because a row that is attended to is rarely the only row of its sentence that must be right."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from cacheblend.core.errors import InvalidInputError, check_fields
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.select.selectors import (
    Candidates,
    FoundSpan,
    Selector,
    check_ratio,
    check_schedule,
    measured,
    row_count,
    runs,
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
_LIMITS = {  # of whole numbers
    "lead": (0, math.inf, "a whole number of spans, at least 0"),
    "head_rows": (0, math.inf, "a whole number of rows, at least 0"),
    "question_rows": (2, math.inf, "a whole number, at least 2 (the first row is generic)"),
    "hops": (0, MOST_HOPS, f"a whole number, 0 to {MOST_HOPS} (0: only the question)"),
    "hop_spans": (1, MOST_HOP_SPANS, f"a whole number of spans, 1 to {MOST_HOP_SPANS}"),
}


@dataclass(frozen=True, kw_only=True)
class QuestionSelector(Selector):
    """What selectors that use the question's attention have in common.

    Attributes:
        pool: see `Pool`; where sentences are unknown, spans of `SPAN_WITHOUT_SENTENCES` tokens.
        lead: spans in front of an attended span that are selected with it.
        head_rows: rows at the head of a chunk that count half as much as the chunk's most attended row; 0: none. What a
            chunk's first rows hold was computed without any text in front of it, and the rows behind build on it.
        question_rows: most rows of the question whose attention is used.
        words: weight of the question's rare words, added to its attention, see `core.fuse.question`; 0: none.
        hops: how often the rare words of the best spans found so far are looked for in turn, see `core.fuse.question`,
            which needs `words`; 0: not at all.
        hop_spans: most spans that a hop follows.
    """

    pool: Pool = "sentence"
    lead: int = 1
    head_rows: int = 0
    question_rows: int = 64
    words: float = 0.0
    hops: int = 0
    hop_spans: int = 2

    def __post_init__(self) -> None:
        if self.pool != "sentence" and not _is_whole(self.pool, 1, _LONGEST_SPAN):
            raise InvalidInputError(f"pool must be 'sentence' or 1 to {_LONGEST_SPAN} tokens, got {self.pool!r}")
        for name, (least, most, wanted) in _LIMITS.items():
            value = getattr(self, name)
            if not _is_whole(value, least, most):
                raise InvalidInputError(f"{name} must be {wanted}, got {value!r}")
        words = self.words
        if not isinstance(words, int | float) or isinstance(words, bool) or not (math.isfinite(words) and words >= 0):
            raise InvalidInputError(f"question_words must be a finite weight of at least 0, got {words!r}")
        if self.hops and not words:
            raise InvalidInputError("hops look for rare words; set question_words above 0, or hops to 0")

    def found_spans(self, candidates: Candidates, count: int) -> list[FoundSpan]:
        return spans_by_attention(candidates, self.pool, self.words, count)

    def _by_attention(self, candidates: Candidates) -> torch.Tensor:
        return ranks_by_attention(candidates, self.pool, self.lead, self.words, self.head_rows)


@dataclass(frozen=True)
class Query(QuestionSelector):
    """The rows that the question attends to most, span by span (ProphetKV and InfoFlow-KV select rows similarly).

    Attributes:
        ratio: share of all candidates that is recomputed.
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        super().__post_init__()

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Whole spans in order of attention; of the first span that does not fit, the rows with the most attention."""
        return _first_rows(self._by_attention(candidates), row_count(self.ratio, candidates.total))


@dataclass(frozen=True)
class Hybrid(QuestionSelector):
    """A share selected by the question's attention before layer 0, then smaller shares at check layers.

    With `early` 1 and rank ``either`` it selects the union of both rankings at the check layers.

    Attributes:
        check_layers: see `Hkvd`, as `ratios` and `measure`.
        early: share of all candidates that is active from layer 0 on, at least `ratios[0]`; 1: all candidates.
        rank: see `Rank`.
    """

    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    early: float = 0.45
    rank: Rank = "either"
    measure: Measure = "kv"
    at_start: ClassVar[bool] = True  # besides the check layers

    def __post_init__(self) -> None:
        check_schedule(self.check_layers, self.ratios)
        check_fields(self, ("measure",))
        check_ratio(self.early)
        super().__post_init__()
        if self.early < self.ratios[0]:
            raise InvalidInputError(
                f"the early share {self.early} is below the first check layer's ratio {self.ratios[0]}; "
                "rows that were dropped cannot be brought back, so raise it or lower the ratios"
            )
        check_fields(self, ("rank",))

    @property
    def share(self) -> float:
        return self.ratios[-1]

    def select(self, candidates: Candidates) -> torch.Tensor:
        by_attention = self._by_attention(candidates)
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
    """The rank of each row, [n] int64 from 0: spans by their highest attention (`_attention_of`), then the rows of a
    span by their own. Ties go to the first. The attention of a span is also given to the `lead` spans in front of it in
    the same segment: models often keep the content of a sentence in the first tokens of the next one, and the KV of
    those tokens is only right if the sentence itself was recomputed. The first `head_rows` rows of a segment have at
    least half of the segment's highest attention: they rank behind what was found, and in front of what is hardly
    attended to."""
    attention, segments = _attention_of(candidates, words)
    span, best = _spans(candidates, segments, pool, attention)
    of_segment = torch.zeros_like(span).scatter(0, span, segments)
    wanted = best.clone()  # by span, with what those behind it lend
    for ahead in range(1, min(lead, len(best) - 1) + 1):
        more = torch.where(of_segment[ahead:] == of_segment[:-ahead], best[ahead:], -torch.inf)
        wanted[:-ahead] = torch.maximum(wanted[:-ahead], more)
    by_row = torch.argsort(attention, descending=True, stable=True)
    span_ranks = _ranks(torch.argsort(wanted, descending=True, stable=True))
    order = by_row[torch.argsort(span_ranks[span[by_row]], stable=True)]
    if head_rows:
        numbers = runs(segments)
        most = torch.full_like(attention, -torch.inf).scatter_reduce(0, numbers, attention, "amax")[numbers]
        by_span = wanted[span]
        raised = torch.where(candidates.chunk_offsets < head_rows, torch.maximum(by_span, most / 2), by_span)
        order = order[torch.argsort(raised[order], descending=True, stable=True)]
    return _ranks(order)


def spans_by_attention(candidates: Candidates, pool: Pool, words: float, count: int) -> list[FoundSpan]:
    """The spans of highest attention, at most `count`, the highest first; ties go to the first, and spans without any
    are left out. Waits for the device."""
    attention, segments = _attention_of(candidates, words)
    span, best = _spans(candidates, segments, pool, attention)
    order = torch.argsort(best, descending=True, stable=True)[:count]
    rows = torch.arange(len(span), device=span.device)
    first = torch.full_like(rows, len(rows)).scatter_reduce(0, span, rows, "amin")
    length = torch.zeros_like(rows).scatter_add(0, span, torch.ones_like(rows))
    found = torch.stack([first[order].float(), length[order].float(), best[order]])  # exact: below 2**24 rows
    return [FoundSpan(int(at), int(at + n), most) for at, n, most in zip(*found.tolist(), strict=True) if most > 0]


def _attention_of(candidates: Candidates, words: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How much the rows are wanted, [n] fp32, and their segments, [n]. The question's attention, raised by `words`
    times the weight of its rare words; or, where that is more, by `words` times the weight of those that hops found."""
    if candidates.attention is None or candidates.segments is None:
        raise InvalidInputError("this selector decides by the question's attention and was called without it")
    attention = candidates.attention
    if words and candidates.words is not None:
        attention = attention + words * candidates.words
    if words and candidates.hop_words is not None:
        attention = torch.maximum(attention, words * candidates.hop_words)
    return attention, candidates.segments


def _spans(
    candidates: Candidates, segments: torch.Tensor, pool: Pool, attention: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's span, [n] int64 from 0, ascending without gaps, none across segments; and the highest attention of
    each span, [n], -inf behind the last one."""
    if pool == "sentence" and candidates.sentences is not None:
        spans = candidates.sentences
    else:
        tokens = SPAN_WITHOUT_SENTENCES if pool == "sentence" else pool
        spans = segments * 2**32 + candidates.chunk_offsets // tokens
    span = runs(spans)
    return span, attention.new_full((len(attention),), -torch.inf).scatter_reduce(0, span, attention, "amax")


def _ranks(order: torch.Tensor) -> torch.Tensor:
    """Inverse of an order of rows: each row's place in it, [n]."""
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks


def _first_rows(ranks: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` rows of lowest rank, ascending; ranks are unique."""
    return torch.argsort(ranks)[:count].sort().values


def _is_whole(value: object, least: int, most: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
