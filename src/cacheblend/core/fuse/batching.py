"""Batched prefills of several prompts: which of them run the next layer, and how they share it.

    layer       0     1     2     3 ...
    job 1       |=====|=====|=-=-=-=-=>      the oldest runs first, alone while its rows are many
    job 2       |=====|=====|=-=-=-=-=>      joins at the layer after the last selection, while a tile has capacity
    job 3                                    waits: the tile is full

    prompt 1   . r r . r   \\
    prompt 2   r . . r .    >  one call of the layer: r r r r r r r  ->  each prompt's attention over its own KV
    prompt 3   . . r . r   /

After the last selection, a prompt has few rows left. A matrix product of few rows costs nearly as much as one of many
rows, since the weights have to be read in either case.

A job never waits for a later one, except while a joining job runs the layers before the join layer. A job that lags (it
has more rows than there is capacity for, or lost a block and restarted) waits until the oldest job is done.
"""

import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from cacheblend.core.fuse.runner import Attend, LayerRunner
from cacheblend.core.kernels.attention import AttentionSpec

ROWS_OPEN = 32768
"""While all jobs wait for their KV, another one begins only if they have fewer rows: hidden states take memory."""

ROWS_TOGETHER = 1024
"""Rows beyond which a layer's matrix products gain nothing more; a smaller batch ends sooner for the waiting jobs."""


@dataclass(frozen=True)
class LayerRows:
    """Rows of one prompt that are about to run a layer; the fields are the arguments of `LayerRunner.run`."""

    runner: LayerRunner
    layer: int
    hidden: torch.Tensor
    rows: torch.Tensor
    attend: Attend

    def run(self) -> torch.Tensor:
        """The layer's output for these rows alone, [n, width]."""
        return self.runner.run(self.layer, self.hidden, self.rows, self.attend)


LayerSteps = Generator[LayerRows, torch.Tensor, None]
"""Runs one prompt through one layer: yields rows and receives the layer's output for them, until all are done."""


class RunsLayer(Protocol):
    """The part of a `LayerRunner` that rows of several prompts share; `rows` numbers those of all prompts, in order."""

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor: ...


Join = Callable[[Sequence[LayerRows]], RunsLayer]
"""An engine's function that combines rows of several prompts at the same layer."""


class BatchJob(Protocol):
    """A job's interface to the batcher: its next layer's index, the most rows that it computes (0 before the first
    step), and the layer's steps."""

    @property
    def layer(self) -> int: ...

    @property
    def active_rows(self) -> int: ...

    def next_layer(self) -> LayerSteps: ...


Job = TypeVar("Job", bound=BatchJob)


class PrefillBatcher(Generic[Job]):
    """Chooses jobs in order of arrival, batches the first ones, and runs one layer of them at a time, `tile_rows` rows
    at most together. Other jobs may join at `join_layer`: after the last selection, at least 1. `isolate`: a failed job
    does not end the others; False: its error is raised at once, as needed with tensor parallelism, where all ranks must
    run the same jobs."""

    def __init__(self, join_layer: int, tile_rows: int, join: Join, *, isolate: bool = True) -> None:
        self._join_layer, self._tile_rows = max(1, join_layer), tile_rows
        self._capacity = min(tile_rows, ROWS_TOGETHER)
        self._join, self._isolate = join, isolate
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._under_way: tuple[list[Job], TogetherPass] | None = None
        self.rows = 0  # that the last call of `advance` ran through the layer

    def __iter__(self) -> Iterator[Job]:
        return iter([*self._running, *self._waiting])

    def __bool__(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, job: Job) -> None:
        """Adds a job to the queue."""
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Removes a job that is done or cancelled, in the middle of a layer too; no error if it is not there."""
        if job in self._running:
            self._running.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)
        if self._under_way is not None and job in self._under_way[0]:  # may fail: a step ends in the middle
            jobs, running = self._under_way
            running.drop(jobs.index(job))

    def next(self, is_ready: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """The jobs to advance by one layer, all at the same layer; requires at least one job. `is_ready`: whether a
        job's next layer can be computed; not asked of waiting jobs. Others are passed over, and there are no jobs if
        none is ready."""
        if self._under_way is not None:
            left = [job for job in self._under_way[0] if job in self._running]
            if left:
                return left
            self._under_way = None
        ready = [job for job in self._running if is_ready(job)]
        if self._waiting and _rows_of(self._running) < ROWS_OPEN:
            # Besides jobs at the join layer while one more as large as the largest fits; and where none is ready.
            fits = not ready or _rows_of(ready) + max(job.active_rows for job in ready) <= self._capacity
            if fits and all(job.layer == self._join_layer for job in ready):
                self._running.append(self._waiting.popleft())
                ready.append(self._running[-1])
        if not ready:
            return []
        oldest, *others = ready
        if oldest.layer < self._join_layer:
            return [oldest]
        if oldest.layer == self._join_layer:
            for job in others:
                if job.layer < self._join_layer:
                    return [job]  # runs up to the join layer; if it does not fit there, it waits for the oldest job
        chosen = [oldest]
        for job in others:
            if job.layer == oldest.layer and _rows_of(chosen) + job.active_rows <= self._capacity:
                chosen.append(job)
        return chosen

    def advance(self, jobs: Sequence[Job], most_rows: int | None = None) -> list[tuple[Job, Exception | None]]:
        """Runs one layer of the jobs that `next` chose; returns each with its error, or None. If a shared tile fails,
        all jobs with rows in it fail. The caller must `remove` jobs that are done or failed. With `most_rows`, the
        layer is left after the tile that reaches so many rows, and goes on in the next call; then nothing is returned,
        and `next` gives the same jobs again."""
        if self._under_way is None:
            steps = [job.next_layer() for job in jobs]
            self._under_way = list(jobs), TogetherPass(steps, self._join, self._tile_rows, self._isolate)
        together, running = self._under_way
        try:
            self.rows = running.advance(most_rows)
        except Exception:
            self._under_way = None
            raise
        if not running.done:
            return []
        self._under_way = None
        ended = zip(together, running.errors, strict=True)
        return [(job, error) for job, error in ended if job in self._running]


def _rows_of(jobs: Sequence[BatchJob]) -> int:
    return sum(job.active_rows for job in jobs)


def run_alone(steps: LayerSteps) -> None:
    """Runs one prompt through a layer without batching."""
    try:
        rows = next(steps)
        while True:
            rows = steps.send(rows.run())
    except StopIteration:
        return


class TogetherPass:
    """Several prompts, which share the model and not the KV cache, on their way through a layer; for the arguments see
    `PrefillBatcher`. No row is computed yet."""

    def __init__(self, passes: Sequence[LayerSteps], join: Join, tile_rows: int, isolate: bool) -> None:
        self._passes, self._join, self._tile_rows, self._isolate = passes, join, tile_rows, isolate
        self.errors: list[Exception | None] = [None] * len(passes)  # of each pass, None if it has not failed
        self._waiting: dict[int, LayerRows] | None = None  # None: no pass has begun

    @property
    def done(self) -> bool:  # no pass has rows left
        return self._waiting is not None and not self._waiting

    def drop(self, number: int) -> None:
        """Ends a pass where it is."""
        if self._waiting is not None:
            self._waiting.pop(number, None)
        self._passes[number].close()

    def advance(self, most_rows: int | None = None) -> int:
        """Runs tiles until no row is left, or so many rows were run; returns how many were."""
        if self._waiting is None:
            self._waiting = {}
            for number in range(len(self._passes)):
                self._resume(number, None)
        rows = 0
        while self._waiting and (most_rows is None or rows < most_rows):
            together, capacity = list[int](), self._tile_rows
            for number, call in self._waiting.items():  # the first, and each following one that still fits
                if not together or len(call.rows) <= capacity:
                    together.append(number)
                    capacity -= len(call.rows)
            tile = [self._waiting.pop(number) for number in together]
            rows += sum(len(call.rows) for call in tile)
            try:
                outputs = _run_tile(tile, self._join) if len(tile) > 1 else [tile[0].run()]
            except Exception as error:
                if not self._isolate:
                    raise
                for number in together:
                    self._passes[number].close()
                    self.errors[number] = error
                continue
            for number, output in zip(together, outputs, strict=True):
                self._resume(number, output)
        return rows

    def _resume(self, number: int, output: torch.Tensor | None) -> None:
        assert self._waiting is not None
        steps = self._passes[number]
        try:
            self._waiting[number] = next(steps) if output is None else steps.send(output)
        except StopIteration:
            pass
        except Exception as error:  # affects one prompt only
            if not self._isolate:
                raise
            self.errors[number] = error


def let_go(error: BaseException) -> None:
    """Lets go of what a failed computation held: the local variables in the frames of its error and of those behind it
    keep tensors alive, of a failed pass until a garbage collection, and others need the memory that ran out."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run_tile(tile: Sequence[LayerRows], join: Join) -> Sequence[torch.Tensor]:
    """Calls the layer once for the rows of all prompts; each prompt attends over its own KV."""
    counts = [len(call.rows) for call in tile]
    hidden = torch.cat([call.hidden for call in tile])
    rows = torch.arange(len(hidden), device=hidden.device)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        parts = zip(tile, *(torch.split(part, counts, dim=1) for part in (query, keys, values)), strict=True)
        return torch.cat([call.attend(q, k, v, spec) for call, q, k, v in parts])

    return torch.split(join(tile).run(tile[0].layer, hidden, rows, attend), counts)
