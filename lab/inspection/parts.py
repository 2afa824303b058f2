"""The parts of a prompt in tables and figures: the text in front, each chunk, text between chunks, the question."""

from dataclasses import dataclass
from itertools import accumulate

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
