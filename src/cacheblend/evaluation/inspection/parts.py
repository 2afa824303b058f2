"""A prompt's parts in tables and figures: what stands in front, each chunk, what stands between them, the question."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cacheblend.core.plan.prompt import Prompt


@dataclass(frozen=True)
class Part:
    """Rows that are looked at together.

    Attributes:
        label: for people: ``"chunk 2: title"``, ``"front"``, ``"between"``, ``"question"``.
        is_chunk: one chunk; otherwise plain text.
        runs: (first position, one behind the last) of each run; only ``between`` has several.
    """

    label: str
    is_chunk: bool
    runs: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)


def parts_of(prompt: Prompt) -> list[Part]:
    """The prompt's parts, those that are empty left out; separators between chunks are one part."""
    stops = list(accumulate(len(segment) for segment in prompt.segments))
    chunks = [i for i, segment in enumerate(prompt.segments) if segment.is_chunk]
    first, last = (chunks[0], chunks[-1]) if chunks else (len(stops), len(stops))
    front, between, behind = (list[tuple[int, int]]() for _ in range(3))
    of_chunks: list[Part] = []
    for index, segment in enumerate(prompt.segments):
        run = (stops[index] - len(segment), stops[index])
        if segment.is_chunk:
            title = f": {segment.label}" if segment.label else ""
            of_chunks.append(Part(f"chunk {len(of_chunks) + 1}{title}", True, (run,)))
        else:
            (front if index < first else between if index < last else behind).append(run)
    texts = [Part(label, False, tuple(runs)) for label, runs in (("between", between), ("question", behind)) if runs]
    return [*_front(front), *of_chunks, *texts]


def _front(runs: list[tuple[int, int]]) -> list[Part]:
    """A first token of its own (BOS) draws attention as no other does, so it stays apart."""
    if len(runs) > 1 and runs[0] == (0, 1):
        return [Part("first token", False, (runs[0],)), Part("front", False, tuple(runs[1:]))]
    return [Part("front", False, tuple(runs))] if runs else []


def part_of_row(parts: list[Part], length: int) -> npt.NDArray[np.int64]:
    """[length] index of each row's part."""
    part = np.full(length, -1, dtype=np.int64)
    for index, found in enumerate(parts):
        for start, stop in found.runs:
            part[start:stop] = index
    return part


def context_length(prompt: Prompt) -> int:
    """Rows in front of the question; at least the last row is behind them."""
    stops = list(accumulate(len(segment) for segment in prompt.segments))
    chunk_stops = [stop for stop, segment in zip(stops, prompt.segments, strict=True) if segment.is_chunk]
    return min(max(chunk_stops, default=0), len(prompt) - 1)
