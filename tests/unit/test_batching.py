"""Several prompts side by side: who runs the next layer, the same numbers as one by one, layers that are left between
tiles, and errors that end only their own prompt; the rows of one, and what layers are given for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.batching import (
    ROWS_OPEN,
    ROWS_TOGETHER,
    LayerRows,
    LayerSteps,
    PrefillBatcher,
    RunsLayer,
    TogetherPass,
    run_alone,
)
from cacheblend.core.fuse.rows import ActiveRows
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.engines.hf.layers import HfLayerRunner, OfRows
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.hf.view import LayerCall, ModelView

HEADS, WIDTH = 2, 8
SPEC = AttentionSpec(scaling=1.0)
LAYERS, TILE = 3, 8


@dataclass
class Runner:
    """A layer that mixes a row's features, adds its position, and attends; on integers, so that sums are exact."""

    positions: torch.Tensor

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        mixed = hidden.roll(layer + 1, dims=1) + self.positions[rows, None]
        heads = mixed.view(len(rows), HEADS, WIDTH).transpose(0, 1)
        return attend(heads, heads + 1, heads + 2, SPEC).flatten(1)


@dataclass(eq=False)
class Job:
    """One prompt on its way through the layers, in tiles; attention is a running sum over a tile's own rows."""

    rows: int
    first: int = 0
    tile: int = 100
    fails_at: str = ""
    layer: int = 0
    name: str = ""
    few: int | None = None  # rows from layer `join` on, where only the order of jobs is tested
    join: int = 2
    is_closed: bool = False
    tiles: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = Runner(torch.arange(self.first, self.first + self.rows))
        self.hidden = torch.arange(self.rows * HEADS * WIDTH).view(self.rows, -1).float()

    @property
    def active_rows(self) -> int:
        return self.rows if self.few is None or self.layer < self.join else self.few

    def next_layer(self) -> LayerSteps:
        try:
            if self.fails_at == "load":
                raise OSError("cannot be read")
            for start in range(0, self.rows, self.tile):
                rows = torch.arange(start, min(start + self.tile, self.rows))
                self.hidden[rows] = yield LayerRows(self.runner, self.layer, self.hidden[rows], rows, self.attend)
                self.tiles.append(len(rows))
            if self.fails_at == "end":
                raise ValueError("wrong output")
            self.layer += 1
        finally:
            self.is_closed = True

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        if self.fails_at == "attention" or (self.fails_at == "second tile" and self.tiles):
            raise RuntimeError("out of memory")
        return (query + keys + values.cumsum(1)).transpose(0, 1)

    def alone(self, layers: int = 1) -> torch.Tensor:
        """What it should compute."""
        one = Job(self.rows, self.first, self.tile)
        for _ in range(layers):
            run_alone(one.next_layer())
        return one.hidden


class Join:
    """Combines runners of several prompts; records the number of rows per prompt in each call."""

    def __init__(self) -> None:
        self.tiles: list[list[int]] = []

    def __call__(self, calls: Sequence[LayerRows]) -> RunsLayer:
        self.tiles.append([len(call.rows) for call in calls])
        runners = [(call.runner, call.rows) for call in calls]
        return Runner(torch.cat([runner.positions[rows] for runner, rows in runners if isinstance(runner, Runner)]))


# ---- through one layer ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tile_rows", "shapes", "tiles"),
    [
        (12, [(5, 0), (3, 7), (4, 2)], [[5, 3, 4]]),
        (8, [(5, 0), (3, 7), (4, 2)], [[5, 3]]),
        (4, [(5, 0), (3, 7), (4, 2)], []),
        pytest.param(9, [(5, 0), (4, 2), (3, 7)], [[5, 4]], id="the one that does not fit runs alone"),
        pytest.param(7, [(10, 0, 4), (3, 3)], [[4, 3]], id="several tiles run in order"),
    ],
)
def test_passes_equal_single_passes(tile_rows: int, shapes: list[tuple[int, ...]], tiles: list[list[int]]) -> None:
    jobs, join = [Job(*shape) for shape in shapes], Join()
    TogetherPass([each.next_layer() for each in jobs], join, tile_rows, isolate=False).advance()
    assert join.tiles == tiles
    assert all(torch.equal(each.hidden, each.alone()) for each in jobs)


@pytest.mark.parametrize(("where", "kind"), [("load", OSError), ("end", ValueError), ("attention", RuntimeError)])
def test_an_error_ends_its_own_pass_and_those_of_its_tile(where: str, kind: type[Exception]) -> None:
    jobs = [Job(5), Job(3, 7, fails_at=where), Job(40, 2)]
    steps = [each.next_layer() for each in jobs]
    together = TogetherPass(steps, Join(), 10, isolate=True)
    together.advance()
    ended = [type(error) for error in together.errors]
    assert ended == [kind if where == "attention" else type(None), kind, type(None)]
    assert torch.equal(jobs[2].hidden, jobs[2].alone())
    assert all(next(step, "closed") == "closed" for step in steps)
    if where != "end":  # without isolation the first error is raised
        jobs, join = [Job(5), Job(3, 7, fails_at=where), Job(40, 2)], Join()
        with pytest.raises(kind):
            TogetherPass([each.next_layer() for each in jobs], join, 10, isolate=False).advance()
        assert join.tiles == ([] if where == "load" else [[5, 3]])


# ---- a layer that is left between tiles and goes on in the next call --------------------------------------
def batcher_of(*jobs: Job, tile_rows: int = TILE, join_layer: int = 1, isolate: bool = True) -> PrefillBatcher[Job]:
    batcher = PrefillBatcher[Job](join_layer, tile_rows, Join(), isolate=isolate)
    for job in jobs:
        batcher.add(job)
    return batcher


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


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=5),
)
def test_any_limits_give_the_same_numbers(rows: list[int], most: list[int | None]) -> None:
    jobs = [Job(count, tile=TILE) for count in rows]
    assert not run(batcher_of(*jobs), most)
    assert all(torch.equal(job.hidden, job.alone(LAYERS)) for job in jobs)


def test_a_layer_is_left_after_the_tile_that_reaches_the_limit_and_who_comes_meanwhile_waits() -> None:
    job, late = Job(40, tile=TILE), Job(8, tile=TILE)
    batcher = batcher_of(job)
    for expected in (16, 16, 8):
        assert batcher.next() == [job]
        ended = batcher.advance([job], 9)
        assert batcher.rows == expected
        assert ended == ([] if expected == 16 else [(job, None)])
        if expected == 16 and late not in batcher:
            batcher.add(late)
    assert job.layer == 1 and not late.tiles
    assert not run(batcher, [1])
    assert torch.equal(late.hidden, late.alone(LAYERS))


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_is_removed_in_the_middle_of_a_layer_is_closed(number: int) -> None:
    jobs = [Job(20, tile=TILE, layer=1), Job(20, tile=TILE, layer=1)]
    batcher = batcher_of(*jobs, tile_rows=2 * TILE)
    batcher._running = list(batcher)
    batcher._waiting.clear()
    batcher.advance(jobs, 1)
    gone, stays = jobs[number], jobs[1 - number]
    batcher.remove(gone)
    assert gone.is_closed and batcher.next() == [stays]
    assert batcher.advance([stays]) == [(stays, None)]
    assert (stays.layer, gone.layer) == (2, 1)
    batcher.remove(stays)
    assert not batcher


@pytest.mark.parametrize("isolate", [True, False])
def test_an_error_after_a_pause_ends_its_own_job_and_leaves_no_layer_behind(isolate: bool) -> None:
    job, other = Job(20, tile=TILE, fails_at="second tile"), Job(20, tile=TILE)
    if isolate:
        assert list(run(batcher_of(job, other), [1])) == [job]
    else:  # it is raised at once
        batcher = batcher_of(job, isolate=False)
        batcher.advance(batcher.next(), 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            batcher.advance(batcher.next(), 100)
        batcher.remove(job)
        batcher.add(other)
        assert not run(batcher, [1])
    assert torch.equal(other.hidden, other.alone(LAYERS))


# ---- who runs the next layer; needs no model --------------------------------------------------------------


DEPTH = 6
ORDER: dict[str, Any] = {"tile_rows": 100, "join_layer": 2}


def turn(name: str, rows: int, few: int, join: int = 2) -> Job:
    return Job(rows, name=name, few=few, join=join)


def run_all(batcher: PrefillBatcher[Job], late: dict[int, Job] | None = None) -> list[tuple[int, str]]:
    """(layer, names) of each step until all jobs are done; `late` jobs are added before the step with their number."""
    steps: list[tuple[int, str]] = []
    while batcher or any(number >= len(steps) for number in late or {}):
        if late and len(steps) in late:
            batcher.add(late[len(steps)])
        jobs = batcher.next()
        assert len({job.layer for job in jobs}) == 1
        steps.append((jobs[0].layer, names_of(jobs)))
        for job in jobs:
            job.layer += 1
            if job.layer == DEPTH:
                batcher.remove(job)
    return steps


def names_of(jobs: Sequence[Job]) -> str:
    return "".join(job.name for job in jobs)


def alone(name: str, *layers: int) -> list[tuple[int, str]]:
    return [(layer, name) for layer in layers]


ALL, LATE = range(DEPTH), range(2, DEPTH)


@pytest.mark.parametrize(
    ("jobs", "steps"),
    [
        ([turn("a", 500, 50)], alone("a", *ALL)),
        (  # the next job joins after the selection
            [turn("a", 500, 50), turn("b", 400, 40)],
            [*alone("a", 0, 1), *alone("b", 0, 1), *alone("ab", *LATE)],
        ),
        (  # a job without capacity waits until the batch is done
            [turn("a", 500, 60), turn("b", 400, 10)],
            [*alone("a", *ALL), *alone("b", *ALL)],
        ),
        (  # one with more rows than estimated waits for the oldest job
            [turn("a", 500, 10), turn("b", 600, 99)],
            [*alone("a", 0, 1), *alone("b", 0, 1), *alone("a", *LATE), *alone("b", *LATE)],
        ),
    ],
    ids=["one", "joins", "no capacity", "more rows"],
)
def test_who_runs_the_next_layer(jobs: list[Job], steps: list[tuple[int, str]]) -> None:
    assert run_all(batcher_of(*(replace(job) for job in jobs), **ORDER)) == steps
    late = run_all(batcher_of(turn("a", 500, 10), **ORDER), {3: turn("b", 500, 10)})
    assert late == [*alone("a", *ALL), *alone("b", *ALL)]  # it does not delay those that run


@pytest.mark.parametrize(("restarted", "names"), [("b", ["a"] * 2 + ["b"] * DEPTH), ("a", ["a"] * 4 + ["ab"] * 2)])
def test_a_restarted_job_delays_no_older_one_and_is_batched_again(restarted: str, names: list[str]) -> None:
    jobs = {name: turn(name, 500, 10) for name in "ab"}
    batcher = batcher_of(*jobs.values(), **ORDER)
    while jobs["a"].layer < 4:
        for job in batcher.next():
            job.layer += 1
    jobs[restarted].layer = 0  # lost a block
    assert [name for _, name in run_all(batcher)] == names


def test_removed_jobs_no_longer_run_and_batches_are_limited() -> None:
    a, b, c = (turn(name, 500, 10) for name in "abc")
    batcher = batcher_of(a, b, c, **ORDER)
    batcher.next()
    batcher.remove(c)
    batcher.remove(a)
    batcher.remove(a)
    assert list(batcher) == [b]
    assert run_all(batcher) == [(layer, "b") for layer in range(DEPTH)]
    # even with large tiles; and the first layer is never batched
    jobs = [turn("a", 5000, ROWS_TOGETHER // 2) for _ in range(3)]
    assert max(len(names) for _, names in run_all(batcher_of(*jobs, tile_rows=100_000, join_layer=2))) == 2
    for join_layer in (0, 1):
        batcher = batcher_of(*(turn(name, 9, 9, join=1) for name in "ab"), tile_rows=100, join_layer=join_layer)
        assert run_all(batcher)[:3] == [(0, "a"), (0, "b"), (1, "ab")]


def test_jobs_that_wait_for_their_kv_are_passed_over_and_if_they_have_many_rows_no_more_begin() -> None:
    a, b, c = turn("a", 500, 10), turn("b", 500, 10), turn("c", 500, 10)
    batcher, late = batcher_of(a, b, c, **ORDER), {"a"}

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
    assert sorted("".join(names for _, names in run_all(batcher))) == ["a"] * DEPTH + ["b"] * DEPTH + ["c"] * DEPTH
    few, many = turn("a", ROWS_OPEN - 1, 10), turn("b", 1, 1)
    batcher = batcher_of(few, many, turn("c", 1, 1), **ORDER)
    batcher.next()
    assert names_of(batcher.next(lambda job: False)) == "b"
    assert batcher.next(lambda job: False) == []


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=8),
    st.integers(1, 400),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 999),
)
def test_all_jobs_finish_within_the_row_limit_whenever_their_kv_comes(
    shapes: list[tuple[int, int]], rows: int, share_late: float, seed: int
) -> None:
    random = Random(seed)
    jobs = [turn(chr(97 + i), max(a, b), min(a, b)) for i, (a, b) in enumerate(shapes)]
    batcher, steps = batcher_of(*jobs, tile_rows=rows, join_layer=2), 0
    while batcher:
        late = {job.name for job in jobs if random.random() < share_late}
        chosen = batcher.next(lambda job, late=late: job.name not in late or job.layer == 0)
        assert len({job.layer for job in chosen}) <= 1
        assert len(chosen) <= 1 or (chosen[0].layer >= 2 and sum(job.few for job in chosen) <= rows)
        for job in chosen:
            assert job.layer == 0 or job.name not in late
            job.layer, steps = job.layer + 1, steps + 1
            if job.layer == DEPTH:
                batcher.remove(job)
    assert steps == DEPTH * len(jobs)


# ---- rows that stay active after any selections, against plain lists ------------------------------------------
def opened(candidates: list[int], length: int, first: int = 0) -> ActiveRows:
    """The rows of a prompt; its row i has the hidden state [i]."""
    plan: Any = SimpleNamespace(
        candidate_rows=np.array(candidates, dtype=np.int64),
        prefix_length=first,
        chunk_offsets=np.arange(length),
        segment_indices=np.zeros(length, dtype=np.int64),
    )
    return ActiveRows(plan, torch.arange(first, length, dtype=torch.float32)[:, None])


@given(st.data())
def test_selections_drop_what_they_do_not_name_and_nothing_else(data: st.DataObject) -> None:
    length, first = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 5))
    first = min(first, length - 1)
    candidates = sorted(data.draw(st.sets(st.integers(first, length - 2)) if length - 2 >= first else st.just(set())))
    rows, left = opened(candidates, length, first), list(range(first, length))
    others = [row for row in left if row not in candidates]
    for _ in range(3):
        kept = sorted(data.draw(st.sets(st.sampled_from(candidates))) if candidates else [])
        asked = rows.candidates(2, deviation=rows.hidden[:, 0])
        assert asked.positions.tolist() == candidates
        assert asked.deviation is not None and asked.deviation.tolist() == candidates
        mask = torch.tensor([row in kept for row in candidates], dtype=torch.bool)
        rows.keep(mask if data.draw(st.booleans()) else mask.nonzero().flatten())
        candidates, left = kept, sorted([*others, *kept])
        assert rows.positions(slice(0, len(rows))).tolist() == left
        assert rows.hidden[:, 0].tolist() == left
        assert (rows.recomputed, rows.has_candidates) == (len(kept), bool(kept))
    rows.keep_last()
    assert rows.positions(slice(0, 1)).tolist() == [length - 1] and not rows.has_candidates


def test_rows_of_a_tile_are_the_same_tensors_until_a_selection_drops_some() -> None:
    rows = opened([2, 3, 4, 5], 9, 1)
    tiles = list(rows.tiles(5))
    before = [(rows.index_of(tile), rows.positions(tile)) for tile in tiles]
    for tile, (index, positions) in zip(tiles, before, strict=True):
        assert rows.index_of(tile) is index and rows.positions(tile) is positions
        assert torch.equal(index, rows.index[tile]) and torch.equal(positions, index + 1)
    rows.keep(torch.tensor([0, 3]))
    assert rows.positions(slice(0, 5)).tolist() == [1, 2, 5, 6, 7]
    assert rows.index_of(slice(0, 5)).tolist() == [0, 1, 4, 5, 6]
    rows.keep_last(2)
    assert rows.positions(slice(0, 2)).tolist() == [7, 8]
    # what is no selection changes nothing
    wrong = [[1, 1], [2, 0], [-1, 0], [0, 3], [0, 1, 2, 3], [True, False], [[0]], [0.0, 1.0]]
    for selected in (*map(torch.tensor, wrong), torch.tensor([1, 0, 1], dtype=torch.uint8)):
        rows = opened([2, 3, 5], 8)
        with pytest.raises(InvalidInputError, match=r"for 3 candidates; it gives their indices"):
            rows.keep(selected)
        assert rows.positions(slice(0, 8)).tolist() == list(range(8)) and rows.has_candidates


# ---- what a layer is given besides hidden states, cut to a tile's rows once -----------------------------------
def parts_of(call: LayerCall) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    for value in (*call.args, *call.kwargs.values()):
        parts = value if isinstance(value, tuple) else (value,)
        found += [part.part for part in parts if isinstance(part, OfRows)]
    return found


@pytest.mark.parametrize("tiles", [1, 3, 40])
def test_layers_share_the_arguments_of_the_same_rows(tiles: int) -> None:
    view = ModelView(build_shape("tiny"))
    with torch.no_grad():
        runner = HfLayerRunner(view, torch.arange(90), torch.arange(90) * 2)
        whole = parts_of(runner.arguments(0, torch.arange(90)))
        drawn = torch.Generator().manual_seed(tiles)
        rows = [torch.randperm(90, generator=drawn)[:20].sort().values for _ in range(tiles)]
        first = [parts_of(runner.arguments(0, each)) for each in rows]
        for layer in range(runner.num_layers):
            for each, known in zip(rows, first, strict=True):
                parts = parts_of(runner.arguments(layer, each))
                assert len(parts) == len(whole) >= 2
                assert all(torch.equal(part, all_[:, each]) for part, all_ in zip(parts, whole, strict=True))
                assert tiles > 16 or all(part is one for part, one in zip(parts, known, strict=True))
                assert all(torch.equal(part, one) for part, one in zip(parts, known, strict=True))


def test_other_rows_in_the_memory_of_those_before_have_their_own_arguments() -> None:
    runner = HfLayerRunner(ModelView(build_shape("tiny")), torch.arange(30), torch.arange(30))
    for first in range(25):
        rows = torch.arange(first, first + 5)  # freed with each round, but for what the runner holds
        assert parts_of(runner.arguments(0, rows))[0].shape[1] == 5
        whole = parts_of(runner.arguments(0, torch.arange(30)))
        assert torch.equal(parts_of(runner.arguments(1, rows))[0], whole[0][:, first : first + 5])
