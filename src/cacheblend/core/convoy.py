"""Who goes through the next layer: jobs in the order they came, the first ones side by side.

    layer       0     1     2     3 ...
    job 1       |=====|=====|=-=-=-=-=>      goes first, alone, as long as its rows are many
    job 2       |=====|=====|=-=-=-=-=>      joins at the layer behind the last selection, as long as a tile has room
    job 3                                    waits: those in front of it are under way together

Nobody is held up by one who came later, but for the layers in front of the join layer: a job that has fallen behind (it
has more rows than there is room for, or lost a block and began anew) waits until the oldest is through.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

ROWS_TOGETHER = 1024
"""Rows beyond which a layer's products gain nothing more; who waits is better served by a convoy that ends soon."""


class Traveller(Protocol):
    """What the convoy knows of a job."""

    @property
    def layer(self) -> int:
        """The next layer."""
        ...

    @property
    def active_rows(self) -> int:
        """Rows that the next layer computes at most; 0 before the first step."""
        ...


Job = TypeVar("Job", bound=Traveller)


class Convoy(Generic[Job]):
    """Jobs of one kind.

    Args:
        join_layer: the layer in front of which others may join: behind the last selection, 1 at the earliest.
        rows: that may go through a layer together.
    """

    def __init__(self, join_layer: int, rows: int) -> None:
        self._join_layer, self._rows = max(1, join_layer), min(rows, ROWS_TOGETHER)
        self._waiting: deque[Job] = deque()
        self._under_way: list[Job] = []

    def __iter__(self) -> Iterator[Job]:
        return iter([*self._under_way, *self._waiting])

    def __bool__(self) -> bool:
        return bool(self._under_way or self._waiting)

    def add(self, job: Job) -> None:
        """Behind those that came before it."""
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Is finished, or given up; may be gone already."""
        if job in self._under_way:
            self._under_way.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def next(self) -> list[Job]:
        """Jobs to advance by one layer, all in front of the same one; there must be a job."""
        if self._waiting and self._may_join():
            self._under_way.append(self._waiting.popleft())
        oldest, *others = self._under_way
        if oldest.layer == self._join_layer:
            for job in others:
                if job.layer < self._join_layer:
                    return [job]  # it catches up; what does not fit then waits for the oldest to end
        chosen = [oldest]
        for job in others:
            if job.layer == oldest.layer and self._count(chosen) + job.active_rows <= self._rows:
                chosen.append(job)
        return chosen

    def _may_join(self) -> bool:
        """Whether all under way stand where others join, and leave room for one that is as large as the largest."""
        if not self._under_way:
            return True
        if any(job.layer != self._join_layer for job in self._under_way):
            return False
        return self._count(self._under_way) + max(job.active_rows for job in self._under_way) <= self._rows

    @staticmethod
    def _count(jobs: list[Job]) -> int:
        return sum(job.active_rows for job in jobs)
