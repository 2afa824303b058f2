"""Several prompts' passes side by side: which of them go through the next layer together, and how."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from cacheblend.core.layers.attention import AttentionSpec
from cacheblend.core.layers.runner import Attend, LayerRunner


@dataclass(frozen=True)
class LayerRows:
    """Rows of one prompt in front of a layer; the fields are the arguments of `LayerRunner.run`."""

    runner: LayerRunner
    layer: int
    hidden: torch.Tensor
    rows: torch.Tensor
    attend: Attend

    def run(self) -> torch.Tensor:
        """The layer's output for these rows alone."""
        return self.runner.run(self.layer, self.hidden, self.rows, self.attend)


LayerSteps = Generator[LayerRows, torch.Tensor, None]
"""A pass on its way through one layer: it yields rows and is sent the layer's output for them, until it is through."""


class RunsLayer(Protocol):
    """What is left of a runner where rows of several prompts stand in front of a layer."""

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See `LayerRunner.run`; rows 0, 1, ... are those of the prompts, in order."""
        ...


Join = Callable[[Sequence[LayerRows]], RunsLayer]
"""An engine's: puts rows of several prompts side by side in front of the same layer."""


def run_alone(steps: LayerSteps) -> None:
    """One pass through its layer."""
    try:
        rows = next(steps)
        while True:
            rows = steps.send(rows.run())
    except StopIteration:
        return


def run_together(
    passes: Sequence[LayerSteps], join: Join, tile_rows: int, *, isolate: bool = True
) -> list[Exception | None]:
    """Passes through the layer that all of them stand in front of.

    Args:
        passes: of prompts that share the model, not the KV cache.
        join: the engine's.
        tile_rows: rows that go through a layer at once; a pass that has more by itself yields tiles of its own.
        isolate: a pass that fails ends alone. Tensor-parallel ranks must not go on without it: False raises at once.

    Returns:
        What ended each pass, None where it is through. Rows that failed together fail all of their passes.
    """
    ended: list[Exception | None] = [None] * len(passes)
    waiting: dict[int, LayerRows] = {}

    def go_on(number: int, output: torch.Tensor | None) -> None:
        try:
            waiting[number] = next(passes[number]) if output is None else passes[number].send(output)
        except StopIteration:
            pass
        except Exception as error:  # of one pass: the others go on
            if not isolate:
                raise
            ended[number] = error

    for number in range(len(passes)):
        go_on(number, None)
    while waiting:
        together = _as_many_as_fit(waiting, tile_rows)
        tile = [waiting.pop(number) for number in together]
        try:
            outputs = _run_together(tile, join) if len(tile) > 1 else [tile[0].run()]
        except Exception as error:
            if not isolate:
                raise
            for number in together:
                passes[number].close()
                ended[number] = error
            continue
        for number, output in zip(together, outputs, strict=True):
            go_on(number, output)
    return ended


def _run_together(tile: Sequence[LayerRows], join: Join) -> Sequence[torch.Tensor]:
    """One call of the layer for the rows of all; each attends over its own prompt's KV."""
    counts = [len(call.rows) for call in tile]
    hidden = torch.cat([call.hidden for call in tile])
    rows = torch.arange(len(hidden), device=hidden.device)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        parts = zip(tile, *(torch.split(part, counts, dim=1) for part in (query, keys, values)), strict=True)
        return torch.cat([call.attend(q, k, v, spec) for call, q, k, v in parts])

    return torch.split(join(tile).run(tile[0].layer, hidden, rows, attend), counts)


def _as_many_as_fit(waiting: dict[int, LayerRows], tile_rows: int) -> list[int]:
    """The first one, and of the others those that leave a tile in its bounds."""
    chosen: list[int] = []
    room = tile_rows
    for number, call in waiting.items():
        if not chosen or len(call.rows) <= room:
            chosen.append(number)
            room -= len(call.rows)
    return chosen


ROWS_TOGETHER = 1024
"""Rows beyond which a layer's products gain nothing more; who waits is better served by a batcher that ends soon."""


class BatchJob(Protocol):
    """What the batcher knows of a job."""

    @property
    def layer(self) -> int:
        """The next layer."""
        ...

    @property
    def active_rows(self) -> int:
        """Rows that the next layer computes at most; 0 before the first step."""
        ...


Job = TypeVar("Job", bound=BatchJob)


class PrefillBatcher(Generic[Job]):
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
