"""Many requests on one engine: each has the same answer as alone, none waits forever, limits hold."""

import asyncio
import gc
import queue
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.engines.hf.scheduler import ClosedError, Limits, QueueFullError, Scheduler, TooLateError
from cacheblend.engines.hf.tickets import PASSES, Ask, DoneEvent, Event, Ticket, TokenEvent
from cacheblend.serve.admission import RunningRequest
from families import tiny_model
from parity.scenes import QUESTION, RAG, SYSTEM, UNSEEN, A, B, C, open_engine

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=100_000, ignore_eos=True)
Schedule = Callable[..., Scheduler]
PROMPTS = (RAG, Prompt.of([SYSTEM, C, UNSEEN, A, QUESTION]), Prompt.of([B, QUESTION, A, QUESTION]))


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with open_engine(tiny_model("llama")) as opened:
        yield opened


class Listener:
    """Collects a request's events."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tokens: dict[int, list[int]] = {}
        self.events: list[TokenEvent] = []

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def wait(self, timeout: float = 60) -> DoneEvent:
        while True:
            event = self._events.get(timeout=timeout)
            if isinstance(event, DoneEvent):
                return event
            self.events.append(event)
            if event.token_id is not None:
                self.tokens.setdefault(event.choice, []).append(event.token_id)


@pytest.fixture
def schedule(engine: BlendEngine) -> Iterator[Schedule]:
    """Makes schedulers, which are closed at the end."""
    made: list[Scheduler] = []

    def make(limits: Limits | None = None) -> Scheduler:
        made.append(Scheduler(engine.runtime, limits))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def submit(scheduler: Scheduler, prompt: Prompt, params: SamplingParams = PARAMS, **ask: object) -> Listener:
    listener = Listener()
    scheduler.submit(Ask(prompt, params, **ask), listener)  # type: ignore[arg-type]
    return listener


def test_concurrent_answers_equal_single_answers(engine: BlendEngine, schedule: Schedule) -> None:
    expected = [engine.generate(prompt, PARAMS, ratio=0.3).token_ids for prompt in PROMPTS]
    scheduler = schedule(Limits(active=3, row_layers=50))
    listeners = [submit(scheduler, prompt, ratio=0.3) for prompt in PROMPTS * 4]
    done = [listener.wait() for listener in listeners]
    assert all(each.error is None for each in done)
    assert [listener.tokens[0] for listener in listeners] == expected * 4
    reports = [each.report for each in done]
    assert all(r is not None and 0 < r.ttft_s <= r.total_s and r.generated_tokens == 6 for r in reports)


def test_each_choice_has_its_own_seed_and_tokens_their_log_probabilities(schedule: Schedule) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=3.0, seed=7, ignore_eos=True)
    scheduler = schedule()
    three, one = submit(scheduler, RAG, params, choices=3), submit(scheduler, RAG, params)
    likely = submit(scheduler, RAG, logprobs=3)
    three.wait(), one.wait(), likely.wait()
    assert len({tuple(ids) for ids in three.tokens.values()}) == 3
    assert one.tokens[0] == three.tokens[0]
    for event in likely.events:
        assert event.logprob is not None and len(event.top) == 3
        assert event.top[0] == (event.token_id, event.logprob)  # greedy
        assert [p for _, p in event.top] == sorted((p for _, p in event.top), reverse=True)


class Slow:
    """In place of the engine's `open_prefill`: blocks until `go_on` is set."""

    def __init__(self, engine: BlendEngine) -> None:
        self.go_on, self.inner = threading.Event(), engine.runtime.open_prefill

    def __call__(self, *arguments: object, **options: object) -> object:
        assert self.go_on.wait(60)
        return self.inner(*arguments, **options)  # type: ignore[arg-type]

    def begin(self, scheduler: Scheduler) -> Listener:
        """A request that is being planned."""
        first = submit(scheduler, RAG)
        while scheduler.waiting:
            time.sleep(0.01)
        return first


@pytest.fixture
def slow(engine: BlendEngine, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(engine)
    monkeypatch.setattr(engine.runtime, "open_prefill", made)
    yield made
    made.go_on.set()  # before its scheduler is closed


def test_cancelled_and_expired_requests_end_without_delaying_others(slow: Slow, schedule: Schedule) -> None:
    scheduler = schedule(Limits(active=1))
    first, cancelled = slow.begin(scheduler), Listener()
    ticket: Ticket = scheduler.submit(Ask(RAG, PARAMS), cancelled)
    late, last = submit(scheduler, RAG, deadline=time.monotonic() - 1), submit(scheduler, RAG)
    ticket.cancel()
    slow.go_on.set()
    assert first.wait().error is None
    assert cancelled.wait().report is None and not cancelled.tokens
    assert isinstance(late.wait().error, TooLateError)
    assert last.wait().error is None


def test_an_error_ends_only_its_own_request(
    engine: BlendEngine, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In planning, in delivering an event, or before the first token is drawn."""
    inner, calls = engine.runtime.open_prefill, iter([True])

    def open_prefill(prompt: Prompt, **options: object) -> object:
        if np.array_equal(prompt.token_ids, PROMPTS[1].token_ids):  # it may have been cut at chunks that are listed
            raise InvalidInputError("not this one")
        return inner(prompt, **options)  # type: ignore[arg-type]

    def make_sampler(*arguments: Any) -> Sampler:
        if next(calls, False):
            raise MemoryError("out of memory")
        return Sampler(*arguments)

    monkeypatch.setattr(engine.runtime, "open_prefill", open_prefill)
    scheduler, failed = schedule(), Listener()

    def on_event(event: Event) -> None:
        failed(event)
        if isinstance(event, TokenEvent):
            raise ValueError("cannot be delivered")

    first, second, third = (submit(scheduler, prompt) for prompt in PROMPTS)
    scheduler.submit(Ask(RAG, PARAMS), on_event)
    assert first.wait().error is None and third.wait().error is None and len(third.tokens[0]) == 6
    assert isinstance(second.wait().error, InvalidInputError)
    assert isinstance(failed.wait().error, ValueError)
    monkeypatch.setattr("cacheblend.engines.hf.runtime.Sampler", make_sampler)
    assert isinstance(submit(scheduler, RAG).wait().error, MemoryError)
    other = submit(scheduler, RAG)
    assert other.wait().error is None and len(other.tokens[0]) == 6
    assert engine.flush(timeout=60)


def test_a_step_of_decoding_that_fails_ends_the_answers_of_that_step(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, asked = Scheduler(engine.runtime, Limits(active=2, row_layers=1), has_thread=False), iter([True])
    expected = engine.generate(RAG, PARAMS).token_ids

    def compute(*arguments: Any) -> None:
        if prefilling.prefill is not None and next(asked, False):
            raise MemoryError("out of memory")
        compute_logits(*arguments)

    answering = submit(scheduler, RAG, ENDLESS)
    while not scheduler._answering:
        scheduler.run()
    others = [Listener(), Listener()]
    prefilling, _ = (scheduler.submit(Ask(RAG, PARAMS), each) for each in others)
    monkeypatch.setattr("cacheblend.engines.hf.scheduler.compute_logits", compute)
    while scheduler.waiting or scheduler.active:
        scheduler.run()
    assert isinstance(answering.wait().error, MemoryError) and answering.tokens
    for each in others:
        assert each.wait().error is None and each.tokens[0] == expected
    scheduler.close()


@pytest.mark.parametrize("where", ["prefill", "decoding", "delivery"])
def test_what_failed_holds_no_kv_while_its_error_is_kept(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No garbage collection is waited for: the next request would lack that memory."""
    scheduler, failed = Scheduler(engine.runtime, Limits(row_layers=1), has_thread=False), Listener()

    def fail(*arguments: Any) -> None:
        raise MemoryError("out of memory")

    def on_event(event: Event) -> None:
        failed(event)
        if where == "delivery" and isinstance(event, TokenEvent) and ticket.choices[0].decoding.sampler.count == 3:
            fail()

    other = scheduler.submit(Ask(RAG, PARAMS), Mock())
    while not other.choices:
        scheduler.run()
    ticket = scheduler.submit(Ask(RAG, PARAMS), on_event)
    while not (ticket.choices if where != "prefill" else ticket.prefill and ticket.prefill.layer):
        scheduler.run()
    held: list[weakref.ref[Any]] = [weakref.ref(each.choices[0].decoding) for each in (other, ticket) if each.choices]
    if ticket.prefill is not None:
        held += map(weakref.ref, (ticket.prefill, ticket.prefill._kv[0].keys))
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            if where == "prefill":
                patch.setattr(HfLayerRunner, "run", fail)
            elif where == "decoding":
                patch.setattr("cacheblend.engines.hf.scheduler.compute_logits", fail)
            scheduler._prefill() if where == "prefill" else scheduler._decode()
        while scheduler.active:
            scheduler.run()
        error = failed.wait().error
        assert isinstance(error, MemoryError) and held and [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()
    scheduler.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_end_when_the_scheduler_thread_ends(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = schedule()

    def leave() -> None:
        raise SystemExit

    monkeypatch.setattr(scheduler, "_round", leave)
    assert isinstance(submit(scheduler, RAG).wait().error, ClosedError)
    scheduler.close()
    assert not scheduler.is_alive
    with pytest.raises(ClosedError):
        submit(scheduler, RAG)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_is_being_planned_counts_as_active_and_ends_with_the_thread(
    slow: Slow, schedule: Schedule
) -> None:
    inner, asked = slow.inner, iter(range(2))

    def open_prefill(*given: Any, **options: Any) -> Any:
        if next(asked) == 1:
            raise SystemExit
        return inner(*given, **options)

    slow.inner = open_prefill  # type: ignore[method-assign]
    scheduler = schedule(Limits(active=1))
    first = slow.begin(scheduler)
    assert scheduler.active == 1
    slow.go_on.set()
    assert first.wait().error is None
    assert isinstance(submit(scheduler, RAG).wait().error, ClosedError)
    assert scheduler.active == 0


@pytest.mark.parametrize("active", [1, 2, 3])
def test_a_request_for_more_answers_than_the_limit_runs(schedule: Schedule, active: int) -> None:
    scheduler = schedule(Limits(active=active))
    listeners = [submit(scheduler, RAG, choices=choices) for choices in (1, 4, 1, 4)]
    assert [listener.wait().error for listener in listeners] == [None] * 4
    assert [len(listener.tokens) for listener in listeners] == [1, 4, 1, 4]
    with pytest.raises(InvalidInputError, match="active must be at least 1, got 0"):
        Limits(active=0)


@pytest.mark.parametrize("active", [1, 2, 8])
def test_one_answer_at_a_time_runs_beside_many_whoever_waits(engine: BlendEngine, active: int) -> None:
    scheduler = Scheduler(engine.runtime, Limits(active=active), has_thread=False)
    ended = list[str]()

    def ask(name: str, tokens: int, choices: int = 1) -> Ticket:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        done = lambda event: ended.append(name) if isinstance(event, DoneEvent) else None  # noqa: E731
        return scheduler.submit(Ask(RAG, params, choices=choices), done)

    many = ask("many", 100_000, 8)
    scheduler.run()
    ask("more", 1, 8)  # which waits in front of all others, and longer than others may pass it
    shorts = [str(number) for number in range(min(60, PASSES * active + 8))]
    for name in shorts:
        ask(name, 1)
    for _ in range(3 * len(shorts)):
        scheduler.run()
        assert scheduler.active <= 2  # `more` was not begun, and no two of the others at once
    assert ended == shorts
    many.cancel()
    for _ in range(20):
        scheduler.run()
    assert ended == [*shorts, "many", "more"]
    scheduler.close()


@pytest.mark.parametrize("active", [1, 2, 8])
def test_prompts_of_a_list_take_turns_with_other_requests(engine: BlendEngine, active: int) -> None:
    scheduler = Scheduler(engine.runtime, Limits(active=active), has_thread=False)
    begun: dict[tuple[str, int], None] = {}  # in the order of first tokens

    def ask(name: str, prompts: int, tokens: int = 3, tenant: str = "") -> list[Ticket]:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        asks = [Ask(RAG, params, tenant_label=tenant)] * prompts
        return scheduler.submit_prompts(asks, lambda number, _: begun.setdefault((name, number)))

    def run(rounds: int) -> list[str]:
        before = len(begun)
        for _ in range(rounds):
            scheduler.run()
            assert scheduler.active <= active + 1
        return [name for name, _ in list(begun)[before:]]

    many = ask("many", active + 2, 3 if active == 1 else 100_000)
    assert run(active) == ["many"] * active
    for name, prompts in (("more", 3), ("one", 1), ("two", 1)):
        ask(name, prompts)
    if active == 1:
        assert run(100) == ["many", "more", "one", "two", "many", "more", "more"]
        for number in range(6):
            ask(f"a{number}", 1, tenant="a")
        for number in range(2):
            ask(f"b{number}", 1, tenant="b")
        assert run(100) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]
    else:  # the first list holds all places
        assert run(100) == ["one", "two"]  # one at a time, and nothing of another list
        ask("other key", 2, tenant="other")  # which comes before the key that has answers running
        many[0].cancel()
        assert run(100) == ["other key", "other key", "more", "more", "more", "many"]
    scheduler.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_request_waits_for_no_more_prompts_than_there_are_requests(engine: BlendEngine, seed: int) -> None:
    rng = random.Random(seed)
    active = rng.choice([1, 2, 3, 8])
    scheduler = Scheduler(engine.runtime, Limits(active=active), has_thread=False)
    begun: dict[tuple[int, int], None] = {}  # (request, prompt), in the order of first tokens
    given = dict[int, int]()  # prompts by request
    for request in range(15):
        given[request] = rng.choice([1, 1, 2, 5, 9])
        others = sum(count > sum((each, at) in begun for at in range(count)) for each, count in given.items()) - 1
        ask = Ask(RAG, SamplingParams(max_new_tokens=rng.randint(1, 6), ignore_eos=True))
        before = len(begun)
        scheduler.submit_prompts([ask] * given[request], lambda at, _, request=request: begun.setdefault((request, at)))
        while (request, 0) not in begun:
            scheduler.run()
        waited_for = [each for each, _ in list(begun)[before:-1] if each != request]
        assert len(waited_for) <= others + active  # free places are taken before anyone waits
        for _ in range(rng.randint(0, 12)):
            scheduler.run()
    while scheduler.waiting or scheduler.active:
        scheduler.run()
    assert len(begun) == sum(given.values())
    scheduler.close()


@pytest.mark.parametrize("seed", range(8))
def test_places_are_bounded_and_everyone_ends_whatever_comes_and_goes(engine: BlendEngine, seed: int) -> None:
    """Lists of prompts with several answers each, of several keys, which are cancelled at any moment."""
    rng = random.Random(seed)
    active = rng.choice([1, 2, 3, 5])
    scheduler = Scheduler(
        engine.runtime, Limits(active=active, row_layers=rng.choice([1, 600, 8192])), has_thread=False
    )
    tickets, ends = list[Ticket](), Counter[tuple[int, int]]()

    def run() -> None:
        scheduler.run()
        running = [*scheduler._batcher, *scheduler._answering]
        assert sum(min(each.ask.choices, active) for each in running if not each.is_extra) <= active
        assert all(each.submission.choices == 1 for each in running if each.is_extra)
        assert sum(each.is_extra for each in running) <= 1

    for number in range(25):
        params = SamplingParams(max_new_tokens=rng.randint(1, 5), ignore_eos=True)
        one = Ask(RAG, params, choices=rng.choice([1, 1, 2, 7]), tenant_label=rng.choice(["", "a", "b"]))

        def note(at: int, event: Event, number: int = number) -> None:
            ends[number, at] += isinstance(event, DoneEvent)

        tickets += scheduler.submit_prompts([one] * rng.choice([1, 1, 2, 4]), note)
        if rng.random() < 0.4:
            rng.choice(tickets).cancel()
        for _ in range(rng.randint(0, 6)):
            run()
    for _ in range(20_000):
        if not scheduler._has_work:
            break
        run()
    assert len(ends) == len(tickets) and set(ends.values()) == {1}
    scheduler.close()


def test_a_key_with_a_long_queue_delays_no_other_key(engine: BlendEngine) -> None:
    scheduler = Scheduler(engine.runtime, Limits(active=2), has_thread=False)
    begun = list[str]()

    def ask(name: str, tenant: str) -> None:
        ask = Ask(RAG, SamplingParams(max_new_tokens=2, ignore_eos=True), tenant_label=tenant)
        scheduler.submit(ask, lambda event: begun.append(name) if isinstance(event, DoneEvent) else None)

    for _ in range(40):
        ask("busy", "busy")
    for number in range(3 * PASSES):
        before = len(begun)
        ask(f"polite {number}", "polite")
        while f"polite {number}" not in begun:
            scheduler.run()
        assert len(begun) - before <= 4  # those that ran, and one that takes the second place beside it
    scheduler.close()


def test_many_answers_are_passed_by_one_and_not_for_ever(engine: BlendEngine) -> None:
    scheduler = Scheduler(engine.runtime, Limits(active=2), has_thread=False)
    ended = list[str]()

    def ask(name: str, tokens: int = 1, choices: int = 1) -> Ticket:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        done = lambda event: ended.append(name) if isinstance(event, DoneEvent) else None  # noqa: E731
        return scheduler.submit(Ask(RAG, params, choices=choices), done)

    stream = ask("stream", 100_000)
    scheduler.run()
    ask("two", choices=2)
    shorts = [str(number) for number in range(PASSES * 2 + 3)]
    for name in shorts:
        ask(name)
    for _ in range(100):
        scheduler.run()
    assert ended == shorts[: PASSES * 2]  # beside the stream; then it is the turn of the two
    stream.cancel()
    for _ in range(100):
        scheduler.run()
    assert ended == [*shorts[: PASSES * 2], "stream", "two", *shorts[PASSES * 2 :]]
    scheduler.close()


@pytest.mark.parametrize("is_idle", [True, False])
def test_missed_chunks_are_captured(is_idle: bool) -> None:
    """After the requests, or under continuous load."""
    with open_engine(tiny_model("llama"), [A], capture=True) as engine:
        if not is_idle:
            engine.runtime.background.begin_request()  # a request that never ends
        patient, busy = (
            Scheduler(engine.runtime, Limits(catch_up_s=60.0)),
            Scheduler(engine.runtime, Limits(catch_up_s=0.0)),
        )
        try:
            for _ in range(1 if is_idle else 3):
                report = submit(patient, RAG).wait().report
                assert report is not None and report.missed_tokens > 0
            if is_idle:
                assert engine.flush(timeout=60)
                again = submit(patient, RAG).wait().report
                assert again is not None and again.missed_tokens == 0
            end = time.monotonic() + 60
            while report is not None and report.missed_tokens:  # a tenth of the time is little on a busy machine
                assert time.monotonic() < end
                report = submit(busy, RAG).wait().report
            assert report is not None
        finally:
            patient.close()
            busy.close()
            if not is_idle:
                engine.runtime.background.end_request()


def test_prompts_of_a_request_are_queued_together_or_not_at_all(engine: BlendEngine) -> None:
    scheduler = Scheduler(engine.runtime, Limits(waiting=4), has_thread=False)
    ask, listener = Ask(RAG, PARAMS), Listener()
    scheduler.submit(ask, listener)
    scheduler.submit(ask, listener)

    async def start(count: int) -> None:
        RunningRequest([ask] * count, scheduler, Mock(), lambda: True).start()

    with pytest.raises(QueueFullError):
        asyncio.run(start(3))
    assert scheduler.waiting == 2  # nothing of it takes a place
    asyncio.run(start(2))
    assert scheduler.waiting == 4
    scheduler.close()


def test_the_newest_requests_of_a_key_with_most_give_way_to_another_key(engine: BlendEngine) -> None:
    scheduler = Scheduler(engine.runtime, Limits(active=1, waiting=6), has_thread=False)
    refused = list[str]()

    def ask(name: str, tenant: str, count: int = 1) -> None:
        def note(_: int, event: Event) -> None:
            if isinstance(event, DoneEvent) and isinstance(event.error, QueueFullError):
                refused.append(name)

        scheduler.submit_prompts([Ask(RAG, ENDLESS, tenant_label=tenant)] * count, note)

    ask("begun", "busy", 3)
    scheduler.run()
    ask("old", "busy")
    ask("new", "busy", 3)
    with pytest.raises(QueueFullError):
        ask("more", "busy")  # nobody has more than this key
    with pytest.raises(QueueFullError):
        ask("too many", "polite", 6)
    assert scheduler.waiting == 6 and not refused
    ask("one", "polite")
    assert refused == ["new"] * 3 and scheduler.waiting == 4
    ask("two", "polite", 2)
    with pytest.raises(QueueFullError):
        ask("three", "polite")  # it has as many as the other
    ask("third", "third")  # of two that have as many, the newest
    assert refused == ["new"] * 3 + ["two"] * 2 and scheduler.waiting_of == {"busy": 3, "polite": 1, "third": 1}
    scheduler.close()
