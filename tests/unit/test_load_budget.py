"""What a request may wait for the store, by a clock of its own; and how often a far store is asked for its layers."""

import gc
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import LoadTimeoutError
from cacheblend.core.load import budget as budget_module
from cacheblend.core.load import loader as loader_module
from cacheblend.core.load import staging_buffers
from cacheblend.core.load.budget import LEAST_S, LOOK_UP, LateTiers, LoadBudget, Reading
from cacheblend.core.load.loader import MOMENT_S, LayerLoader, ReadSize
from cacheblend.core.load.staging_buffers import StagingMemory
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName, chain_names
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.hf.prefiller import Pace
from cacheblend.store import DiskStore, MemoryStore, TieredStore
from cacheblend.store.combined import CascadeStore
from cacheblend.store.remote import store as remote_module
from cacheblend.store.remote.objects import Range
from cacheblend.store.remote.store import RemoteStore
from cacheblend.store.sealed import Bytes
from store_blocks import ROOT, make_block, raw_block


class Clock:
    """Moves when somebody waits, at most to the end of what is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ends = 100.0, dict[int, tuple["Future[Any]", float]]()
        monkeypatch.setattr(budget_module, "wait", self._wait)

    def __call__(self) -> float:
        return self.now

    def call(self, seconds: float) -> "Future[Any]":
        """A call that ends so many seconds from now, if it is waited for."""
        made = Future[Any]()
        self.ends[id(made)] = made, self.now + seconds
        return made

    def _wait(self, calls: Sequence["Future[Any]"], timeout: float) -> None:
        (call,) = calls
        end = self.ends[id(call)][1]
        self.now = min(self.now + timeout, max(self.now, end))
        if self.now >= end:
            call.set_result(None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(budget_module, "LEAST_S", LEAST_S)
    return Clock(monkeypatch)


def of(tier: str) -> Reading:
    return lambda: (tier, 0.0)


def test_a_slow_look_up_is_not_the_next_tiers_fault_and_reads_of_several_are_the_wait_of_each(clock: Clock) -> None:
    for seconds in (None, 2.0):  # the next tier is asked for half a second at least, and given up with its own time
        budget = LoadBudget(seconds, lambda: 2.0, clock=clock)
        assert budget.wait(clock.call(1.9))
        budget.measured_by(lambda: 0.6)
        assert budget.wait(clock.call(0.2), of("disk"))
        assert not budget.wait(clock.call(9.0), of("disk"))
        budget.give_up("loading", "disk")
        assert budget.late == {"disk": pytest.approx(LEAST_S)}
        assert budget.waited == {"": pytest.approx(1.9), "disk": pytest.approx(LEAST_S)}
    # one call that asks one tier after the other: the second hangs, and the first is not blamed
    budget, began = LoadBudget(None, lambda: 1.0, clock=clock), clock.now
    assert not budget.wait(clock.call(99.0), lambda: ("s3", began + 0.3) if clock.now > began else ("disk", began))
    budget.give_up("loading", "s3")
    assert budget.waited == {"disk": pytest.approx(0.3), "s3": pytest.approx(0.7)}
    assert budget.late == {"s3": pytest.approx(0.7)} and budget.spent == pytest.approx(1.0)


@given(
    seconds=st.sampled_from([None, 0.1, 0.6, 3.0]),
    measured=st.floats(0.01, 5.0),
    calls=st.lists(st.tuples(st.sampled_from(["", "disk", "s3"]), st.floats(0.0, 2.0)), max_size=30),
)
def test_no_tier_is_given_up_before_its_share_and_no_request_waits_longer_than_all_shares(
    seconds: float | None, measured: float, calls: list[tuple[str, float]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_module, "LEAST_S", LEAST_S)
        clock = Clock(patch)
        budget = LoadBudget(seconds, lambda: measured, clock=clock)
        bound = max(LEAST_S, measured) if seconds is None else seconds
        share, waited = min(bound, LEAST_S), Counter[str]()
        for tier, takes in calls:
            began = clock.now
            if tier in budget.late:
                continue
            in_time = budget.wait(clock.call(takes), of(tier))
            waited[tier] += clock.now - began
            if not in_time:
                budget.give_up("loading", tier)
                own = waited[tier] if tier else waited.total()  # no tier: the store as a whole
                assert waited[tier] >= share - 1e-6 and budget.late[tier] == pytest.approx(own)
        assert budget.spent == pytest.approx(waited.total()) and waited.total() <= bound + 3 * share + 1e-6


# ---- what others have given up ----------------------------------------------------------------------------
def test_what_one_request_gave_up_no_other_waits_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    late = LateTiers(clock)

    def ask(tier: str, takes: float) -> tuple[float, int]:
        """Seconds that a request waited, and the lines of its report."""
        budget, began = LoadBudget(1.0, late_tiers=late, clock=clock), clock.now
        if not budget.skips("loading", tier):
            if budget.wait(clock.call(takes), of(tier)):
                late.answered([tier])
            else:
                budget.give_up("loading", tier)
        return clock.now - began, len(budget.timeouts)

    assert ask("s3", 99.0) == (1.0, 1)
    resumes = clock.now + 10.0
    while clock.now < resumes - 0.01:
        assert ask("s3", 99.0) == (0.0, 1) and ask("disk", 0.25) == (0.25, 0)
        clock.now += 0.5
    clock.now = resumes
    assert ask("s3", 99.0) == (1.0, 1)  # it is tried again, and is late again
    assert [record.getMessage() for record in caplog.records] == [
        "s3 kept a request waiting for 1.00 s, longer than allowed (load_timeout_s); requests are computed without it, "
        "and it is asked again in 10 s"
    ]
    assert late.silent == {"s3"}
    clock.now += 11.0
    assert ask("s3", 0.25) == (0.25, 0) and not late.silent
    # nor does a request that is under way
    late = LateTiers(clock)
    first, second = (LoadBudget(1.0, late_tiers=late, clock=clock) for _ in range(2))
    assert second.wait(clock.call(0.25), of("s3"))
    assert not first.wait(clock.call(9.0), of("s3"))
    first.give_up("loading", "s3")
    began, left = clock.now, late.left_s("s3")
    assert not second.wait(clock.call(9.0), of("s3")) and clock.now == began
    assert "took too long before" in second.give_up("loading", "s3") and second.late == {"s3": 0.25}
    assert late.left_s("s3") == left  # it tells nothing new
    assert second.wait(clock.call(0.25), of("disk"))
    # the pause is ten times as long as the tier was waited for
    for waited_s, pause_s in ((0.01, 5.0), (0.5, 5.0), (3.0, 30.0), (1000.0, 300.0)):
        late = LateTiers(clock)
        late.give_up("s3", waited_s)
        assert late.left_s("s3") == pytest.approx(pause_s) and late.left_s("") == late.left_s("disk") == 0.0


def test_calls_take_from_one_budget_and_the_measure_is_asked_for_when_the_least_is_spent(clock: Clock) -> None:
    # the measure
    asked: list[float] = []

    def measure() -> float:
        asked.append(clock.now)
        return 2.0

    budget = LoadBudget(None, measure, clock=clock)
    assert budget.wait(clock.call(LEAST_S - 0.01)) and not asked
    assert budget.wait(clock.call(1.0)) and asked == [100.0 + LEAST_S]
    budget.measured_by(lambda: 0.001)  # less is stored than the prompt is long
    assert not budget.wait(clock.call(0.01))
    budget = LoadBudget(None, lambda: 0.001, clock=clock)
    assert not budget.wait(clock.call(1.0)) and budget.spent == LEAST_S
    # without a bound or a measure everything is waited for
    for budget in (LoadBudget(clock=clock), LoadBudget(float("inf"), clock=clock)):
        budget.measured_by(lambda: float("inf"))
        assert budget.wait(clock.call(1e6))
    # what calls are waited for
    budget, done, began = LoadBudget(1.0, clock=clock), Future[Any](), clock.now
    done.set_result(None)
    assert budget.wait(done) and budget.spent == 0.0  # what is there already costs nothing
    assert budget.wait(clock.call(0.75), of("s3"))
    clock.now += 50.0  # computing
    assert not budget.wait(clock.call(0.5), of("s3"))
    assert budget.spent == 1.0 and clock.now == pytest.approx(began + 51.0)
    assert budget.give_up("loading", "s3").startswith("loading takes longer than the 1.00 s allowed")
    assert budget.late == {"s3": 1.0}
    assert budget.wait(clock.call(LEAST_S - 0.01), of("disk"))
    assert not budget.wait(clock.call(0.02), of("disk"))
    assert not budget.wait(clock.call(0.01), of("s3"))
    budget, began = LoadBudget(0.2, clock=clock), clock.now
    assert not budget.wait(clock.call(9.0), of("s3"))
    budget.give_up("loading", "s3")
    assert budget.wait(clock.call(0.1), of("disk")) and not budget.wait(clock.call(9.0), of("disk"))
    assert clock.now == pytest.approx(began + 0.4)  # a small budget begins anew for another tier


# ---- round trips ------------------------------------------------------------------------------------------


class FarObjects:
    """A server in memory, as far away as a test says, by a clock that only it moves; `calls` by name of the method."""

    tier, place = "far", "far://away"

    def __init__(self, latency_s: float, bytes_per_s: float = math.inf) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.now = 0.0
        self.calls: list[str] = []
        self._blocks: dict[BlockName, tuple[bytes, bytes]] = {}

    def clock(self) -> float:
        return self.now

    def look_up(
        self,
        names: Sequence[BlockName],
        unknown: AbstractSet[BlockName] = frozenset(),
        since: float = -math.inf,
        *,
        marks: bool = True,
    ) -> list[Bytes | None]:
        self._answer("look_up")
        held = [self._blocks.get(name) for name in names]
        return [block and (block[0] if n in unknown else b"") for n, block in zip(names, held, strict=True)]

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        self._answer("records", sum(each.stop - each.start for each in ranges))
        return [bytearray(self._blocks[each.name][1][each.first : each.last]) for each in ranges]

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        self._blocks[name] = bytes(header), b"".join((header, *records))

    def close(self) -> None:
        return

    def _answer(self, call: str, nbytes: int = 0) -> None:
        self.calls.append(call)
        self.now += self.latency_s + nbytes / self.bytes_per_s


LAYERS = 32
LAYOUT = KVLayout((LayerShape(2, 8),) * LAYERS, torch.float32)
PLANNER = Planner(ROOT, block_size=8)


def load(far: FarObjects, monkeypatch: pytest.MonkeyPatch, is_behind_memory: bool = False) -> None:
    """Stores chunks there, plans and loads a prompt of them, layer by layer, and checks what was loaded."""
    segments = [chunk(np.arange(8) + 100 * number) for number in range(8)]
    filling = RemoteStore(far)  # type: ignore[arg-type]
    records = make_block(1, 8, LAYOUT.layers, torch.float32).records
    for segment in segments:
        (name,) = chain_names(ROOT, [segment.token_ids])
        filling.write(raw_block(name, ROOT, segment.token_ids, records))
    far.calls.clear()
    prompt = Prompt.of([text([1, 2, 3]), *segments, text([4, 5])])
    for module in (loader_module, remote_module):
        monkeypatch.setattr(
            module, "time", SimpleNamespace(perf_counter=far.clock, time=time.time, monotonic=time.monotonic)
        )
    with RemoteStore(far) as remote:  # type: ignore[arg-type]
        store: Any = TieredStore(MemoryStore(1 << 24), remote) if is_behind_memory else remote
        plan = PLANNER.plan(prompt, store)
        assert plan.hit_tokens()["far"] == 64
        with LayerLoader(plan, store, LAYOUT, [None] * LAYERS, read_ahead=1) as loader:
            for layer in range(LAYERS):
                kv: Any = loader.layer(layer)
                assert torch.equal(kv.keys[:, 3:11].nan_to_num(), records[layer][:, 0].nan_to_num())


@pytest.mark.parametrize("latency_s", [0.8, 0.05, 0.02])
@pytest.mark.parametrize("is_behind_memory", [False, True])
def test_small_records_of_a_far_store_come_in_one_round_trip(
    latency_s: float, is_behind_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look-up, which tells how far away it is."""
    far = FarObjects(latency_s)
    load(far, monkeypatch, is_behind_memory)
    assert far.calls == ["look_up", "records"]


def test_near_stores_are_read_while_layers_compute_and_slow_wires_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    far = FarObjects(MOMENT_S / 2, bytes_per_s=1e5)  # a layer takes .08 s
    load(far, monkeypatch)
    assert far.calls == ["look_up", *["records"] * LAYERS]
    # the first part by what is assumed of a wire, the others by what it took
    layer_bytes = LAYOUT.block_bytes(64) / LAYERS
    monkeypatch.setattr(loader_module, "BYTES_PER_S", layer_bytes / 0.005)
    far = FarObjects(0.02, bytes_per_s=layer_bytes / 0.01)  # half as fast
    load(far, monkeypatch)
    assert far.calls == ["look_up", *["records"] * 15]  # 4 layers, then 2 at a time
    size = ReadSize(LAYOUT, 8, 64)
    assert [size.of(trip_s) for trip_s in (0.0, MOMENT_S, 0.003, 0.05, 9.0)] == [1, 1, 1, 10, LAYERS]
    size.learn(10, 0.04, 0.05)  # the bytes take next to no time
    assert size.of(0.05) == LAYERS


def test_stores_know_how_far_each_tier_is_and_a_pace_is_that_of_long_passes(tmp_path: Any) -> None:
    far, farther = FarObjects(0.1), FarObjects(0.3)
    remotes = [RemoteStore(each) for each in (far, farther)]  # type: ignore[arg-type]
    for remote, trip_s in zip(remotes, (0.1, 0.3), strict=True):
        assert remote.round_trip_s("far") == 0.0  # not asked yet
        remote._round_trips.append(trip_s)
    with CascadeStore([DiskStore(tmp_path / "near", durable=False), *remotes]) as cascade:
        tiered = TieredStore(MemoryStore(1 << 20), cascade)
        found = [tiered.round_trip_s(tier) for tier in ("memory", "disk", "far", "far-2", "none of these")]
        assert tiered.tier_names == ("memory", "disk", "far", "far-2") and found == [0.0, 0.0, 0.1, 0.3, 0.0]
    pace = Pace()
    assert pace.seconds(100) is None
    pace.learn(10, 1.0)
    assert pace.seconds(100) == 10.0
    for _ in range(20):
        pace.learn(10_000, 10.0)
        pace.learn(10, 0.0)
    assert pace.seconds(1000) == pytest.approx(1.0, rel=0.02)


# ---- reads that were given up and end later -------------------------------------------------------------------


FEW, SLAB, SLABS = 4, 1 << 14, 4
SHALLOW = KVLayout((LayerShape(2, 8),) * FEW, torch.float32)


class LateStore(MemoryStore):
    """Memory that copies records to where the reader wants them; reads of `hanging` blocks take that memory and hang
    until their gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging: set[BlockName] = set()
        self.gates: list[threading.Event] = []
        self.ended = threading.Semaphore(0)

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        found = super().read_layers(names, layers, heads)
        assert memory is not None
        places = [[memory(record.nbytes) for record in records] for records in found]  # type: ignore[union-attr]
        hangs = bool(self.hanging.intersection(names))
        if hangs:
            self.gates.append(threading.Event())
            self.gates[-1].wait()
        for records, own in zip(found, places, strict=True):
            for record, place in zip(records, own, strict=True):  # type: ignore[arg-type]
                place.copy_(record.contiguous().view(-1).view(torch.uint8))
        if hangs:
            self.ended.release()
        views: Any = [
            [place.view(record.dtype).view(record.shape) for record, place in zip(records, own, strict=True)]  # type: ignore[arg-type]
            for records, own in zip(found, places, strict=True)
        ]
        return views


def stored(store: MemoryStore, number: int) -> tuple[Segment, BlockName]:
    """A chunk whose records hold its number."""
    segment = chunk(np.arange(8) + 100 * number)
    (name,) = chain_names(ROOT, [segment.token_ids])
    records = [torch.full((2, 2, 8, 8), float(number) + layer / 10) for layer in range(FEW)]
    store.write(raw_block(name, ROOT, segment.token_ids, records))
    return segment, name


@pytest.mark.parametrize("read_before", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_read_that_waits_for_a_thread_blames_no_tier(
    read_before: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("AT_ONCE", "AT_ONCE_TO_DEVICE"):  # layer by layer
        monkeypatch.setattr(loader_module, limit, 1)
    store, threads, hanging = MemoryStore(), DaemonPool(1, "test-busy"), threading.Event()
    segment, name = stored(store, 1)
    plan, late_tiers = PLANNER.plan(Prompt.of([text([1, 2]), segment, text([3])]), store), LateTiers()
    budget = LoadBudget(0.5, late_tiers=late_tiers)
    loader = LayerLoader(
        plan, store, SHALLOW, [None] * FEW, read_ahead=1, overlap=overlap, threads=threads, budget=budget
    )
    if read_before:
        check(loader.layer(0), 0, 0)
    threads.submit(hanging.wait, 60)  # another request's read; the next layer's is in front of it, if one was read
    if read_before:
        check(loader.layer(1), 0, 1)
    with pytest.raises(LoadTimeoutError) as late:
        loader.layer(read_before)
    assert late.value.names == [name] and "from the store takes longer" in str(late.value)
    assert list(budget.late) == [LOOK_UP] and late_tiers.left_s(store.tiers().popitem()[0]) == 0
    hanging.set()
    loader.close()
    threads.close()


def test_what_others_found_out_ends_no_wait_between_two_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    late_tiers = LateTiers(clock)
    budget = LoadBudget(1.0, late_tiers=late_tiers, clock=clock)
    late_tiers.give_up(LOOK_UP, 0.5)
    assert budget.wait(clock.call(0.2), lambda: (LOOK_UP, 0.0))  # what was read is copied, or waits for a thread
    assert not budget.wait(clock.call(0.2))  # a look-up
    late_tiers.give_up("s3", 0.5)
    assert not budget.wait(clock.call(0.2), lambda: ("s3", -math.inf))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_late_read_writes_into_no_memory_of_others(seed: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, draw = StagingMemory(SLABS * SLAB, SLAB), random.Random(seed)
    monkeypatch.setattr(staging_buffers, "memory_of", lambda device: memory)
    store, threads = LateStore(), DaemonPool(16, "test-late")
    chunks = [stored(store, number) for number in range(1, 11)]
    late = draw.sample(range(10), 5)
    store.hanging = {chunks[at][1] for at in late}

    def loader_of(number: int, budget: LoadBudget) -> LayerLoader:
        plan = PLANNER.plan(Prompt.of([text([1, 2]), chunks[number][0], text([3])]), store)
        return LayerLoader(
            plan,
            store,
            SHALLOW,
            [None] * FEW,
            read_ahead=draw.choice([1, 3]),
            overlap=overlap,
            threads=threads,
            budget=budget,
        )

    under_way: list[tuple[int, LayerLoader]] = []
    hung = ended = 0
    for number in draw.sample(range(10), 10):
        loader = loader_of(number, LoadBudget(0.02 if number in late else 60.0))
        if number in late:
            with pytest.raises(LoadTimeoutError):
                loader.layer(0)
            loader.close()
            hung += 1
        else:
            check(loader.layer(0), number, 0)
            under_way.append((number, loader))  # its next layers lie in slabs
        if draw.random() < 0.4 and ended < len(store.gates):
            store.gates[ended].set()
            assert store.ended.acquire(timeout=60)
            ended += 1
    store.hanging.clear()  # on a busy machine a read may be given up before it begins: it hangs no more
    for gate in store.gates[ended:]:
        gate.set()
        assert store.ended.acquire(timeout=60)
    for number, loader in under_way:
        for layer in range(FEW):
            check(loader.layer(layer), number, layer)
        loader.close()
    assert hung == len(late) >= len(store.gates) > 0
    threads.close()
    for _ in range(60):
        for gate in store.gates:  # of a read that began meanwhile
            gate.set()
        threads.join(1)
    del loader, under_way
    gc.collect()
    slabs = [memory.slab() for _ in range(SLABS)]
    assert all(slab is not None for slab in slabs) and memory.slab() is None  # no more than that were ever there
    assert memory.nbytes == SLABS * SLAB


def check(kv: Any, number: int, layer: int) -> None:
    """Every loaded row has its chunk's records, whatever other reads have done."""
    expected = float(number + 1) + layer / 10
    assert torch.all(kv.keys[:, 2:10] == expected) and torch.all(kv.values[:, 2:10] == expected)
