"""What a client asks of the plug-in for one request: the object `cacheblend` of its `kv_transfer_params`.

    {"cacheblend": {"mode": "blend", "recompute_ratio": 0.2, "selector": "hkvd", "chunks": [[12, 268], [270, 512]],
                    "conversation": "7f3a"}}

Its chunks are the spans that it names, else runs that end with the configured chunk-end token, else what matches chunks
of the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from cacheblend.core.errors import InvalidInputError, check_encodable, check_type
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.settings import BlendSettings

KEY = "cacheblend"  # the key of this project's object in a request's and an answer's `kv_transfer_params`
Mode = Literal["blend", "prefix", "full"]
"""What is reused: all that is stored; only what is exact in this prompt; nothing from the store."""

Span = tuple[int, int]  # [start, stop) of a prompt's tokens
MOST_NAME = 256  # characters of a conversation's name
MOST_SPANS = 2048  # chunks that a client may name: they are checked in the engine's thread


@dataclass(frozen=True)
class RequestOptions:
    """The settings of one request; None: the engine's."""

    mode: Mode = "blend"
    recompute_ratio: float | None = None
    selector: str | None = None
    spans: tuple[Span, ...] | None = None  # the prompt's chunks, ascending without overlap
    conversation: str = ""  # whose earlier prompts this one may continue, edited

    @property
    def sets_selection(self) -> bool:
        """The request chooses itself what is recomputed, so that no controller does."""
        return self.recompute_ratio is not None or self.selector is not None

    @property
    def follows_floor(self) -> bool:
        """The request names nothing that decides what is recomputed, so that the floor of the shadow check does."""
        return self.mode == "blend" and not self.sets_selection

    def until(self, end: int) -> "RequestOptions":
        """Without the chunks that end behind position `end`."""
        if self.spans is None or all(stop <= end for _, stop in self.spans):
            return self
        return replace(self, spans=tuple(span for span in self.spans if span[1] <= end))

    def selector_of(self, settings: BlendSettings) -> Selector:
        """Raises InvalidInputError: no such selector, or a ratio that it cannot have."""
        return settings.selector(self.recompute_ratio, self.selector)


def read_options(params: Any, tokens: int) -> RequestOptions:
    """The options that a request's `kv_transfer_params` hold, as the client sent them. Raises InvalidInputError:
    another form, an unknown key or a wrong value; the message names it."""
    if params is not None and not isinstance(params, Mapping):
        raise InvalidInputError(f"kv_transfer_params must be an object, got {params!r}")
    mine = (params or {}).get(KEY)
    if mine is None:
        return RequestOptions()
    if not isinstance(mine, Mapping):
        raise InvalidInputError(f'kv_transfer_params["{KEY}"] must be an object, got {mine!r}')
    known = ("mode", "recompute_ratio", "selector", "chunks", "conversation")
    unknown = sorted(str(key) for key in mine if key not in known)
    if unknown:
        raise InvalidInputError(
            f'kv_transfer_params["{KEY}"] has the unknown key {unknown[0]!r}; it has {", ".join(known)}'
        )
    mode, ratio, selector = mine.get("mode", "blend"), mine.get("recompute_ratio"), mine.get("selector")
    if mode not in get_args(Mode):
        raise InvalidInputError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if ratio is not None:
        if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
            raise InvalidInputError(f"recompute_ratio must be in 0..1, got {ratio!r}")
        ratio = float(ratio)
    if selector is not None and not isinstance(selector, str):
        raise InvalidInputError(f"selector must be a selector's name, got {selector!r}")
    conversation = mine.get("conversation", "")
    check_type(conversation, str, "conversation")
    check_encodable(conversation, "conversation")
    if len(conversation) > MOST_NAME:
        raise InvalidInputError(f"conversation has {len(conversation)} characters, {MOST_NAME} are allowed")
    spans = _read_spans(mine["chunks"], tokens) if "chunks" in mine else None
    return RequestOptions(mode, ratio, selector, spans, conversation)


def _read_spans(given: Any, tokens: int) -> tuple[Span, ...]:
    if not isinstance(given, list | tuple):
        raise InvalidInputError(f"chunks must be a list of [start, stop], got {given!r}")
    if len(given) > MOST_SPANS:
        raise InvalidInputError(f"{len(given)} chunks; a request may name {MOST_SPANS}")
    for number, span in enumerate(given):
        whole = isinstance(span, list | tuple) and len(span) == 2
        if not whole or not all(isinstance(end, int) and not isinstance(end, bool) for end in span):
            raise InvalidInputError(f"chunk {number} must be [start, stop], two whole numbers, got {span!r}")
        if not 0 <= span[0] < span[1] <= tokens:
            raise InvalidInputError(
                f"chunk {number} is {span!r}: a span lies within the prompt's 0..{tokens} and is not empty"
            )
    for first, second in pairwise(given):
        if second[0] < first[1]:
            raise InvalidInputError(
                f"chunks must ascend without overlap, and {list(second)} begins before {list(first)} ends"
            )
    return tuple((start, stop) for start, stop in given)


def named_chunks(
    token_ids: TokenIds, spans: Sequence[Span] | None = None, chunk_end_token_id: int | None = None
) -> Prompt | None:
    """The prompt with the chunks that are named, or that end with a token; None where contents decide."""
    if spans is None and chunk_end_token_id is not None:
        stops = (np.flatnonzero(token_ids == chunk_end_token_id) + 1).tolist()
        spans = list(pairwise([0, *stops])) or None  # the text after the last one is the question
    if spans is None:
        return None
    segments: list[Segment] = []
    at = 0
    for start, stop in spans:
        segments += [text(token_ids[at:start]), chunk(token_ids[start:stop])]
        at = stop
    return Prompt.of([*segments, text(token_ids[at:])])
