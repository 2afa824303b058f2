"""The order in which the batcher advances its jobs through the layers; needs no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.fuse.batching import ROWS_OPEN, ROWS_TOGETHER, LayerRows, LayerSteps, PrefillBatcher, RunsLayer

LAYERS = 6


def no_join(calls: Sequence[LayerRows]) -> RunsLayer:
    raise NotImplementedError  # only the order is tested here


@dataclass(eq=False)
class Job:
    """Has `rows` rows before the join layer and `few` rows from it on."""

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


def run_all(batcher: PrefillBatcher[Job], late: dict[int, Job] | None = None) -> list[tuple[int, str]]:
    """(layer, names) of each step until all jobs are done; `late` jobs are added before the step with their number."""
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


TURNS = [(0, "a"), (1, "a"), (0, "b"), (1, "b")]
ONE_BY_ONE = [(layer, name) for name in "ab" for layer in range(LAYERS)]
TOGETHER = [*TURNS, *((layer, "ab") for layer in range(2, LAYERS))]


@pytest.mark.parametrize(
    ("jobs", "late", "steps"),
    [
        ([("a", 500, 50)], {}, ONE_BY_ONE[:LAYERS]),
        ([("a", 500, 50), ("b", 400, 40)], {}, TOGETHER),
        ([("a", 500, 60), ("b", 400, 10)], {}, ONE_BY_ONE),
        ([("a", 500, 10)], {3: ("b", 500, 10)}, ONE_BY_ONE),
        ([("a", 500, 10), ("b", 600, 99)], {}, [*TURNS, *((n, name) for name in "ab" for n in range(2, LAYERS))]),
    ],
    ids=["alone", "joins behind the selection", "no capacity", "late", "more rows than estimated"],
)
def test_the_order_of_jobs(
    jobs: list[tuple[str, int, int]], late: dict[int, tuple[str, int, int]], steps: list[tuple[int, str]]
) -> None:
    later = {number: Job(*job) for number, job in late.items()}
    assert run_all(batch_of(*(Job(*job) for job in jobs)), later) == steps


@pytest.mark.parametrize(("lost", "names"), [("b", ["a"] * 2 + ["b"] * LAYERS), ("a", ["a"] * 4 + ["ab"] * 2)])
def test_a_restarted_job_does_not_delay_the_oldest_job(lost: str, names: list[str]) -> None:
    """Which, itself restarted, is batched with the others again."""
    jobs = {name: Job(name, 500, 10) for name in "ab"}
    batcher = batch_of(*jobs.values())
    while jobs["a"].layer < 4:
        for job in batcher.next():
            job.layer += 1
    jobs[lost].layer = 0
    assert [each for _, each in run_all(batcher)] == names


def test_removed_jobs_no_longer_run() -> None:
    a, b, c = (Job(name, 500, 10) for name in "abc")
    batcher = batch_of(a, b, c)
    batcher.next()
    batcher.remove(c)
    batcher.remove(a)
    batcher.remove(a)
    assert list(batcher) == [b]
    assert run_all(batcher) == [(layer, "b") for layer in range(LAYERS)]


def test_batch_size_is_limited_even_with_large_tiles() -> None:
    jobs = [Job("a", 5000, ROWS_TOGETHER // 2) for _ in range(3)]
    assert max(len(names) for _, names in run_all(batch_of(*jobs, rows=100_000))) == 2


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=8), st.integers(1, 400))
def test_all_jobs_finish_within_the_row_limit(shapes: list[tuple[int, int]], rows: int) -> None:
    jobs = [Job(chr(97 + i), max(a, b), min(a, b)) for i, (a, b) in enumerate(shapes)]
    few = {job.name: job.few for job in jobs}
    for layer, names in run_all(batch_of(*jobs, rows=rows)):
        assert len(names) == 1 or layer >= 2
        assert len(names) == 1 or sum(few[name] for name in names) <= rows
    assert all(job.layer == LAYERS for job in jobs)


@pytest.mark.parametrize("join_layer", [0, 1])
def test_the_first_layer_is_never_batched(join_layer: int) -> None:
    batcher: PrefillBatcher[Job] = PrefillBatcher(join_layer, 100, no_join)
    for job in (Job("a", 9, 9, join=1), Job("b", 9, 9, join=1)):
        batcher.add(job)
    assert run_all(batcher)[:3] == [(0, "a"), (0, "b"), (1, "ab")]


def names_of(jobs: Sequence[Job]) -> str:
    return "".join(job.name for job in jobs)


def test_jobs_that_wait_for_their_kv_are_passed_over() -> None:
    a, b, c = Job("a", 500, 10), Job("b", 500, 10), Job("c", 500, 10)
    batcher, late = batch_of(a, b, c), {"a"}

    def is_ready(job: Job) -> bool:
        return job.name not in late

    assert names_of(batcher.next()) == "a"
    assert names_of(batcher.next(is_ready)) == "b"  # begins: nothing else can be done
    late.add("b")
    assert names_of(batcher.next(is_ready)) == "c"
    late.add("c")
    assert batcher.next(is_ready) == []
    late.remove("b")
    assert names_of(batcher.next(is_ready)) == "b"
    late.clear()
    assert sorted("".join(names for _, names in run_all(batcher))) == ["a"] * LAYERS + ["b"] * LAYERS + ["c"] * LAYERS


def test_no_more_jobs_begin_while_those_that_wait_have_many_rows() -> None:
    few, many = Job("a", ROWS_OPEN - 1, 10), Job("b", 1, 1)
    batcher = batch_of(few, many, Job("c", 1, 1))
    batcher.next()
    assert names_of(batcher.next(lambda job: False)) == "b"
    assert batcher.next(lambda job: False) == []


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=6), st.integers(0, 999))
def test_all_jobs_finish_whenever_their_kv_comes(shapes: list[tuple[int, int]], seed: int) -> None:
    random = Random(seed)
    jobs = [Job(chr(97 + i), max(a, b), min(a, b)) for i, (a, b) in enumerate(shapes)]
    batcher, steps = batch_of(*jobs), 0
    while batcher:
        late = {job.name for job in jobs if random.random() < 0.5}
        chosen = batcher.next(lambda job, late=late: job.name not in late or job.layer == 0)
        assert len({job.layer for job in chosen}) <= 1
        assert len(chosen) <= 1 or chosen[0].layer >= 2
        for job in chosen:
            assert job.layer == 0 or job.name not in late
            job.layer, steps = job.layer + 1, steps + 1
            if job.layer == LAYERS:
                batcher.remove(job)
    assert steps == LAYERS * len(jobs)
