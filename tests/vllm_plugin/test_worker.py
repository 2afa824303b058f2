"""The worker side alone: which jobs go on in a step, and what is reported of those that cannot, with stand-ins for
prefills."""

import random
import threading
import time
from concurrent.futures import Future
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.errors import StoreReadOnlyError
from cacheblend.core.fuse.batching import LayerRows
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.vllm.jobs import CaptureJob, StepJobs, StepReport
from cacheblend.engines.vllm.worker import capture_writer, prefill_factory, tasks
from cacheblend.engines.vllm.worker.capture_writer import CaptureWriter
from pretended_device import DEVICE, PretendedDevice, counted, plain
from rank_threads import ThreadGroup, on_all
from vllm_requests import CHUNK as PASSAGE
from vllm_requests import PROMPT, Request, scheduling, start
from vllm_workers import LAYERS, Prefill, Store, blend, make_worker

CHUNK: Any = [], SimpleNamespace(block_names=(), token_ids=[])
"""A captured chunk of nothing."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(CaptureWriter, "_on_host", lambda *_: CHUNK)
    store, prefills = Store(), dict[Any, Prefill]()
    made = make_worker(store, SimpleNamespace(size=1, rank=0))
    made._opener.blend = lambda job: prefills[job.request_id]
    made._opener.capture = lambda job, kv: prefills[job.chunk]
    yield SimpleNamespace(side=made, prefills=prefills, store=store)
    store.gate.set()
    made.close()


def jobs(*names: str, **fields: Any) -> Any:
    return StepJobs(blend=[blend(name) for name in names], **fields)


def captures(*names: str) -> Any:
    return StepJobs(capture=[CaptureJob(name, None) for name in names])  # type: ignore[arg-type]


def test_a_step_that_brings_no_work_is_known_by_every_field_and_begins_nothing(worker: Any) -> None:
    says_how = {"weights": "some", "is_check_free": True}
    for name in {each.name for each in fields(StepJobs)} - set(says_how):
        assert not StepJobs(**{name: ["something"]}).is_nothing
    worker.side._step = None
    worker.side.step(StepJobs(**says_how))


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_prompt_begins_in_the_step_after_its_delivery(worker: Any, is_idle: bool) -> None:
    """Whatever else the step that delivers it computes."""
    one, two = (worker.prefills.setdefault(name, Prefill()) for name in ("one", "two"))
    worker.side.step(jobs("one", is_idle=is_idle))
    assert (one.layer, two.layer) == (0, 0)
    assert not worker.side.take_provided()
    worker.side.step(jobs("two", is_idle=is_idle))
    assert worker.side.take_provided() == {"one"}
    outcome = worker.side.take_outcomes()["one"]
    assert (outcome.failure, outcome.row_layers, outcome.hit_tokens) == ("", 40, {"disk": 7})
    assert outcome.read_s == {"disk": 0.25}
    assert outcome.compute_s is not None
    assert outcome.compute_s > 0
    assert one.is_closed
    assert two.layer == 0
    worker.side.step(jobs(is_idle=is_idle))
    assert worker.side.take_provided() == {"two"}
    assert not worker.side.take_failed_blocks()


@pytest.mark.may_fail("ZeroDivisionError")
def test_blocks_are_copied_in_the_step_that_delivers_them(worker: Any) -> None:
    """When the workers are called, it has been computed; the next one may write to them."""
    read, side = list[Any](), worker.side
    side._opener.read_pages = lambda job: [read.append(job.chunk), [] if job.chunk == "right" else 1 / 0][1]
    worker.store.gate.set()
    for count, name in enumerate(("right", "wrong"), 1):
        job = CaptureJob(name, None, pages=[[1]])  # type: ignore[arg-type]
        side.step(StepJobs(capture=[job]))
        side._capture_writer.wait(30)
        assert read[-1] == name and side.report().captured == count
    assert side.report().capture_work == 2 * 5 * LAYERS


@pytest.mark.may_fail("RuntimeError")
def test_a_chunk_that_fails_counts_as_done_behind_those_that_are_being_written(worker: Any) -> None:
    """The scheduler's side takes what ends for what it sent first."""
    worker.prefills |= {"slow": Prefill(), "fails": Prefill(fails_at=1)}
    worker.side._capture_writer._keeper.keep = lambda captured: worker.store.gate.wait(60)
    worker.side.step(captures("slow", "fails"))
    while worker.side._captures:
        worker.side.step(jobs())
    assert worker.side.report().captured == 0
    worker.store.gate.set()
    while worker.side.report().captured < 2:
        worker.side._capture_writer.wait(30)


def test_a_prompt_is_opened_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding requests would wait, too: the host queues their next step late."""
    side = scheduling([PASSAGE])
    request = Request(PROMPT, name="r")
    side.allocated(request, [[*range(1, 41)]], start(side, request, 32))
    (job,) = side.take_jobs().blend
    opener = make_worker(Store(), SimpleNamespace(size=1, rank=0))._opener
    opener.model.device = DEVICE
    monkeypatch.setattr(prefill_factory, "BlendedPrefill", lambda plan, open_runner, *_: open_runner(plan))
    with PretendedDevice(), counted() as calls:
        runner = opener.blend(job)
    assert calls == []
    assert runner.token_ids.device == runner.positions.device == DEVICE
    assert plain(runner.token_ids).tolist() == PROMPT[32:-1]
    assert plain(runner.positions).tolist() == list(range(32, len(PROMPT) - 1))


def test_a_report_says_for_how_long_all_prompts_have_waited_for_the_store(worker: Any) -> None:
    reads: list[Future[None]] = [Future(), Future()]
    for name, read in zip(("one", "two"), reads, strict=True):
        worker.prefills[name] = Prefill(reads={2: read})
    worker.side.step(jobs("one", "two"))
    assert worker.side.report().stalled_s == 0
    worker.side.step(jobs())
    assert worker.side.report().stalled_s > 0
    worker.side.step(jobs("three"))
    assert worker.side.report().stalled_s > 0, "it has not been given to the device yet"
    reads[0].set_result(None)
    worker.prefills["three"] = Prefill(reads={0: Future()})
    worker.side.step(jobs())
    assert worker.side.take_provided() == {"one"} and worker.side.report().stalled_s > 0


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["before it begins", "while it waits", "after it ended"])
def test_a_prompt_that_is_dropped_is_reported_once_and_does_not_go_on(worker: Any, steps: int) -> None:
    read: Future[None] = Future()
    one = worker.prefills["one"] = Prefill(reads={2: read})
    worker.side.step(jobs("one"))
    for number in range(steps):
        if number:
            read.set_result(None)
        worker.side.step(jobs())
    assert worker.side.take_provided() == ({"one"} if steps == 2 else set())
    worker.side.step(jobs(dropped=["one"]))
    worker.side.step(jobs())
    assert worker.side.take_provided() == (set() if steps == 2 else {"one"})
    assert one.layer == [0, 2, LAYERS][steps]
    assert one.is_closed == (steps > 0)


def test_a_prompt_that_waits_for_the_store_is_passed_over(worker: Any) -> None:
    """Until an idle step waits for its read."""
    read: Future[None] = Future()
    slow, fast = Prefill(reads={1: read}), Prefill()
    worker.prefills.update(slow=slow, fast=fast, chunk=Prefill())
    worker.side.step(jobs("slow", "fast"))
    worker.side.step(captures("chunk"))
    assert worker.side.take_provided() == {"fast"}
    assert (slow.layer, worker.prefills["chunk"].layer) == (1, LAYERS)
    timer = threading.Timer(0.01, read.set_result, [None])
    timer.start()
    while not (provided := worker.side.take_provided()):
        worker.side.step(jobs(is_idle=True))
    timer.join()
    assert provided == {"slow"}


@pytest.mark.may_fail("slow store")
def test_vllm_computes_a_prompt_whose_layer_does_not_come(worker: Any) -> None:
    worker.prefills.update(late=Prefill(reads={2: Future()}), fine=Prefill())
    worker.side._readiness._timeout_s = 0.02
    worker.side.step(jobs("late", "fine"))
    while "late" not in (provided := worker.side.take_provided()):
        worker.side.step(jobs(is_idle=True))
        assert provided <= {"fine"}
    outcomes = worker.side.take_outcomes()
    assert (outcomes["late"].failure, outcomes["fine"].failure) == ("slow store", "")
    assert worker.side.take_failed_blocks() == {6, 7}  # vLLM's cache held the first one
    assert worker.prefills["late"].is_closed


@pytest.mark.may_fail("slow store", "store")
@pytest.mark.parametrize("reason", ["slow store", "store"], ids=["hangs", "drops it"])
def test_a_history_whose_layer_does_not_come_is_given_up_and_requests_go_on(worker: Any, reason: str) -> None:
    class Unreadable(Prefill):
        @property
        def awaited(self) -> Any:
            if self.layer == 2:
                raise OSError("gone")
            return None

    history = Prefill(reads={2: Future()}) if reason == "slow store" else Unreadable()
    worker.prefills.update(history=history, fine=Prefill())
    worker.side._readiness._timeout_s = 0.02
    job = CaptureJob("history", None, exact=SimpleNamespace(spans=[]))  # type: ignore[arg-type]
    worker.side.step(StepJobs(capture=[job], is_idle=True))
    worker.side.step(jobs("fine"))
    while not worker.side.captured:
        worker.side.step(jobs(is_idle=True))
    worker.side.step(jobs())
    assert worker.side.take_provided() == {"fine"} and not worker.side.take_outcomes()["fine"].failure
    assert worker.side.counts.take().data["fallbacks"] == {reason: 1}
    assert history.is_closed and history.layer == 2
    assert worker.side.captured == 1 and worker.store.writes == 0


def test_a_report_says_how_much_was_computed_of_chunks_and_histories(worker: Any) -> None:
    """So that an idle engine tells one that is slow from one whose store hangs."""
    read: Future[None] = Future()
    worker.prefills.update(chunk=Prefill(reads={2: read}), prompt=Prefill())
    worker.side.step(captures("chunk"))
    begun = worker.side.report().capture_work
    worker.side.step(jobs("prompt"))
    worker.side.step(jobs())
    assert worker.side.take_provided() == {"prompt"} and worker.side.report().capture_work == begun > 0
    read.set_result(None)
    while not worker.side.captured:
        worker.side.step(jobs(is_idle=True))
    assert worker.side.report().capture_work == begun * LAYERS // 2
    two = StepReport(1, capture_work=7).aggregate(StepReport(1, capture_work=5))
    assert isinstance(two, StepReport) and two.capture_work == 7


def test_a_history_that_is_written_slowly_is_seen_to_go_on(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, ids = KVLayout((LayerShape(1, 4),), torch.float32), as_token_ids(range(4))
    monkeypatch.setattr(capture_writer, "WRITTEN", 2 * layout.block_bytes(4))
    writer, seen = worker.side._capture_writer, list[tuple[int, int]]()

    def write(part: list[Block]) -> bool:
        seen.append((len(part), worker.side.report().capture_work))
        return len(seen) < 3

    writer._keeper.write = write
    assert not writer._write([Block(bytes([n]), b"", ids, [], layout) for n in range(7)])
    assert seen == [(2, 0), (2, 8), (2, 16)], "the store has refused the third part"


def test_vllm_computes_a_prompt_that_has_waited_for_the_store_as_long_as_it_may(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its waits count, as long as each read took: not what the engine did before it looked again."""
    now = 100.0
    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(worker.side._readiness, "_wait", lambda *_, **__: None)
    reads: dict[str, dict[int, Future[None]]] = {name: {1: Future(), 2: Future()} for name in ("slow", "fine", "free")}
    allowed = {"slow": 1.0, "fine": 1.01, "free": None}
    worker.prefills.update({name: Prefill(reads=each) for name, each in reads.items()})
    worker.side.step(StepJobs(blend=[blend(name, load_s=load_s) for name, load_s in allowed.items()]))
    worker.side.step(jobs())  # all begin, and wait for layer 1
    now += 0.5
    for each in reads.values():
        each[1].set_result(None)
    now += 50.0  # a long step of the engine
    for _ in range(3):
        worker.side.step(jobs())  # layer 1, and layer 2 is not there
    assert not worker.side.take_provided()
    now += 0.505
    worker.side.step(jobs())
    assert worker.side.take_provided() == {"slow"} and worker.prefills["slow"].is_closed
    outcome = worker.side.take_outcomes()["slow"]
    assert (outcome.failure, outcome.read_s) == ("load timeout", {"s3": pytest.approx(1.005)})
    assert worker.side.take_failed_blocks() == {6, 7}
    assert worker.side.counts.take().data["fallbacks"] == {"load timeout": 1}
    for name in ("fine", "free"):
        reads[name][2].set_result(None)
    worker.side.step(jobs())
    worker.side.step(jobs())
    assert worker.side.take_provided() == {"fine", "free"}


@pytest.mark.may_fail("RuntimeError", "OutOfMemoryError")
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_failure_frees_its_memory_and_costs_one_prompt(worker: Any, error: type[Exception]) -> None:
    bad, good = Prefill(fails_at=3), Prefill()
    bad.error = error
    worker.prefills.update(bad=bad, good=good)
    worker.side.step(jobs("bad", "good"))
    worker.side.step(jobs())
    outcomes = worker.side.take_outcomes()
    assert {name: one.failure for name, one in outcomes.items()} == {"bad": error.__name__, "good": ""}
    assert worker.side.take_failed_blocks() == {6, 7}
    assert bad.held() is None
    assert bad.is_closed


@pytest.mark.may_fail("store write", "RuntimeError")
def test_a_store_that_has_just_refused_a_chunk_has_none_computed_and_lost_blocks_of_a_failed_blend_count(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(block: Any) -> bool:
        raise StoreReadOnlyError("mounted read-only")

    worker.prefills.update({name: Prefill() for name in "abc"})
    monkeypatch.setattr(worker.store, "write_all", refused, raising=False)
    monkeypatch.setattr(worker.store, "put_manifest", refused)
    worker.side.step(captures("a"))
    deadline = time.monotonic() + 60
    while worker.side.captured < 1 and time.monotonic() < deadline:
        worker.side.step(StepJobs(is_idle=True))
    computed = worker.side.report().capture_work
    assert worker.side.captured == 1 and computed > 0
    worker.side.step(captures("b", "c"))
    assert worker.side.captured == 3 and worker.side.report().capture_work == computed
    worker.prefills["lossy"] = lossy = Prefill(fails_at=2)
    lossy.lost_reads = 2
    worker.side.step(jobs("lossy"))
    for _ in range(9):
        worker.side.step(StepJobs())
    assert worker.side.counts.take().data["fallbacks"]["block lost"] == 2


@pytest.mark.may_fail("OSError")
def test_dropped_captures_are_counted_and_not_stored(worker: Any) -> None:
    worker.prefills.update({name: Prefill() for name in "abcd"})
    begun, real = threading.Event(), CaptureWriter._store

    def on_host(*_: Any) -> Any:
        worker.store.gate.wait()
        raise OSError("gone")

    def store(self: Any, number: int, copied: Any) -> None:
        begun.set()
        real(self, number, copied)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CaptureWriter, "_on_host", on_host)
        patched.setattr(CaptureWriter, "_store", store)
        worker.side.step(captures("a", "b"))
        begun.wait()  # one is being written, one waits for that
        worker.side._budget = 1
        worker.side.step(captures("c", "d"))
        assert worker.side.captured == 0
        for _ in range(3):  # a chunk is counted once, however often there is a reset
            worker.side.step(jobs(is_reset=True))
            assert worker.side.captured == 0, "the first one is being written"
        assert worker.store.drops == 3
        worker.store.gate.set()
        while worker.side.captured < 4:
            worker.side._capture_writer.wait(1.0)
        assert worker.side.captured == 4
    assert worker.prefills["c"].layer < LAYERS
    assert worker.store.writes == 0


def test_closing_does_not_wait_for_a_store_that_hangs(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    monkeypatch.setattr(capture_writer, "CLOSE_S", 0.01)

    def on_host(*_: Any) -> Any:
        begun.set()
        worker.store.gate.wait()
        return CHUNK

    monkeypatch.setattr(CaptureWriter, "_on_host", on_host)
    worker.prefills.update(chunk=Prefill(), one=Prefill(reads={1: Future()}))
    worker.side.step(captures("chunk"))
    begun.wait()
    worker.side.step(jobs("one"))
    worker.side.step(jobs())
    worker.side.close()
    assert worker.prefills["one"].is_closed
    assert worker.side.captured == 0


class TiledPrefill(Prefill):
    """Three tiles of four rows a layer, which exchange something; `at`: the (layer, tile, before or behind its
    exchange) that fails here."""

    def __init__(self, group: ThreadGroup, at: tuple[int, int, str]) -> None:
        super().__init__(rows=12)
        self._group, self._at, self._tile = group, at, 0

    def next_layer(self) -> Any:
        for self._tile in range(3):
            yield LayerRows(self, self.layer, torch.zeros(4, 2), torch.arange(4), None)  # type: ignore[arg-type]
        self.layer += 1

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Any) -> torch.Tensor:
        if self._at == (layer, self._tile, "before"):
            raise RuntimeError("injected")
        self._group.collective(1.0, f"layer {layer}")
        if self._at == (layer, self._tile, "behind"):
            raise RuntimeError("injected")
        return hidden


@pytest.mark.may_fail("RuntimeError", "another rank failed")
@pytest.mark.parametrize("seed", range(30))
def test_ranks_end_their_steps_together_whatever_fails_where(seed: int) -> None:
    """Small budgets leave layers in their middle, and faults at random: all ranks report the same prompts in the same
    step."""
    rng = random.Random(seed)
    size, names = rng.choice([2, 3]), "abcd"
    budget = rng.choice([1, 5, 9, 30, 100])
    fails = {
        (name, rank): (rng.randrange(LAYERS), rng.randrange(3), rng.choice(["before", "behind"]))
        for name in names
        for rank in range(size)
        if rng.random() < 0.3
    }

    def work(group: ThreadGroup, ranks: Any) -> list[Any]:
        made = make_worker(Store(), group, budget=budget, tile_rows=4)
        made._opener.blend = lambda job: TiledPrefill(group, fails.get((job.request_id, group.rank), (-1, 0, "")))
        seen = []
        for number in range(120):
            made.step(jobs(*names[number : number + 1]))
            outcomes = made.take_outcomes()
            seen.append({name: bool(one.failure) for name, one in outcomes.items()})
        made.close()
        return seen

    found, meeting = on_all(size, work)
    assert all(one == found[0] for one in found), found
    failed = {name for name, _ in fails}
    assert {name: bad for step in found[0] for name, bad in step.items()} == {name: name in failed for name in names}
    assert meeting.barrier.n_waiting == 0
