"""The parts of a prompt in tables and figures: text in front, chunks, text between them, the question; its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend.core.plan.prompt import Prompt


@dataclass(frozen=True)
class Part:
    """Rows that are aggregated in tables and figures.

    Attributes:
        label: a name for people: ``"chunk 2: title"``, ``"front"``, ``"between"``, ``"question"``.
        is_chunk: whether the part is a chunk; otherwise it is plain text.
        runs: half-open intervals of positions; only ``between`` has several.
    """

    label: str
    is_chunk: bool
    runs: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)


def parts_of(prompt: Prompt) -> list[Part]:
    """The parts of the prompt that are not empty; all text between chunks is one part."""
    stops = list(accumulate(len(segment) for segment in prompt.segments))
    chunks = [i for i, segment in enumerate(prompt.segments) if segment.is_chunk]
    first, last = (chunks[0], chunks[-1]) if chunks else (len(stops), len(stops))
    front, between, question = (list[tuple[int, int]]() for _ in range(3))
    of_chunks: list[Part] = []
    for index, segment in enumerate(prompt.segments):
        run = (stops[index] - len(segment), stops[index])
        if segment.is_chunk:
            title = f": {segment.label}" if segment.label else ""
            of_chunks.append(Part(f"chunk {len(of_chunks) + 1}{title}", True, (run,)))
        else:
            (front if index < first else between if index < last else question).append(run)
    texts = [Part(label, False, tuple(runs)) for label, runs in (("between", between), ("question", question)) if runs]
    return [*_front(front), *of_chunks, *texts]


def _front(runs: list[tuple[int, int]]) -> list[Part]:
    """A separate first token (BOS) is a part of its own, since it receives far more attention than others."""
    if len(runs) > 1 and runs[0] == (0, 1):
        return [Part("first token", False, (runs[0],)), Part("front", False, tuple(runs[1:]))]
    return [Part("front", False, tuple(runs))] if runs else []


def part_of_row(parts: list[Part], length: int) -> npt.NDArray[np.int64]:
    """[length] index of the part of each row; -1 outside of all parts."""
    part = np.full(length, -1, dtype=np.int64)
    for index, found in enumerate(parts):
        for start, stop in found.runs:
            part[start:stop] = index
    return part


def context_length(prompt: Prompt) -> int:
    """Number of rows preceding the question; at least one row follows them."""
    stops = list(accumulate(len(segment) for segment in prompt.segments))
    chunk_stops = [stop for stop, segment in zip(stops, prompt.segments, strict=True) if segment.is_chunk]
    return min(max(chunk_stops, default=0), len(prompt) - 1)


LONGEST_CHARACTER = 8  # most tokens joined to one character; a character has up to four bytes


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per token, special ones included; joined, they are the decoded prompt. No tokenizer: ids as ``[17]``.

    A character of several tokens is the text of the last of them; the others are empty.
    """
    if tokenizer is None:
        return [f"[{token}]" for token in ids]
    texts: list[str] = []
    before: list[int] = []  # decoding depends on the preceding tokens
    held: list[int] = []
    for token in ids:
        held.append(token)
        new = _decode(tokenizer, before + held)[len(_decode(tokenizer, before)) :]
        if new.endswith("\ufffd") and len(held) < LONGEST_CHARACTER and len(texts) + 1 < len(ids):
            texts.append("")
        else:
            texts.append(new)
            before, held = held, []
    return texts


def _decode(tokenizer: Any, ids: list[int]) -> str:
    # Cleaning up spaces would change preceding text.
    decoded: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return decoded
