"""Intervals of a prompt's tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
"""[start, stop) of a prompt's tokens."""


def pieces_of(found: Sequence[Interval], taken: Sequence[Interval], shortest: int) -> list[Interval]:
    """What the found intervals cover and the taken ones do not, cut where a found one begins or ends.

    Each piece lies within a found interval, and the taken ones ascend. A piece shorter than `shortest` is joined to its
    neighbour if one found interval has both; else it is left out.
    """
    ascending = sorted(found)
    starts, stops = [start for start, _ in ascending], list(accumulate((stop for _, stop in ascending), max))
    edges = sorted({edge for interval in found for edge in interval})
    pieces: list[Interval] = []
    for start, stop in _without(_union(ascending), taken):
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        for first, beyond in pairwise([start, *inner, stop]):
            last = pieces[-1] if pieces else (0, -1)
            is_short = min(last[1] - last[0], beyond - first) < shortest
            if last[1] == first and is_short and stops[bisect_right(starts, last[0]) - 1] >= beyond:
                pieces[-1] = (last[0], beyond)
            else:
                pieces.append((first, beyond))
    return [(start, stop) for start, stop in pieces if stop - start >= shortest]


def is_outside(at: npt.NDArray[np.int64], width: int, taken: Sequence[Interval]) -> npt.NDArray[np.bool_]:
    """[n] whether windows that begin at [n] places reach beyond each interval."""
    inside = np.zeros(len(at), bool)
    for start, stop in taken:
        inside |= (at >= start) & (at + width <= stop)
    return ~inside


def _union(ascending: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, stop in ascending:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    left: list[Interval] = []
    for start, stop in intervals:
        for first, beyond in taken:
            if first < stop and beyond > start:
                if first > start:
                    left.append((start, first))
                start = max(start, beyond)
        if start < stop:
            left.append((start, stop))
    return left
