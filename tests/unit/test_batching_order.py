"""The order in which jobs of the vLLM worker go through the layers; needs no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.fuse.batching import ROWS_TOGETHER, LayerRows, LayerSteps, PrefillBatcher, RunsLayer

LAYERS = 6


def no_join(calls: Sequence[LayerRows]) -> RunsLayer:
    raise NotImplementedError  # the order alone is tested here


@dataclass(eq=False)
class Job:
    """All rows in front of the join layer, few behind it."""

    name: str
    rows: int
    few: int
    join: int = 2
    layer: int = 0

    @property
    def active_rows(self) -> int:
        return self.rows if self.layer < self.join else self.few

    def next_layer(self) -> LayerSteps:
        raise NotImplementedError


def travel(batcher: PrefillBatcher[Job], late: dict[int, Job] | None = None) -> list[tuple[int, str]]:
    """(layer, names) of each step, until all are through; `late` are added before the step of that number."""
    steps: list[tuple[int, str]] = []
    while batcher or any(number >= len(steps) for number in late or {}):
        if late and len(steps) in late:
            batcher.add(late[len(steps)])
        jobs = batcher.next()
        assert len({job.layer for job in jobs}) == 1
        steps.append((jobs[0].layer, "".join(job.name for job in jobs)))
        for job in jobs:
            job.layer += 1
            if job.layer == LAYERS:
                batcher.remove(job)
    return steps


def batch_of(*jobs: Job, rows: int = 100) -> PrefillBatcher[Job]:
    batcher: PrefillBatcher[Job] = PrefillBatcher(2, rows, no_join)
    for job in jobs:
        batcher.add(job)
    return batcher


def test_one_goes_alone() -> None:
    assert travel(batch_of(Job("a", 500, 50))) == [(layer, "a") for layer in range(LAYERS)]


def test_the_next_joins_behind_the_selection_and_then_both_go_together() -> None:
    steps = travel(batch_of(Job("a", 500, 50), Job("b", 400, 40)))
    assert steps == [(0, "a"), (1, "a"), (0, "b"), (1, "b"), *((layer, "ab") for layer in range(2, LAYERS))]


def test_one_for_whom_no_room_is_left_waits_for_the_end() -> None:
    steps = travel(batch_of(Job("a", 500, 60), Job("b", 400, 10)))
    assert [names for _, names in steps] == ["a"] * LAYERS + ["b"] * LAYERS


def test_one_that_comes_late_does_not_hold_up_those_under_way() -> None:
    steps = travel(batch_of(Job("a", 500, 10)), {3: Job("b", 500, 10)})
    assert [names for _, names in steps] == ["a"] * LAYERS + ["b"] * LAYERS


def test_one_that_starts_anew_does_not_hold_up_the_oldest() -> None:
    a, b = Job("a", 500, 10), Job("b", 500, 10)
    batcher = batch_of(a, b)
    while a.layer < 4:
        for job in batcher.next():
            job.layer += 1
    b.layer = 0  # lost a block
    assert [names for _, names in travel(batcher)] == ["a"] * 2 + ["b"] * LAYERS


def test_the_oldest_that_starts_anew_meets_the_others_again() -> None:
    a, b = Job("a", 500, 10), Job("b", 500, 10)
    batcher = batch_of(a, b)
    while a.layer < 4:
        for job in batcher.next():
            job.layer += 1
    a.layer = 0
    assert [names for _, names in travel(batcher)] == ["a"] * 4 + ["ab"] * 2


def test_one_that_has_more_rows_than_was_thought_waits_for_the_oldest() -> None:
    steps = travel(batch_of(Job("a", 500, 10), Job("b", 600, 99)))
    assert steps == [
        *((layer, "a") for layer in range(2)),
        *((layer, "b") for layer in range(2)),
        *((layer, "a") for layer in range(2, LAYERS)),
        *((layer, "b") for layer in range(2, LAYERS)),
    ]


def test_one_that_is_given_up_is_gone_wherever_it_was() -> None:
    a, b, c = (Job(name, 500, 10) for name in "abc")
    batcher = batch_of(a, b, c)
    batcher.next()
    batcher.remove(c)
    batcher.remove(a)
    batcher.remove(a)
    assert list(batcher) == [b]
    assert travel(batcher) == [(layer, "b") for layer in range(LAYERS)]


def test_a_batch_ends_soon_whatever_a_tile_holds() -> None:
    jobs = [Job("a", 5000, ROWS_TOGETHER // 2) for _ in range(3)]
    assert max(len(names) for _, names in travel(batch_of(*jobs, rows=100_000))) == 2


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=8), st.integers(1, 400))
def test_all_arrive_and_nobody_exceeds_the_rows(shapes: list[tuple[int, int]], rows: int) -> None:
    jobs = [Job(chr(97 + i), max(a, b), min(a, b)) for i, (a, b) in enumerate(shapes)]
    few = {job.name: job.few for job in jobs}
    for layer, names in travel(batch_of(*jobs, rows=rows)):
        assert len(names) == 1 or layer >= 2
        assert len(names) == 1 or sum(few[name] for name in names) <= rows
    assert all(job.layer == LAYERS for job in jobs)


@pytest.mark.parametrize("join_layer", [0, 1])
def test_the_first_layer_is_never_shared(join_layer: int) -> None:
    batcher: PrefillBatcher[Job] = PrefillBatcher(join_layer, 100, no_join)
    for job in (Job("a", 9, 9, join=1), Job("b", 9, 9, join=1)):
        batcher.add(job)
    assert travel(batcher)[:3] == [(0, "a"), (0, "b"), (1, "ab")]
