"""Which tokens of a request are chunks, by the first of three ways that applies:

1. spans that the client names in `kv_transfer_params`,
2. runs that end with the configured chunk-end token,
3. runs that match chunks in the store.

Knows token ids. Does not know vLLM.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text

Span = tuple[int, int]
"""[start, stop) of a prompt's tokens."""

MOST_SPANS = 2048
"""Chunks that a client may name: they are checked in the engine's thread."""


def read_spans(given: Any, tokens: int) -> list[Span]:
    """The spans that a client names: ``[[start, stop], ...]``.

    Args:
        given: what the client sent.
        tokens: the length of the prompt.

    Returns:
        Spans in ascending order, without overlap.

    Raises:
        InvalidInputError: another form, or a span is wrong; the message names it.
    """
    if not isinstance(given, list | tuple):
        raise InvalidInputError(f"chunks must be a list of [start, stop], got {given!r}")
    if len(given) > MOST_SPANS:
        raise InvalidInputError(f"{len(given)} chunks; a request may name {MOST_SPANS}")
    spans = [_span(each, number, tokens) for number, each in enumerate(given)]
    for first, second in pairwise(spans):
        if second[0] < first[1]:
            raise InvalidInputError(
                f"chunks must ascend without overlap, and {list(second)} begins before {list(first)} ends"
            )
    return spans


def _span(given: Any, number: int, tokens: int) -> Span:
    whole = isinstance(given, list | tuple) and len(given) == 2
    if not whole or not all(isinstance(end, int) and not isinstance(end, bool) for end in given):
        raise InvalidInputError(f"chunk {number} must be [start, stop], two whole numbers, got {given!r}")
    start, stop = given
    if not 0 <= start < stop <= tokens:
        raise InvalidInputError(
            f"chunk {number} is {given!r}: a span lies within the prompt's 0..{tokens} and is not empty"
        )
    return start, stop


def ended_spans(token_ids: TokenIds, end_id: int) -> list[Span]:
    """Runs that end with a token and include it; the text after the last one is the question."""
    stops = (np.flatnonzero(token_ids == end_id) + 1).tolist()
    return list(pairwise([0, *stops]))


def with_spans(token_ids: TokenIds, spans: Sequence[Span]) -> Prompt:
    """The prompt whose chunks are these spans."""
    segments: list[Segment] = []
    at = 0
    for start, stop in spans:
        segments += [text(token_ids[at:start]), chunk(token_ids[start:stop])]
        at = stop
    return Prompt.of([*segments, text(token_ids[at:])])


def named_chunks(
    token_ids: TokenIds, spans: Sequence[Span] | None = None, chunk_end_token_id: int | None = None
) -> Prompt | None:
    """The prompt cut by the first two ways; None where neither applies, and contents decide.

    Args:
        token_ids: of the prompt, at least one.
        spans: that the client names; None: it names none.
        chunk_end_token_id: see `ConnectorConfig`.
    """
    if spans is None and chunk_end_token_id is not None:
        spans = ended_spans(token_ids, chunk_end_token_id) or None
    return None if spans is None else with_spans(token_ids, spans)
