"""The shadow check's two sides alone, with stand-ins for vLLM's requests and for prefills.

Scheduler: what is drawn and read, when there is time for it, and what the floor does to new requests. Worker: one tile
in a step, behind everything else; its share of the load while there is nothing else than load; what fails ends alone.
"""

import hashlib
import math
import random
import zlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cacheblend.engines.shadow import ANSWER_TOKENS, MOST_WAITING, Compared, Labels, ShadowSettings, ShadowWatch
from cacheblend.engines.vllm.jobs import BlendOutcome, CheckJob, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import BlendPromMetrics, BlendStats, Counts, joined
from cacheblend.engines.vllm.scheduler import shadow_answers
from cacheblend.engines.vllm.scheduler.load_control import LoadChoice
from cacheblend.engines.vllm.worker import shadow_prefills
from vllm_requests import CHUNK, PROMPT, Request, scheduling, start, with_options
from vllm_workers import LAYERS, Prefill, Store, blend, make_worker

FLOOR: dict[str, Any] = {"shadow_floor": 0.8, "blend_fields": {"recompute_ratio": 0.2}}
GOOD, BAD = Compared(0.0, (True,)), Compared(2.0, (False,))


class Clock:
    """Stands where a test has moved it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(shadow_answers, "time", made)
    return made


def provide(side: Any, request: Request, *, recomputed: int = 15, hits: Any = None) -> None:
    """The request comes, and its prompt is provided."""
    side.allocated(request, [[3, 4, 5]], start(side, request))
    side.take_jobs()
    side.provided([request.request_id])
    outcome = BlendOutcome(hit_tokens={"disk": 100} if hits is None else hits, recomputed_tokens=recomputed)
    side.reported(StepReport(outcomes={request.request_id: outcome}))


def request_of(name: str = "r", **fields: Any) -> Request:
    """With a prompt of its own, or it would wait for the other's blocks."""
    return Request([zlib.crc32(name.encode()), *PROMPT[1:]], name=name, output_token_ids=[], **fields)


def provided(name: str = "r", *, recomputed: int = 15, hits: Any = None, **settings: Any) -> tuple[Any, Request]:
    """A side that checks every answer, and a request whose prompt was provided."""
    side, request = scheduling([CHUNK], shadow=1.0, **settings), request_of(name)
    provide(side, request, recomputed=recomputed, hits=hits)
    return side, request


def answer(request: Request, tokens: int) -> None:
    request.output_token_ids, request.num_output_tokens = list(range(tokens)), tokens


def dropped(side: Any) -> dict[str, int]:
    found: dict[str, int] = side._checks.watch.figures().dropped
    return found


def end(side: Any, request: Request) -> bool:
    side.finished(request)
    held: bool = side.holds(request)
    return held


# ---- what is drawn and read ---------------------------------------------------------------------------------


def test_an_answer_is_read_once_it_has_sixteen_tokens_or_has_ended() -> None:
    side, request = provided()
    answer(request, ANSWER_TOKENS - 1)
    assert side.take_jobs().check is None
    answer(request, ANSWER_TOKENS + 3)
    job = side.take_jobs().check
    assert job.prompt_ids.tolist() == request.prompt_token_ids
    assert (job.token_ids, job.block_ids) == (tuple(range(16)), [[3, 4, 5]])
    assert not job.is_held and side.take_jobs().check is None
    assert not end(side, request)
    side.reported(StepReport(checked={job.number: GOOD}))
    (series,) = side._checks.watch.figures().series
    assert series.labels == ("", "hkvd", "engine") and series.compared == 1 and not dropped(side)
    short = request_of("short")
    provide(side, short)
    answer(short, 3)
    assert side.take_jobs().check is None
    assert end(side, short), "vLLM keeps its blocks"
    job = side.take_jobs().check
    assert job.is_held and job.token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("recomputed", "hits"),
    [(100, None), (0, {}), (0, {"vllm": 40, "prefix": 8})],
    ids=["all of it recomputed", "nothing loaded", "exact hits"],
)
def test_exact_answers_are_not_drawn(recomputed: int, hits: Any) -> None:
    side, request = provided(recomputed=recomputed, hits=hits)
    answer(request, 20)
    assert side.take_jobs().check is None and not end(side, request) and not dropped(side)


def test_of_a_prompt_that_comes_in_pieces_no_answer_is_drawn() -> None:
    """Behind the first answer it goes on, with other blocks."""
    side, request = scheduling([CHUNK], shadow=1.0), request_of(resumable=True)
    provide(side, request)
    answer(request, 3)
    assert side.take_jobs().check is None and not end(side, request) and not dropped(side)


def test_a_front_that_was_blended_before_makes_an_answer_approximate() -> None:
    side, request = scheduling([CHUNK], shadow=1.0), request_of()
    side.allocated(request, [[3, 4, 5]], start(side, request))
    side._requests["r"].held_by_vllm = 96  # of which rows 40..95 were blended
    side.reported(StepReport(outcomes={"r": BlendOutcome(hit_tokens={"vllm": 96, "disk": 44}, recomputed_tokens=44)}))
    answer(request, 20)
    assert side.take_jobs().check is not None


def test_requests_that_end_without_an_answer_or_were_preempted_are_counted() -> None:
    side = scheduling([CHUNK], shadow=1.0)
    none, first, second = (request_of(name) for name in "abc")
    for request in (none, first, second):
        provide(side, request)
    assert not end(side, none)
    for request in (first, second):
        answer(request, 20)
        request.num_preemptions = 1
    assert not end(side, second)
    assert side.take_jobs().check is None
    assert dropped(side) == {"no answer": 1, "preempted": 2}


def test_one_answer_is_read_in_a_step_and_few_blocks_are_kept() -> None:
    side, running = provided("running")
    answer(running, 20)
    ended = [request_of(str(number)) for number in range(MOST_WAITING + 2)]
    for request in ended:
        provide(side, request)
        side.take_jobs()  # reads `running` in the first of these steps
        answer(request, 2)
    assert [end(side, request) for request in ended] == [True] * MOST_WAITING + [False] * 2
    assert dropped(side) == {"queue full": 2}
    read = [side.take_jobs().check for _ in range(MOST_WAITING)]
    assert [job.request_id for job in read] == [str(number) for number in range(MOST_WAITING)]
    assert side.take_jobs().check is None


def test_new_weights_end_all_checks_and_give_blocks_back() -> None:
    side = scheduling([CHUNK], shadow=1.0)
    sent, held, drawn = (request_of(name) for name in ("sent", "held", "drawn"))
    for request in (sent, held, drawn):
        provide(side, request)
    answer(sent, 20)
    job = side.take_jobs().check
    answer(held, 2)
    assert end(side, held)
    side.reset()
    jobs = side.take_jobs()
    assert (jobs.check, jobs.released, jobs.is_reset) == (None, ["held"], True)
    assert dropped(side) == {"cache reset": 2}
    side.reported(StepReport(checked={job.number: "cache reset"}))
    assert dropped(side) == {"cache reset": 3} and not side.is_busy


def test_a_tenant_is_shown_by_a_hash_of_its_salt() -> None:
    side, request = scheduling([CHUNK], salt="acme", shadow=1.0), request_of(cache_salt="acme")
    provide(side, request)
    request.cache_salt = "acme and what blended blocks are named by"
    answer(request, 20)
    side.reported(StepReport(checked={side.take_jobs().check.number: GOOD}))
    (series,) = side._checks.watch.figures().series
    assert series.labels.tenant == hashlib.sha256(b"acme").hexdigest()[:8]


def test_a_prompt_beyond_the_window_is_counted_only_if_it_was_drawn() -> None:
    side, _ = provided(window=len(PROMPT) + 15)
    assert dropped(side) == {"beyond the sliding window": 1}


# ---- when -----------------------------------------------------------------------------------------------------


def test_beside_requests_the_check_takes_its_share_of_the_time(clock: Clock) -> None:
    side, request, other = scheduling([CHUNK], shadow=0.1), request_of(), request_of("other")
    side._checks.watch.takes = lambda *_, **__: True
    provide(side, request)
    answer(request, 16)
    side.on_new(other)  # somebody else is there all the time
    first = side.take_jobs()
    assert first.check is not None and first.may_check and not first.is_check_free
    assert not side.take_jobs().may_check  # what the last one took is not known yet
    side.reported(StepReport(check_s=0.5))
    clock.now += 4.4
    assert not side.take_jobs().may_check
    clock.now += 0.2
    assert side.take_jobs().may_check
    side.reported(StepReport(check_s=0.1))
    side.reported(StepReport(check_s=0.1))  # an answer that was read meanwhile counts as well
    clock.now += 1.7
    assert not side.take_jobs().may_check
    clock.now += 0.2
    assert side.take_jobs().may_check


def test_without_requests_the_check_goes_on_for_some_seconds(clock: Clock) -> None:
    side, request = scheduling([CHUNK], shadow=0.1), request_of()
    side._checks.watch.takes = lambda *_, **__: True
    provide(side, request)
    answer(request, 2)
    side.take_jobs()
    assert end(side, request) and side.is_busy
    job = side.take_jobs()
    assert job.check.is_held and job.may_check and job.is_check_free
    assert side.take_jobs().may_check and side.is_busy
    clock.now += 11
    assert not side.is_busy  # vLLM may pause or end; the next request brings it on
    side.on_new(request_of("next"))
    side.take_jobs()
    assert side.is_busy
    side.reported(StepReport(checked={job.check.number: GOOD}))
    assert not side.is_busy


# ---- the floor ------------------------------------------------------------------------------------------------


def check(side: Any, number: int, result: Compared, **options: Any) -> Any:
    """A request whose answer is compared with this result; the job that the workers were given."""
    request = request_of(f"n{number}", kv_transfer_params={"cacheblend": options} if options else None)
    provide(side, request)
    found = side._requests[request.request_id].found
    answer(request, 20)
    job = side.take_jobs().check
    if job is not None:
        side.reported(StepReport(checked={job.number: result}))
    end(side, request)
    return found


def test_disagreement_raises_the_ratio_of_requests_that_name_none() -> None:
    side = scheduling([CHUNK], shadow=1.0, **FLOOR)
    found = [check(side, number, BAD) for number in range(6)]
    assert [round(each.selector.share, 3) for each in found] == [0.2] * 5 + [0.3]
    assert found[0].salt == found[4].salt != found[5].salt  # blended blocks of the lower ratio are not found any more
    for options in ({"recompute_ratio": 0.2}, {"selector": "random"}):
        own = [check(side, 10 + number, BAD, **options) for number in range(6)]
        assert {each.selector.share for each in own} == {0.2}
    assert side._checks.watch.ratio == pytest.approx(0.3)
    told = side.counts.take().data
    assert told["shadow_changes"] == {"raised": 1, "lowered": 0} and told["shadow_ratio"][""] == pytest.approx(0.3)
    assert told["shadow"] == {"|hkvd|engine": 6, "|hkvd|request": 6, "|random|request": 6}


def test_an_answer_names_the_ratio_that_was_in_force_when_its_request_came() -> None:
    side, early = provided("early", **FLOOR)
    for number in range(5):
        check(side, number, BAD)
    later, own, exact = request_of("later"), request_of("own"), request_of("exact")
    own.kv_transfer_params = {"cacheblend": {"recompute_ratio": 0.1}}
    exact.kv_transfer_params = {"cacheblend": {"mode": "full"}}
    bare = Request([*CHUNK, 7, 8], name="all that is loaded is exact")
    for request in (later, own, bare):
        provide(side, request)
    start(side, exact)
    told = [side.finished(request)["cacheblend"] for request in (early, later, own, exact, bare)]
    assert [each["recompute_ratio"] for each in told] == [0.2, pytest.approx(0.3), 0.1, None, None]
    assert [each["selector"] for each in told] == ["hkvd", "hkvd", "hkvd", "", ""]
    assert [each["blended"] for each in told] == [True, True, True, False, True]


def test_the_loading_controller_raises_what_it_recomputes_above_the_ratio_in_force() -> None:
    """And the answer names that; blocks that others share are named, and told, by the ratio in force."""
    asked: list[Any] = []

    def decide(plan: Any, in_force: float | None, *, raises: bool) -> LoadChoice:
        asked.append((in_force, raises))
        return LoadChoice(plan, ratio=0.45 if raises else None)

    side = scheduling([CHUNK], shadow=1.0, **FLOOR)
    side._finder._control = SimpleNamespace(decide=decide, learn=lambda *_: None, compute_s=lambda plan: None)
    for number in range(5):
        assert check(side, number, BAD).named_by.share == pytest.approx(0.2)
    later, own = request_of("later"), with_options([3, *PROMPT], "own", recompute_ratio=0.1)
    for request in (later, own):
        provide(side, request)
    assert asked[0] == (pytest.approx(0.2), True)
    assert asked[-2:] == [(pytest.approx(0.3), True), (0.1, False)]
    assert side._requests["later"].found.named_by.share == pytest.approx(0.3)
    assert side.finished(later)["cacheblend"]["recompute_ratio"] == pytest.approx(0.45)
    assert side.finished(own)["cacheblend"]["recompute_ratio"] == pytest.approx(0.1)


def test_full_recompute_loads_what_is_exact_and_is_left_again() -> None:
    side = scheduling([CHUNK], shadow=1.0, shadow_floor=0.5, blend_fields={"recompute_ratio": 0.6})
    for number in range(5):
        check(side, number, BAD)
    assert side._checks.watch.is_full
    request = request_of("full")
    assert start(side, request) == 0
    assert request.block_hashes == request_of("full").block_hashes  # plain: all of it is exact
    side.finished(request)
    assert side.counts.take().data["not_blended"] == {"full recompute": 1}
    own = with_options(list(PROMPT), "own", recompute_ratio=0.6)
    assert start(side, own) == len(PROMPT) - 1
    rows, number = side._checks.watch.settings.rows, 0
    while side._checks.watch.is_full:  # drawn requests count as agreeing
        number += 1
        assert number <= rows
        start(side, request_of(f"full {number}"))
    assert number == rows - 1  # and one before
    assert check(side, 99, GOOD).selector.share == pytest.approx(0.6)


def test_requests_that_were_under_way_when_the_ratio_changed_move_nothing() -> None:
    side = scheduling([CHUNK], shadow=1.0, **FLOOR)
    late = [request_of(f"late {number}") for number in range(5)]
    for request in late:
        provide(side, request)
        answer(request, 2)
    for number in range(5):
        check(side, number, BAD)
    jobs = []
    for request in late:
        end(side, request)
        jobs.append(side.take_jobs().check)
    side.reported(StepReport(checked={job.number: BAD for job in jobs}))
    assert side._checks.watch.step == 1


def test_of_two_steps_counts_are_added_and_the_later_present_values_stay() -> None:
    one: dict[str, Any] = {"requests": {"": 1}, "shadow": {"a": 1}, "shadow_kl": {"a": [1.0]}}
    first = BlendStats(data=one | {"shadow_waiting": {"": 3.0}})
    second = {"requests": {"": 2}, "shadow": {"a": 1, "b": 1}, "shadow_kl": {"a": [2.0], "b": [4.0]}}
    both = first.aggregate(BlendStats(data=second | {"shadow_waiting": {"": 1.0}}))
    assert both.data["shadow"] == {"a": 2, "b": 1}
    assert both.data["shadow_kl"] == {"a": [1.0, 2.0], "b": [4.0]}
    assert both.data["shadow_waiting"] == {"": 1.0}
    assert first.data["shadow_kl"] == {"a": [1.0]}
    shown = both.reduce()
    assert shown["shadow_kl a"] == 1.5 and shown["shadow_waiting"] == 1.0 and shown["requests"] == 3


# ---- the worker ----------------------------------------------------------------------------------------------


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
    made._opener.full = lambda job: fulls[job.request_id]
    made._opener.read_answer = lambda job: torch.eye(4)[job.token_ids[0]][None]
    yield SimpleNamespace(side=made, prefills=prefills, fulls=fulls)
    made._capture_writer._keeper._store.gate.set()
    made.close()


def job_of(name: str, number: int = 1, token: int = 2, *, is_held: bool = False) -> Any:
    return CheckJob(number, name, np.arange(5), (token,), [[5, 6]], is_held)


def step(worker: Any, **fields: Any) -> Any:
    worker.side.step(StepJobs(**{"may_check": True, **fields}))
    return worker.side.checks.take_ended()[0]


def test_a_step_computes_one_tile_with_leave(worker: Any) -> None:
    one = worker.fulls["one"] = Full(token=2)
    assert not step(worker, check=job_of("one", is_held=True), may_check=False)
    assert worker.side.checks.take_read() == {"one"} and not worker.side.checks.take_read()
    for _ in range(3):
        step(worker, may_check=False)
    assert worker.side.checks._under_way is None and one.tiles == 0, "it was read, and nothing else was done"
    assert not step(worker)  # opened
    for number in range(1, 2 * LAYERS):
        assert not step(worker, is_idle=number % 2 == 0)
        assert one.tiles == number
    assert step(worker) == {1: Compared(0.0, (True,))}
    assert one.is_closed and not step(worker)


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
    step(worker, capture=[SimpleNamespace(adapter=None, pages=None)], is_check_free=True)
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
    draw, clock = random.Random(seed), Clock()
    share, rows = draw.choice([0.02, 0.1, 0.5]), draw.randint(1, 8)
    for module in (shadow_answers, shadow_prefills):
        monkeypatch.setattr(module, "time", clock)
    watch = ShadowWatch(ShadowSettings(share), "m", 0.15, seed=seed)
    draws = shadow_answers.AnswerDraws(watch, Counts())
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
    worker.fulls["one"] = Full(2)
    worker.side.step(StepJobs(check=job_of("one"), may_check=True, is_check_free=True))
    assert worker.side.checks.take_ended()[1] == 0
    worker.side.step(StepJobs(may_check=True))
    assert worker.side.checks.take_ended()[1] > 0
    worker.side.step(StepJobs())
    assert worker.side.checks.take_ended()[1] == 0


def test_in_vllm_counts_are_added_present_values_replaced_and_observations_observed() -> None:
    registry = CollectorRegistry()

    def of(kind: type) -> object:
        return lambda **options: kind(**options, registry=registry)

    extra = {"store": "memory", "shadow": 0.1}
    transfer = SimpleNamespace(kv_connector="CacheBlendConnector", kv_connector_extra_config=extra)
    kinds: dict[Any, Any] = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    made = BlendPromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    text = joined("ab12", "hkvd", "engine")
    for _ in range(2):
        made.observe({"shadow": {text: 1}})
        made.observe({"shadow_tokens": {joined(text, "yes"): 15, joined(text, "no"): 1}})
        made.observe({"shadow_kl": {text: [0.02, 5.0]}})
        made.observe({"shadow_agreement": {joined(text, "answer"): 0.9}})
        made.observe({"shadow_ratio": {"": 0.15}})
    made.observe({"shadow_agreement": {joined(text, "answer"): math.nan}})  # the window has begun anew
    whose = {"model_name": "m", "engine": "0", "tenant": "ab12", "selector": "hkvd", "settings": "engine"}
    value = registry.get_sample_value
    assert value("vllm:cacheblend_shadow_total", whose) == 2
    assert value("vllm:cacheblend_shadow_tokens_total", whose | {"agreed": "yes"}) == 30
    assert value("vllm:cacheblend_shadow_kl_sum", whose) == 10.04
    assert value("vllm:cacheblend_shadow_kl_bucket", whose | {"le": "0.03"}) == 2
    assert math.isnan(value("vllm:cacheblend_shadow_agreement", whose | {"of": "answer"}) or 0)
    assert value("vllm:cacheblend_shadow_ratio", {"model_name": "m", "engine": "0"}) == 0.15
    made.observe({"fallbacks": {"a|b": 2}, "requests": {"": 3}, "unknown": {"": 1}})
    engine = {"model_name": "m", "engine": "0"}
    assert value("vllm:cacheblend_fallbacks_total", engine | {"reason": "a|b"}) == 2
    assert value("vllm:cacheblend_requests_total", engine) == 3
    assert value("vllm:cacheblend_prompt_tokens_total", engine) == 0  # shown from the start
