"""The shadow check's worker side alone, with stand-ins for prefills: one tile in a step, behind everything else; what
fails ends alone.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.engines.shadow import MOST_WAITING, Compared
from vllm_running import needs_vllm
from vllm_workers import LAYERS, Prefill, Store, blend, make_worker

pytestmark = needs_vllm


class Full(Prefill):
    """A stand-in for a full prefill over one answered token: a layer has two tiles."""

    def __init__(self, token: int, fails_at: int = -1) -> None:
        super().__init__(rows=5, fails_at=fails_at)
        self.token, self.tiles = token, 0

    def next_layer(self) -> Any:
        if self.layer == self.fails_at:
            raise self.error("injected")
        for _ in range(2):
            yield SimpleNamespace(rows=range(5), run=self._tile)
        self.layer += 1

    def _tile(self) -> torch.Tensor:
        self.tiles += 1
        return torch.zeros(5, 1)

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

    return CheckJob(number, name, np.arange(5), (token,), [5, 6], is_held)


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
    prompt = worker.prefills["prompt"] = Prefill(rows=10)  # uses up the budget of each step
    step(worker, blend=[blend("prompt")])
    began = one.tiles
    for layer in range(1, LAYERS + 1):
        step(worker)
        assert one.tiles == began or layer == 1  # the step in which it is opened computes no layer
        began = one.tiles
    while not worker.side.take_provided():
        step(worker)
    assert prompt.done
    while not (found := step(worker)):
        pass
    assert found[1].agreed == (False,) and found[1].kl > 0


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
