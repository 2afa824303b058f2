"""A prompt: segments of token ids, each plain text or a chunk. Knows ids; knows neither text nor tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError, PromptTooLongError, check_encodable, check_type
from cacheblend.core.names import TokenIds, as_token_ids, equal_length, join_ids
from cacheblend.core.plan.blocks import ChunkManifest


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of token ids.

    Attributes:
        token_ids: [tokens], uint32.
        is_chunk: reused as a unit at any position (a retrieved passage); otherwise plain text.
        label: for display, e.g. a title.
        found_in: for a run found by its content, the stored chunk that contains it; otherwise None.
        offset: place of its first token in that chunk, or in `whole`.
        whole: of a chunk that the prompt has in part, the ids of all of it, under which it is stored; otherwise None.
        is_moved: `found_in` is a part of an earlier prompt of this conversation, computed in that prompt's context.
    """

    token_ids: TokenIds
    is_chunk: bool
    label: str = field(default="")
    found_in: ChunkManifest | None = None
    offset: int = 0
    whole: TokenIds | None = None
    is_moved: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stored_ids(self) -> TokenIds:
        """What a missed chunk is stored as, [tokens]."""
        return self.token_ids if self.whole is None else self.whole


def text(ids: Sequence[int] | npt.NDArray[np.integer]) -> Segment:
    """A segment of plain text, computed unless it is an exact prefix hit.

    Raises:
        InvalidInputError: not a list of token ids.
    """
    return Segment(_checked(ids), is_chunk=False)


def chunk(ids: Sequence[int] | npt.NDArray[np.integer], label: str = "") -> Segment:
    """A segment whose KV cache is stored once and reused at any position.

    Raises:
        InvalidInputError: it is empty, or not a list of token ids; or the label has a lone surrogate.
    """
    check_encodable(label, "a chunk's label")
    checked = _checked(ids)
    if len(checked) == 0:
        raise InvalidInputError("a chunk has no tokens; leave empty passages out of the prompt")
    return Segment(checked, is_chunk=True, label=label)


def part_of(ids: Sequence[int] | npt.NDArray[np.integer], offset: int, tokens: int, label: str = "") -> Segment:
    """A part of a chunk, as where a prompt has the first or last token of a passage in another form. Its KV is loaded
    from the whole chunk's blocks, and if they are missed, the whole chunk is stored. `ids`: of the whole chunk.
    `offset`, `tokens`: which of them the prompt has. `label` and errors: see `chunk`."""
    whole = chunk(ids, label)
    return replace(whole, token_ids=whole.token_ids[offset : offset + tokens], offset=offset, whole=whole.token_ids)


def run_of(found_in: ChunkManifest, offset: int, tokens: int, *, moved: bool = False) -> Segment:
    """A run of a stored chunk: its KV is reused as far as the store holds it, and never stored again. Raises
    `InvalidInputError`: the run lies outside the chunk."""
    if not (offset >= 0 and 0 < tokens <= len(found_in.token_ids) - offset):
        raise InvalidInputError(
            f"tokens {offset}..{offset + tokens - 1} of a chunk that has 0..{len(found_in.token_ids) - 1}"
        )
    ids = found_in.token_ids[offset : offset + tokens]
    return Segment(ids, is_chunk=True, label=found_in.label, found_in=found_in, offset=offset, is_moved=moved)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Segments in order, without empty ones.

    segments | text: BOS | text: system | chunk A | chunk B | text: question |

    Attributes:
        segments: see above.
        changed_contents: how many texts of a chat its template trimmed, escaped, repeated, dropped or else changed.
        front: the text in front of the first passage as it is on its own, where its last tokens, or those behind them,
            are others in this prompt because of the passage that follows; None: what stands in front of the first
            chunk. It is the same whichever passage is first.
        conversation: whose earlier prompts this one may continue, see `engines.histories`.
        as_asked: this prompt as it was before runs were looked for in what its conversation had computed; None: it
            continues nothing.
        begun: tokens that an earlier prompt of the conversation begins with, too: its exact prefix, in which no chunks
            are looked for.
    """

    segments: tuple[Segment, ...]
    changed_contents: int = 0
    front: tuple[Segment, ...] | None = None
    conversation: str = ""
    as_asked: "Prompt | None" = None
    begun: int = 0

    @staticmethod
    def of(segments: Iterable[Segment], changed_contents: int = 0, front: Iterable[Segment] | None = None) -> "Prompt":
        """A prompt of these segments, cut where it leaves its front.

        Raises:
            InvalidInputError: the prompt has no tokens, or a part of it is no segment.
        """
        segments = list(segments) if isinstance(segments, Iterable) else [segments]
        for segment in segments:
            check_type(segment, Segment, "each part of Prompt.of", "a segment, text(ids) or chunk(ids)")
        kept = tuple(segment for segment in segments if len(segment))
        if not kept:
            raise InvalidInputError("the prompt is empty; it needs at least one token")
        if front is None:
            return Prompt(kept, changed_contents)
        own = tuple(segment for segment in front if len(segment))
        return Prompt(_cut_behind(kept, own), changed_contents, own)

    @property
    def in_front(self) -> tuple[Segment, ...]:
        """The text in front of the first chunk, whichever passage that is."""
        if self.front is not None:
            return self.front
        first = next((at for at, segment in enumerate(self.segments) if segment.is_chunk), len(self.segments))
        return self.segments[:first]

    @cached_property
    def shared_tokens(self) -> int:
        """Tokens in front of the first passage that do not depend on it."""
        return equal_length(self.token_ids, join_ids([segment.token_ids for segment in self.in_front]))

    @cached_property
    def token_ids(self) -> TokenIds:
        """Ids of all segments, [tokens], uint32."""
        return np.concatenate([segment.token_ids for segment in self.segments])

    def __len__(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def chunks(self) -> list[Segment]:
        """The chunk segments in order."""
        return [segment for segment in self.segments if segment.is_chunk]

    def check(self, vocab_size: int, max_length: int | None, reason: str = "the model's context") -> None:
        """Checks the prompt against a model's limits, of which `reason` describes `max_length`.

        Raises:
            InvalidInputError: an id outside the vocabulary.
            PromptTooLongError: more than `max_length` tokens.
        """
        check_ids(self.token_ids, vocab_size, "the prompt")
        if max_length is not None and len(self) > max_length:
            raise PromptTooLongError(
                f"the prompt has {len(self)} tokens, {reason} {max_length}; use fewer or shorter chunks"
            )


def check_ids(token_ids: TokenIds, vocab_size: int, what: str) -> None:
    """Raises `InvalidInputError` if an id lies outside 0..vocab_size - 1."""
    if len(token_ids) and int(token_ids.max()) >= vocab_size:
        at = int(token_ids.argmax())
        raise InvalidInputError(
            f"{what} has token id {int(token_ids[at])} at index {at}, outside the vocabulary 0..{vocab_size - 1}; "
            "was it tokenised with another model's tokenizer?"
        )


def _cut_behind(segments: tuple[Segment, ...], front: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The segments, the text among them in which they leave the front cut in two there."""
    at, ids = 0, join_ids([segment.token_ids for segment in front])
    for number, segment in enumerate(segments):
        shared = equal_length(segment.token_ids, ids[at:])
        if 0 < shared < len(segment) and not segment.is_chunk:
            parts = (replace(segment, token_ids=part) for part in np.split(segment.token_ids, [shared]))
            return (*segments[:number], *parts, *segments[number + 1 :])
        if shared < len(segment):
            break
        at += shared
    return segments


def _checked(ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    try:
        return as_token_ids(ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidInputError(f"not a list of token ids: {error}") from error
