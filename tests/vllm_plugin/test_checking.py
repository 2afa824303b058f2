"""The shadow check's scheduler side alone, with stand-ins for vLLM's requests: what is drawn and read, when there is
time for it, and what the floor does to new requests."""

import hashlib
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend.engines.shadow import ANSWER_TOKENS, MOST_WAITING, Compared
from vllm_requests import CHUNK, PROMPT, Request, scheduling, start, with_options
from vllm_running import needs_vllm

pytestmark = needs_vllm

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
    from cacheblend.engines.vllm.scheduler import shadow_answers

    made = Clock()
    monkeypatch.setattr(shadow_answers, "time", made)
    return made


def report(**fields: Any) -> Any:
    from cacheblend.engines.vllm.jobs import StepReport

    return StepReport(**fields)


def provide(side: Any, request: Request, *, recomputed: int = 15, hits: Any = None) -> None:
    """The request comes, and its prompt is provided."""
    from cacheblend.engines.vllm.jobs import BlendOutcome

    claimed = start(side, request)
    side.allocated(request, [[3, 4, 5]], claimed)
    side.take_jobs()
    side.provided([request.request_id])
    outcome = BlendOutcome(hit_tokens={"disk": 100} if hits is None else hits, recomputed_tokens=recomputed)
    side.reported(report(outcomes={request.request_id: outcome}))


def request_of(name: str = "r", **fields: Any) -> Request:
    """With a prompt of its own, or it would wait for the other's blocks."""
    return Request([zlib.crc32(name.encode()), *PROMPT[1:]], name=name, output_token_ids=[], **fields)


def provided(name: str = "r", *, recomputed: int = 15, hits: Any = None, **settings: Any) -> tuple[Any, Request]:
    """A side that checks every answer, and a request whose prompt was provided."""
    side, request = scheduling([CHUNK], shadow=1.0, **settings), request_of(name)
    provide(side, request, recomputed=recomputed, hits=hits)
    return side, request


def answer(request: Request, tokens: int) -> None:
    request.output_token_ids = list(range(tokens))
    request.num_output_tokens = tokens


def dropped(side: Any) -> dict[str, int]:
    found: dict[str, int] = side._checks.watch.figures().dropped
    return found


def end(side: Any, request: Request) -> bool:
    side.finished(request)
    held: bool = side.holds(request)
    return held


# ---- what is drawn and read ---------------------------------------------------------------------------------


def test_an_answer_is_read_once_it_has_sixteen_tokens() -> None:
    side, request = provided()
    answer(request, ANSWER_TOKENS - 1)
    assert side.take_jobs().check is None
    answer(request, ANSWER_TOKENS + 3)
    job = side.take_jobs().check
    assert job.prompt_ids.tolist() == request.prompt_token_ids
    assert (job.token_ids, job.block_ids) == (tuple(range(16)), [[3, 4, 5]])
    assert not job.is_held and side.take_jobs().check is None
    assert not end(side, request)
    side.reported(report(checked={job.number: GOOD}))
    (series,) = side._checks.watch.figures().series
    assert series.labels == ("", "hkvd", "engine") and series.compared == 1 and not dropped(side)


def test_a_shorter_answer_is_read_when_it_has_ended_from_blocks_that_vllm_keeps() -> None:
    side, request = provided()
    answer(request, 3)
    assert side.take_jobs().check is None
    assert end(side, request)
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


def test_a_front_that_was_blended_before_makes_an_answer_approximate() -> None:
    side, request = scheduling([CHUNK], shadow=1.0), request_of()
    side.on_new(request)
    claimed = start(side, request)
    tracked = side._requests["r"]
    side.allocated(request, [[3, 4, 5]], claimed)
    tracked.held_by_vllm = 96  # of which rows 40..95 were blended
    from cacheblend.engines.vllm.jobs import BlendOutcome

    side.reported(report(outcomes={"r": BlendOutcome(hit_tokens={"vllm": 96, "disk": 44}, recomputed_tokens=44)}))
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
    side.reported(report(checked={job.number: "cache reset"}))
    assert dropped(side) == {"cache reset": 3} and not side.is_busy


def test_a_tenant_is_shown_by_a_hash_of_its_salt() -> None:
    side, request = scheduling([CHUNK], salt="acme", shadow=1.0), request_of(cache_salt="acme")
    provide(side, request)
    request.cache_salt = "acme and what blended blocks are named by"
    answer(request, 20)
    side.reported(report(checked={side.take_jobs().check.number: GOOD}))
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
    side.reported(report(check_s=0.5))
    clock.now += 4.4
    assert not side.take_jobs().may_check
    clock.now += 0.2
    assert side.take_jobs().may_check
    side.reported(report(check_s=0.1))
    side.reported(report(check_s=0.1))  # an answer that was read meanwhile counts as well
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
    side.reported(report(checked={job.check.number: GOOD}))
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
        side.reported(report(checked={job.number: result}))
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
    from cacheblend.engines.vllm.scheduler.load_control import LoadChoice

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
    side.reported(report(checked={job.number: BAD for job in jobs}))
    assert side._checks.watch.step == 1


def test_of_two_steps_counts_are_added_and_the_later_present_values_stay() -> None:
    from cacheblend.engines.vllm.metrics import BlendStats

    first = BlendStats(data={"requests": 1, "shadow": {"a": 1}, "shadow_kl": {"a": [1.0]}, "shadow_waiting": {"": 3.0}})
    second = {"requests": 2, "shadow": {"a": 1, "b": 1}, "shadow_kl": {"a": [2.0], "b": [4.0]}}
    both = first.aggregate(BlendStats(data=second | {"shadow_waiting": {"": 1.0}}))
    assert both.data["shadow"] == {"a": 2, "b": 1}
    assert both.data["shadow_kl"] == {"a": [1.0, 2.0], "b": [4.0]}
    assert both.data["shadow_waiting"] == {"": 1.0}
    assert first.data["shadow_kl"] == {"a": [1.0]}
    shown = both.reduce()
    assert shown["shadow_kl a"] == 1.5 and shown["shadow_waiting"] == 1.0 and shown["requests"] == 3
