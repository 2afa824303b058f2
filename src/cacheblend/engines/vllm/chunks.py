"""Which tokens of a request are chunks, by the first of three ways that applies:

1. spans that the client names in `kv_transfer_params`,
2. runs that end with the configured chunk-end token,
3. runs that match chunks in the store.

Knows token ids. Does not know vLLM.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.naming import TokenIds, as_token_ids
from cacheblend.core.plan.matching import ChunkIndex
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, run_of, text

KEY = "cacheblend"
"""The key of this project's object in a request's `kv_transfer_params`."""

Span = tuple[int, int]
"""[start, stop) of a prompt's tokens."""


def request_spans(params: Mapping[str, Any] | None, tokens: int) -> list[Span] | None:
    """The spans that a client names: ``{"cacheblend": {"chunks": [[start, stop], ...]}}``.

    Args:
        params: the request's `kv_transfer_params`.
        tokens: the length of its prompt.

    Returns:
        Spans in ascending order, without overlap; None if the client names none.

    Raises:
        InvalidInputError: the parameters have another form, or a span is wrong; the message names it.
    """
    if params is not None and not isinstance(params, Mapping):
        raise InvalidInputError(f"kv_transfer_params must be an object, got {params!r}")
    mine = (params or {}).get(KEY)
    if mine is None:
        return None
    if not isinstance(mine, Mapping):
        raise InvalidInputError(f'kv_transfer_params["{KEY}"] must be an object, got {mine!r}')
    unknown = sorted(set(mine) - {"chunks"})
    if unknown:
        raise InvalidInputError(f'kv_transfer_params["{KEY}"] has the unknown key {unknown[0]!r}; it has chunks')
    if "chunks" not in mine:
        return None
    if not isinstance(mine["chunks"], list | tuple):
        raise InvalidInputError(f"chunks must be a list of [start, stop], got {mine['chunks']!r}")
    spans = [_span(each, number, tokens) for number, each in enumerate(mine["chunks"])]
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


def with_matches(token_ids: TokenIds, index: ChunkIndex) -> Prompt:
    """The prompt whose chunks are the runs that the index finds."""
    segments: list[Segment] = []
    at = 0
    for match in index.match(token_ids):
        segments += [text(token_ids[at : match.start]), run_of(match.chunk, match.offset, len(match))]
        at = match.stop
    return Prompt.of([*segments, text(token_ids[at:])])


def find_chunks(
    token_ids: Sequence[int],
    params: Mapping[str, Any] | None = None,
    *,
    chunk_end_token_id: int | None = None,
    index: ChunkIndex | None = None,
) -> Prompt:
    """A request's prompt, cut into chunks and text.

    Args:
        token_ids: of the prompt.
        params: the request's `kv_transfer_params`.
        chunk_end_token_id: see `ConnectorConfig`.
        index: the store's chunks; None: contents are not matched.

    Raises:
        InvalidInputError: the client's spans are wrong, or the prompt is empty.
    """
    ids = as_token_ids(token_ids)
    spans = request_spans(params, len(ids))
    if spans is None and chunk_end_token_id is not None:
        spans = ended_spans(ids, chunk_end_token_id) or None
    if spans is not None:
        return with_spans(ids, spans)
    return Prompt.of([text(ids)]) if index is None else with_matches(ids, index)
