"""A layer that is left between tiles and goes on in the next call: the same numbers, whoever comes or goes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.fuse.batching import LayerRows, LayerSteps, PrefillBatcher, RunsLayer
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention_spec import AttentionSpec

LAYERS, TILE = 3, 8


@dataclass
class Runner:
    """Adds to each row its position and the layer's number, and counts the calls."""

    positions: torch.Tensor
    fails: bool = False

    num_layers = LAYERS

    def embed(self) -> torch.Tensor:
        return torch.zeros(len(self.positions), 1)

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        return hidden * 2 + self.positions[rows, None] + layer


def join(calls: Sequence[LayerRows]) -> RunsLayer:
    runners = [(call.runner, call.rows) for call in calls]
    return Runner(torch.cat([runner.positions[rows] for runner, rows in runners if isinstance(runner, Runner)]))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    raise NotImplementedError


@dataclass(eq=False)
class Job:
    """One prompt; `tiles` are the sizes of the tiles that it ran."""

    rows: int
    layer: int = 0
    fails_at: int = -1
    is_closed: bool = False
    tiles: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = Runner(torch.arange(self.rows))
        self.hidden = torch.zeros(self.rows, 1)

    @property
    def active_rows(self) -> int:
        return self.rows

    def next_layer(self) -> LayerSteps:
        try:
            for start in range(0, self.rows, TILE):
                tile = slice(start, min(start + TILE, self.rows))
                self.runner.fails = self.layer == self.fails_at and start > 0
                rows = torch.arange(tile.start, tile.stop)
                self.hidden[tile] = yield LayerRows(self.runner, self.layer, self.hidden[tile], rows, attend)
                self.tiles.append(len(rows))
            self.layer += 1
        finally:
            self.is_closed = True

    @property
    def wanted(self) -> torch.Tensor:
        hidden = torch.zeros(self.rows, 1)
        for layer in range(LAYERS):
            hidden = hidden * 2 + torch.arange(self.rows)[:, None] + layer
        return hidden


def run(batcher: PrefillBatcher[Job], most: Sequence[int | None]) -> dict[Job, Exception]:
    """Until all jobs are done or failed; the limits are used in turn."""
    failed: dict[Job, Exception] = {}
    calls = 0
    while batcher:
        limit = most[calls % len(most)]
        calls += 1
        for job, error in batcher.advance(batcher.next(), limit):
            if error is not None:
                failed[job] = error
            if error is not None or job.layer == LAYERS:
                batcher.remove(job)
        assert limit is None or batcher.rows < limit + TILE
        assert calls < 1000
    return failed


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=5),
)
def test_any_limits_give_the_same_numbers(rows: list[int], most: list[int | None]) -> None:
    jobs = [Job(count) for count in rows]
    batcher: PrefillBatcher[Job] = PrefillBatcher(1, TILE, join)
    for job in jobs:
        batcher.add(job)
    assert not run(batcher, most)
    for job in jobs:
        assert torch.equal(job.hidden, job.wanted)


def test_a_layer_is_left_after_the_tile_that_reaches_the_limit() -> None:
    job, batcher = Job(40), PrefillBatcher[Job](1, TILE, join)
    batcher.add(job)
    for expected in (16, 16, 8):
        assert batcher.next() == [job]
        ended = batcher.advance([job], 9)
        assert batcher.rows == expected
        assert ended == ([] if expected == 16 else [(job, None)])
    assert job.layer == 1


def test_a_job_that_comes_meanwhile_waits_for_the_layer() -> None:
    first, second, batcher = Job(40), Job(8), PrefillBatcher[Job](1, TILE, join)
    batcher.add(first)
    batcher.advance(batcher.next(), 1)
    batcher.add(second)
    assert batcher.next() == [first]
    assert not run(batcher, [1])
    assert torch.equal(second.hidden, second.wanted)


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_is_removed_in_the_middle_of_a_layer_is_closed(number: int) -> None:
    jobs, batcher = [Job(20), Job(20)], PrefillBatcher[Job](1, 2 * TILE, join)
    for job in jobs:
        job.layer = 1
        batcher.add(job)
    batcher._running = list(batcher)
    batcher._waiting.clear()
    batcher.advance(jobs, 1)
    gone, stays = jobs[number], jobs[1 - number]
    batcher.remove(gone)
    assert gone.is_closed
    assert batcher.next() == [stays]
    assert batcher.advance([stays]) == [(stays, None)]
    assert stays.layer == 2
    assert gone.layer == 1
    batcher.remove(stays)
    assert not batcher


def test_an_error_after_a_pause_ends_its_own_job() -> None:
    job, other, batcher = Job(20, fails_at=0), Job(20), PrefillBatcher[Job](1, TILE, join)
    batcher.add(job)
    batcher.add(other)
    failed = run(batcher, [1])
    assert list(failed) == [job]
    assert torch.equal(other.hidden, other.wanted)


def test_an_error_that_is_raised_at_once_leaves_no_layer_behind() -> None:
    job, batcher = Job(20, fails_at=0), PrefillBatcher[Job](1, TILE, join, isolate=False)
    batcher.add(job)
    batcher.advance(batcher.next(), 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        batcher.advance(batcher.next(), 100)
    batcher.remove(job)
    other = Job(20)
    batcher.add(other)
    assert not run(batcher, [1])
    assert torch.equal(other.hidden, other.wanted)
