"""The shadow check's worker side alone, with stand-ins for prefills: one tile in a step, behind everything else; its
share of the load while there is nothing else than load; what fails ends alone.
"""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.engines.shadow import MOST_WAITING, Compared
from vllm_plugin.test_checking import Clock
from vllm_running import needs_vllm
from vllm_workers import LAYERS, Prefill, Store, blend, make_worker

pytestmark = needs_vllm


class Tiles(Prefill):
    """A stand-in for a prefill: counts the tiles of its layers, and moves a clock by a second a row."""

    def __init__(self, rows: int, tiles: int, clock: Clock | None = None) -> None:
        super().__init__(rows)
        self._layer_tiles, self._clock, self.tiles = tiles, clock, 0

    def next_layer(self) -> Any:
        if self.layer == self.fails_at:
            raise self.error("injected")
        for _ in range(self._layer_tiles):
            yield SimpleNamespace(rows=range(self.active_rows), run=self._tile)
        self.layer += 1

    def _tile(self) -> torch.Tensor:
        self.tiles += 1
        if self._clock is not None:
            self._clock.now += self.active_rows
        return torch.zeros(self.active_rows, 1)


class Full(Tiles):
    """A stand-in for a full prefill over one answered token: a layer has two tiles."""

    def __init__(self, token: int, rows: int = 5, tiles: int = 2, clock: Clock | None = None) -> None:
        super().__init__(rows, tiles, clock)
        self.token = token

    def result(self) -> Any:
        return SimpleNamespace(logits=torch.eye(4)[self.token])


@pytest.fixture
def worker() -> Any:
    prefills, fulls = dict[str, Prefill](), dict[str, Full]()
    made = make_worker(Store(), SimpleNamespace(size=1, rank=0), budget=10)
    made._opener.blend = lambda job: prefills[job.request_id]
    made._opener.full = lambda job, planner: fulls[job.request_id]
    made._opener.read_answer = lambda job: torch.eye(4)[job.token_ids[0]][None]
    yield SimpleNamespace(side=made, prefills=prefills, fulls=fulls)
    made._capture_writer._keeper._store.gate.set()
    made.close()


def job_of(name: str, number: int = 1, token: int = 2, *, is_held: bool = False) -> Any:
    import numpy as np

    from cacheblend.engines.vllm.jobs import CheckJob

    return CheckJob(number, name, np.arange(5), (token,), [[5, 6]], is_held)


def step(worker: Any, **fields: Any) -> Any:
    from cacheblend.engines.vllm.jobs import StepJobs

    worker.side.step(StepJobs(**{"may_check": True, **fields}))
    return worker.side.checks.take_ended()[0]


def test_a_step_computes_one_tile(worker: Any) -> None:
    one = worker.fulls["one"] = Full(token=2)
    assert not step(worker, check=job_of("one", is_held=True))  # read, and opened
    assert worker.side.checks.take_read() == {"one"} and not worker.side.checks.take_read()
    for number in range(1, 2 * LAYERS):
        assert not step(worker, is_idle=number % 2 == 0)
        assert one.tiles == number
    assert step(worker) == {1: Compared(0.0, (True,))}
    assert one.is_closed and not step(worker)


def test_without_leave_an_answer_is_read_and_nothing_else_is_done(worker: Any) -> None:
    one = worker.fulls["one"] = Full(token=2)
    assert not step(worker, check=job_of("one", is_held=True), may_check=False)
    assert worker.side.checks.take_read() == {"one"}
    for _ in range(3):
        step(worker, may_check=False)
    assert worker.side.checks._under_way is None and one.tiles == 0


def test_prompts_that_come_in_the_middle_of_a_check_go_first(worker: Any) -> None:
    one = worker.fulls["one"] = Full(token=1)
    step(worker, check=job_of("one"))
    step(worker)
    assert one.tiles == 1
    prompt = worker.prefills["prompt"] = Tiles(rows=1, tiles=20)  # uses up the budget of each step
    step(worker, blend=[blend("prompt")], may_check=False)
    while not prompt.done:
        before = prompt.tiles
        step(worker, may_check=False)  # it is not the check's turn
        assert one.tiles == 1 and (prompt.tiles > before or before == 0)  # the step that opens it computes no layer
    while not (found := step(worker)):
        pass
    assert found[1].agreed == (False,) and found[1].kl > 0


def test_chunks_that_are_captured_without_requests_go_first(worker: Any) -> None:
    one, chunk = Full(token=2), Tiles(rows=1, tiles=100)
    worker.fulls["one"], worker.side._opener.capture = one, lambda job, kv: chunk
    step(worker, check=job_of("one"), is_check_free=True)
    step(worker, capture=[SimpleNamespace(adapter=None)], is_check_free=True)
    began = one.tiles
    for _ in range(30):
        step(worker, is_check_free=True)
    assert chunk.tiles > 250 and one.tiles == began


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_under_full_load_its_turn_is_taken_from_the_next_steps_budget(worker: Any, every: int) -> None:
    """A tile of five rows in each step that is the check's turn; no step is longer than its budget and that tile."""
    one = worker.fulls["one"] = Full(token=2)
    load = worker.prefills["load"] = Tiles(rows=1, tiles=10_000)
    step(worker, check=job_of("one"), blend=[blend("load")], may_check=False)
    step(worker, may_check=False)
    steps: list[tuple[int, int]] = []
    turns = 0
    while not one.done:
        blended, checked = load.tiles, one.tiles
        turns += (turn := len(steps) % every == 0)
        step(worker, may_check=turn)
        steps.append((load.tiles - blended, one.tiles - checked))
    assert turns == 1 + one.tiles  # the first one opens it
    for (_, before), (blended, _) in pairwise(steps):
        assert blended == (5 if before else 10)  # of a budget of ten rows
    rows = sum(blended + 5 * checked for blended, checked in steps)
    assert 10 * (len(steps) - 2) <= rows <= 10 * len(steps) + 5


def test_a_tile_larger_than_the_budget_lets_prompts_go_on(worker: Any) -> None:
    worker.fulls["one"] = Full(token=2, rows=100)
    load = worker.prefills["load"] = Tiles(rows=1, tiles=10_000)
    step(worker, check=job_of("one"), blend=[blend("load")])
    step(worker)
    for _ in range(6):
        before = load.tiles
        step(worker)
        assert load.tiles > before


@pytest.mark.parametrize("seed", range(6))
def test_under_full_load_answers_are_compared_and_cost_the_drawn_share(
    worker: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides together, on a clock that computing alone moves: blends without an end use up every step."""
    from cacheblend.engines.shadow import Labels, ShadowSettings, ShadowWatch
    from cacheblend.engines.vllm.jobs import StepJobs, StepReport
    from cacheblend.engines.vllm.metrics import Counts
    from cacheblend.engines.vllm.scheduler import shadow_answers as draws_module
    from cacheblend.engines.vllm.worker import shadow_prefills as checks_module

    draw, clock = random.Random(seed), Clock()
    share, rows = draw.choice([0.02, 0.1, 0.5]), draw.randint(1, 8)
    for module in (draws_module, checks_module):
        monkeypatch.setattr(module, "time", clock)
    watch = ShadowWatch(ShadowSettings(share), "m", 0.15, seed=seed)
    draws = draws_module.AnswerDraws(watch, Counts())
    fulls = [Full(2, rows, tiles=3, clock=clock) for _ in range(40)]
    worker.fulls.update({str(number): full for number, full in enumerate(fulls)})
    load = worker.prefills["load"] = Tiles(1, 1_000_000, clock)
    step(worker, blend=[blend("load")], may_check=False)
    step(worker, may_check=False)
    began, compared = clock.now, 0
    for number in range(10_000):
        if number % 50 == 0 and number // 50 < len(fulls):  # an answer that was drawn has ended
            draws._open[number] = Labels("", "hkvd"), 0
            job = job_of(str(number // 50), number)
        else:
            job = None
        jobs = StepJobs()
        draws.fill(jobs, has_requests=True)
        jobs.check = job
        before = load.tiles
        worker.side.step(jobs)
        assert load.tiles > before
        checked, seconds = worker.side.checks.take_ended()
        draws.reported(StepReport(checked=checked, check_s=seconds))
        compared += sum(isinstance(each, Compared) for each in checked.values())
        if not draws._open and number > 50 * len(fulls):
            break
    took, all_s = rows * sum(full.tiles for full in fulls), clock.now - began
    assert took <= share * all_s + rows
    assert compared >= 5 and compared + watch.figures().dropped.get("queue full", 0) == len(fulls)
    if compared < len(fulls):  # it had something to do all the time
        assert took >= 0.5 * share * all_s


def test_two_answers_in_turn_and_the_oldest_of_nine_is_dropped(worker: Any) -> None:
    for number in range(MOST_WAITING + 1):
        worker.fulls[str(number)] = Full(token=2)
    found = {}
    for number in range(MOST_WAITING + 1):
        found |= step(worker, check=job_of(str(number), number), may_check=False)
    assert found == {0: "queue full"}
    for _ in range(MOST_WAITING * (2 * LAYERS + 1)):
        found |= step(worker)
    assert [*found] == [*range(MOST_WAITING + 1)] and all(found[number].first for number in range(1, MOST_WAITING + 1))


@pytest.mark.may_fail("shadow check")
@pytest.mark.parametrize("where", ["reading", "opening", "a layer", "the result"])
def test_a_check_that_fails_ends_alone(worker: Any, where: str) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    one, two = worker.fulls.setdefault("one", Full(2)), worker.fulls.setdefault("two", Full(2))
    reads, opens = worker.side._opener.read_answer, worker.side._opener.full
    if where == "reading":
        worker.side._opener.read_answer = fail
    elif where == "opening":
        worker.side._opener.full = fail
    elif where == "a layer":
        one.fails_at = 2
    else:
        one.result = fail  # type: ignore[method-assign]
    found = step(worker, check=job_of("one", is_held=True))
    assert worker.side.checks.take_read() == {"one"}
    for _ in range(2 * LAYERS + 1):
        found |= step(worker)
    assert found == {1: "failed"} and one.is_closed == (where in ("a layer", "the result"))
    worker.side._opener.read_answer, worker.side._opener.full = reads, opens
    found = step(worker, check=job_of("two", 2))
    for _ in range(2 * LAYERS + 1):
        found |= step(worker)
    assert found == {2: Compared(0.0, (True,))} and two.is_closed


def test_new_weights_and_the_end_drop_all(worker: Any) -> None:
    for name in ("one", "two", "three"):
        worker.fulls[name] = Full(2)
    step(worker, check=job_of("one", 1))
    step(worker, check=job_of("two", 2))
    assert step(worker, is_reset=True, released=["x"]) == {1: "cache reset", 2: "cache reset"}
    assert worker.side.checks.take_read() == {"x"} and worker.fulls["one"].is_closed
    step(worker, check=job_of("three", 3))
    worker.side.close()
    assert worker.side.checks.take_ended()[0] == {3: "closed"} and worker.fulls["three"].is_closed


def test_time_is_charged_only_where_somebody_may_wait(worker: Any) -> None:
    from cacheblend.engines.vllm.jobs import StepJobs

    worker.fulls["one"] = Full(2)
    worker.side.step(StepJobs(check=job_of("one"), may_check=True, is_check_free=True))
    assert worker.side.checks.take_ended()[1] == 0
    worker.side.step(StepJobs(may_check=True))
    assert worker.side.checks.take_ended()[1] > 0
    worker.side.step(StepJobs())
    assert worker.side.checks.take_ended()[1] == 0
