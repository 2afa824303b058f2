"""Stores whose calls take drawn times, by a clock that only waits move: how long requests wait in all, what one request
tells the next, and that each answer is that of what was loaded."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.load import budget, threads
from cacheblend.core.load.budget import LateTiers, LoadBudget
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines import discovery
from cacheblend.engines.hf import BlendEngine, SamplingParams, prefiller, warmup
from cacheblend.engines.hf import runtime as runtime_module
from cacheblend.engines.hf.prefiller import Pace
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event
from cacheblend.serve.metrics import StoreWatch
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from families import tiny_model
from integration.test_controller import cost_model_file
from parity.scenes import RAG, A, B, C, Outcome, assert_as_reference, open_engine, run
from parity.test_lost_blocks import TOLERANCE
from reference import blend
from store_blocks import before

STORED = len(A) + len(B) + len(C)
LEAST_S, NEVER = 0.5, 1e9
KINDS: dict[str, Callable[[Path], KVStore]] = {
    "memory": lambda folder: MemoryStore(),
    "disk": lambda folder: DiskStore(folder, durable=False),
    "tiered": lambda folder: TieredStore(MemoryStore(), DiskStore(folder, durable=False), keeps_written=False),
}


class WaitedTime:
    """A clock that goes on only while the thread that computes waits for a store; takes the place of `futures.wait`.

    Attributes:
        now: its time.
        waits: of the thread that computes, in seconds of this clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 1000.0, 0.0
        self._changed, self._is_over = threading.Condition(), False
        self._ends: dict[Future[Any], float] = {}  # of calls under way that take time
        self._call, self._answer = threading.local(), threads._answer
        monkeypatch.setattr(threads, "_answer", self._answered)
        monkeypatch.setattr(budget, "wait", self._wait)

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        """The store's call that runs in this thread takes so long."""
        with self._changed:
            end = self._ends[self._call.own] = self.now + seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self.now >= end)
            del self._ends[self._call.own]

    def _answered(self, future: "Future[Any]", call: Callable[[], Any], *ended: Callable[[], Any]) -> None:
        self._call.own = future
        self._answer(future, call, *ended)

    def _wait(self, calls: Sequence["Future[Any]"], timeout: float) -> None:
        (call,) = calls
        deadline = self.now + timeout
        with self._changed:
            while not call.done() and self.now < deadline:
                if (end := self._ends.get(call, self.now)) > self.now:
                    self.waits += min(deadline, end) - self.now
                    self.now = min(deadline, end)
                    self._changed.notify_all()
                self._changed.wait(0.001)  # others go on

    def end(self) -> None:
        """Calls that never end do."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[WaitedTime]:
    made = WaitedTime(monkeypatch)
    monkeypatch.setattr(budget, "LEAST_S", LEAST_S)
    monkeypatch.setattr(prefiller, "LoadBudget", partial(LoadBudget, clock=made))
    monkeypatch.setattr(prefiller, "CLOSE_S", 0.05)
    yield made
    made.end()


def timed(engine: BlendEngine, time: WaitedTime, monkeypatch: pytest.MonkeyPatch, full_s: float = 1.0) -> BlendEngine:
    """An engine by that clock, that takes computing any prompt to last so long."""
    monkeypatch.setattr(engine.runtime.prefiller, "_compute_s", lambda tokens, planner: full_s)
    monkeypatch.setattr(engine.runtime.prefiller, "late_tiers", LateTiers(time), raising=False)
    return engine


def slowed(store: KVStore, time: WaitedTime, takes: Callable[[str], float]) -> list[str]:
    """From now on each call of the store takes as long as `takes` says of it; the calls so far."""
    calls: list[str] = []
    for call in ("find", "read_layers"):
        before(store, call, lambda *_, call=call: (calls.append(call), time.take(takes(call))))
    return calls


def left_out_rows(plan: BlendPlan) -> list[int]:
    spans = [span for span in plan.spans if span.source is Source.MISS and span.name in plan.left_out]
    return [row for span in spans for row in range(span.start, span.stop)]


def assert_computed(outcome: Outcome, model: torch.nn.Module) -> None:
    """The answer is the reference's with what was left out missing."""
    missing = left_out_rows(outcome.result.plan)
    assert_as_reference(outcome, blend(model, RAG, NoRows(), missing=missing), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_request_waits_no_longer_than_its_budget_whatever_each_call_takes(
    kind: str, seed: int, time: WaitedTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its first token is never later than the budget and a full prefill; and it is that of what was loaded."""
    draw = random.Random(f"{kind} {seed}")
    model, given = tiny_model("llama"), draw.choice([None, None, 0.3, 2.0])
    full_s, kinds = draw.choice([0.1, 1.0, 5.0]), draw.choice([[0.8], [0.0, 0.1, 0.8, 3.0], [0.0, 0.3, NEVER]])
    bound = max(LEAST_S, full_s) if given is None else given
    options = {"load_timeout_s": given, "read_ahead": draw.choice([0, 2, 8])}
    with KINDS[kind](tmp_path) as store, open_engine(model, store=store, **options) as engine:
        timed(engine, time, monkeypatch, full_s)
        slowed(engine.store, time, lambda call: draw.choice(kinds))
        for _ in range(6):
            before = time.waits
            outcome = run(engine, RAG, NoRows())
            waited = time.waits - before
            assert waited <= bound + min(bound, LEAST_S) + 1e-3  # the look-up, and then the one tier that has blocks
            missing = left_out_rows(outcome.result.plan)
            assert bool(missing) <= bool(outcome.report.load_timeouts)
            assert (outcome.report.missed_tokens, outcome.report.left_out_tokens) == (0, len(missing))
            assert_computed(outcome, model)
            time.now += draw.choice([0.0, 1.0, 20.0])
        time.end()


@pytest.mark.parametrize("hangs", ["find", "read_layers"])
def test_a_store_that_hangs_holds_up_one_request_and_is_tried_again_later(
    hangs: str, time: WaitedTime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, is_hung = tiny_model("llama"), [True]
    with open_engine(model, load_timeout_s=None, capture=True) as engine:
        timed(engine, time, monkeypatch)
        calls = slowed(engine.store, time, lambda call: NEVER if call == hangs and is_hung[0] else 0.0)
        for number in range(8):
            outcome = run(engine, RAG, NoRows())
            assert len(outcome.report.load_timeouts) == 1 and outcome.report.left_out_tokens == STORED
            assert_computed(outcome, model)
            said = outcome.report.load_timeouts[0]
            assert ("took too long before" in said) == (number > 0)
            assert number or ("looking blocks up takes longer than the 1.00 s allowed" in said) == (hangs == "find")
            assert not outcome.result.plan.missed_chunks()
            assert hangs != "find" or not outcome.result.plan.publishable
        assert time.waits == pytest.approx(1.0) and calls.count(hangs) == 1
        watch = StoreWatch(engine.store, engine.runtime.prefiller.late_tiers)
        assert watch.down() == ["memory"]
        time.now += 11.0
        assert watch.down() == []
        assert run(engine, RAG, NoRows()).report.load_timeouts and time.waits == pytest.approx(2.0)
        is_hung[0] = False
        time.now += 11.0
        assert run(engine, RAG, NoRows()).report.hit_tokens["memory"] == STORED
        assert sum("is asked again" in each for each in caplog.messages) == 1
        time.end()


def test_requests_that_run_together_wait_for_a_hung_tier_once_and_that_is_no_pace_of_computing(
    time: WaitedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were planned before anyone knew. A request that gave a tier up teaches nothing; one that passed it over has
    not waited, and does."""
    learnt: list[int] = []
    monkeypatch.setattr(Pace, "learn", lambda pace, row_layers, seconds: learnt.append(row_layers))
    with open_engine(tiny_model("llama"), load_timeout_s=None) as engine:
        timed(engine, time, monkeypatch)
        slowed(engine.store, time, lambda call: NEVER if call == "read_layers" else 0.0)
        scheduler, ended = Scheduler(engine.runtime, has_thread=False), list[Event]()
        for _ in range(5):
            scheduler.submit(Ask(RAG, SamplingParams(max_new_tokens=2)), ended.append)
        while sum(isinstance(event, DoneEvent) for event in ended) < 5:
            scheduler.run()
        assert [event.error for event in ended if isinstance(event, DoneEvent)] == [None] * 5
        assert time.waits == pytest.approx(1.0)
        scheduler.close()
        learnt.clear()
        time.now += 11.0  # it is asked again
        assert engine.prefill(RAG).report.load_timeouts and not learnt
        report = engine.prefill(RAG).report
        assert report.load_timeouts and learnt == [report.row_layers]
        time.end()


@pytest.mark.may_fail(prefiller.UNMEASURED)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("can't allocate"), MemoryError()])
def test_a_pace_that_cannot_be_measured_fails_no_request(
    error: Exception, time: WaitedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as long as every request may."""

    def measure(planner: object) -> None:
        raise error

    model = tiny_model("llama")
    with open_engine(model, load_timeout_s=None) as engine:
        monkeypatch.setattr(engine.runtime.prefiller, "late_tiers", LateTiers(time), raising=False)
        monkeypatch.setattr(engine.runtime.prefiller, "_measure_pace", measure)
        slowed(engine.store, time, lambda call: NEVER if call == "read_layers" else 0.0)
        outcome = run(engine, RAG, NoRows())
        assert len(outcome.report.load_timeouts) == 1 and time.waits == pytest.approx(LEAST_S)
        assert_computed(outcome, model)
        time.end()


@pytest.mark.parametrize("wait", [True, False])
def test_closing_does_not_wait_for_a_tier_that_hangs(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose blocks the loading controller left out, so that they are being promoted."""
    gate, promoted = threading.Event(), list[int]()
    monkeypatch.setattr(runtime_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(warmup, "STORE_S", 0.1)
    store = MemoryStore()
    monkeypatch.setattr(store, "promote", lambda names: (promoted.append(len(names)), gate.wait()))
    with open_engine(tiny_model("llama"), store=store) as engine:
        file = cost_model_file(tmp_path / "cost-model.json", engine, memory=1.0)
    engine = open_engine(tiny_model("llama"), [], store=store, cost_model=file)
    blocks = {span.name for span in engine.runtime.planner.plan(RAG, store).spans if span.source is Source.LOADED}
    closing = threading.Thread(target=engine.close, kwargs={"wait": wait}, daemon=True)
    try:
        for _ in range(3):
            engine.generate(RAG, SamplingParams(max_new_tokens=1))
        assert engine.flush(60)
        assert promoted == [len(blocks)]  # one at a time: nothing queues behind it
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    finally:
        gate.set()


@pytest.mark.may_fail("*")
@pytest.mark.parametrize("thread", ["keeper", "writer", "discovery"])
def test_closing_does_not_wait_for_a_store_that_begins_to_hang_meanwhile(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last capture, in a write behind a request, or where it is asked to take a chunk off."""
    gate, hangs, store = threading.Event(), threading.Event(), MemoryStore()
    for module in (warmup, discovery):
        monkeypatch.setattr(module, "STUCK_S", 0.1)
    for module, name in ((runtime_module, "CLOSE_S"), (warmup, "CLOSE_S"), (warmup, "STORE_S")):
        monkeypatch.setattr(module, name, 0.1)
    engine = open_engine(tiny_model("llama"), [], store=store, capture=True, discover=True)
    monkeypatch.setattr(engine.runtime.background, "close", partial(engine.runtime.background.close, 0.1))
    write = store.write_all

    def hung(*given: Any) -> Any:
        if threading.current_thread().name.startswith(f"cacheblend-{thread}"):
            hangs.set()
            gate.wait()
        return write(*given)

    monkeypatch.setattr(store, "write_all", hung)
    if engine.runtime.discovery is not None:
        monkeypatch.setattr(engine.runtime.discovery, "_delete", hung if thread == "discovery" else lambda gone: None)
    closing = threading.Thread(target=engine.close, daemon=True)
    try:
        engine.runtime.background.begin_request()  # so that nothing is captured before it closes
        engine.generate(RAG, SamplingParams(max_new_tokens=1))
        closing.start()
        assert hangs.wait(60)
        closing.join(60)
        assert not closing.is_alive()
    finally:
        gate.set()


@pytest.mark.may_fail("background work")
@pytest.mark.parametrize("call", ["find", "write_all", "put_manifest"])
def test_requests_do_not_wait_for_captures_that_hang_in_the_store(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that always has requests does them in its own thread."""
    gate, called, store = threading.Event(), list[str](), MemoryStore()
    monkeypatch.setattr(warmup, "STORE_S", 1.0)  # a busy machine is not mistaken for a store that hangs
    with open_engine(tiny_model("llama"), [], store=store, capture=True) as engine:
        engine.runtime.background.begin_request()
        engine.generate(RAG, SamplingParams(max_new_tokens=1))
        real = getattr(store, call)

        def hung(*given: Any) -> Any:
            if threading.current_thread().name.startswith("cacheblend-keeper"):  # not what is written behind
                called.append(call)
            gate.wait(60)
            return real(*given)

        monkeypatch.setattr(store, call, hung)
        try:
            rounds = 0
            while engine.runtime.background.catch_up(0.0):
                rounds += 1
            assert rounds > 1 and len(called) == 1  # it is left alone while it does not answer
        finally:
            gate.set()
            engine.runtime.background.end_request()
        engine.generate(RAG, SamplingParams(max_new_tokens=1))
        assert engine.flush(60)
    assert store.manifests()


def test_what_a_hung_tier_has_is_not_promoted(
    time: WaitedTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out, but not by the loading controller."""
    promoted = list[Sequence[bytes]]()
    store = MemoryStore()
    with open_engine(tiny_model("llama"), store=store) as engine:
        file = cost_model_file(tmp_path / "cost-model.json", engine, memory=1e12)
    with open_engine(tiny_model("llama"), [], store=store, cost_model=file, load_timeout_s=1.0) as engine:
        monkeypatch.setattr(store, "promote", promoted.append)
        timed(engine, time, monkeypatch)
        slowed(store, time, lambda call: NEVER if call == "read_layers" else 0.0)
        for _ in range(2):
            assert engine.generate(RAG, SamplingParams(max_new_tokens=1)).report.left_out_tokens == STORED
        time.end()
        assert engine.flush(60) and not promoted
