"""The loader's reads: how many layers each takes, how far ahead, when they are done, lost blocks, and its end."""

import gc
import threading
import time
import weakref
from collections.abc import Sequence

import pytest
import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.load import loader as loader_module
from cacheblend.core.load.loader import AT_ONCE, AT_ONCE_TO_DEVICE, LayerLoader, ReadSize
from cacheblend.core.load.staging_buffers import Lease, StagingMemory
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.prompt import Prompt, chunk, text
from loader_sources import LAYOUT, PLANNER, ROTATIONS, CountingSource, FakeSource, check, deep_plan, planned


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read counts as slow, so that layers are read one by one; what is fast depends on the machine."""
    monkeypatch.setattr(loader_module, "MOMENT_S", 0.0)


# ---- how much at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_fast_reads_grow_and_slow_ones_do_not(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is read once, with those behind it; never across the layer from which on chunks are read."""
    layout, plan = deep_plan(30)
    for moment_s, together in ((1e9, [1, 2, 4, 8, 13]), (0.0, [1] * 28)):
        monkeypatch.setattr(loader_module, "MOMENT_S", moment_s)
        source = CountingSource(plan)
        options = {"first_reused_layer": 2, "read_ahead": 1, "overlap": overlap}
        with LayerLoader(plan, source, layout, [None] * 30, **options) as loader:
            for index in range(30):
                loader.layer(index)
                while loader._pending and not loader._pending[max(loader._pending)].done():
                    time.sleep(0.001)
        assert [layer for call in source.calls for layer in call] == list(range(2, 30))
        assert [len(call) for call in source.calls] == together


def test_large_records_are_read_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "MOMENT_S", 1e9)
    layout, plan = deep_plan(12)
    for at_once, most in ((1, 1), (3 * 2 * 2 * 4 * 8 * 4, 3)):  # bytes of a block of 4 tokens in as many layers
        monkeypatch.setattr(loader_module, "AT_ONCE", at_once)
        source = CountingSource(plan)
        with LayerLoader(plan, source, layout, [None] * 12) as loader:
            for index in range(12):
                loader.layer(index)
        assert max(len(call) for call in source.calls) == most


def test_what_is_ahead_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers' buffers and not a third's; the layer asked for is always loaded."""
    plan, source = planned()
    layer_bytes = LAYOUT.block_bytes(len(plan)) // len(LAYOUT.layers)
    for allowed, ahead in ((2 * layer_bytes, 2), (1, 1)):
        monkeypatch.setattr(loader_module, "AHEAD_BYTES", allowed)
        with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=100) as loader:
            loader.layer(0)
            time.sleep(0.05)
            assert {layer for _, layer in source.reads} == set(range(ahead + 1))
        source.reads.clear()


def test_a_device_is_given_more_of_a_block_at_once() -> None:
    """Records of a MiB: one layer a read on the host, and eight where they are copied to a device afterwards."""
    layout = KVLayout((LayerShape(8, 128),) * 32, torch.bfloat16)
    found = []
    for at_once in (AT_ONCE, AT_ONCE_TO_DEVICE):
        size = ReadSize(layout, 256, 256, at_once)
        for _ in range(5):
            size.learn(size.of(), 0.0)
        found.append(size.of())
    assert found == [1, 8]


# ---- memory, and lost blocks ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_released_layer_is_freed_before_the_others_that_were_read_with_it(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "MOMENT_S", 1e9)
    layout, plan = deep_plan(12)
    source = CountingSource(plan)
    with LayerLoader(plan, source, layout, [None] * 12, overlap=overlap) as loader:
        for index in range(12):
            keys = weakref.ref(loader.layer(index).keys)
            loader.release(index)
            assert keys() is None, f"layer {index} of the reads {source.calls}"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_read_that_fails_keeps_nothing_alive(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until a garbage collection: its slabs are missing to others until then."""
    leases: list[weakref.ref[Lease]] = []
    real = StagingMemory.lease

    def lease(self: StagingMemory, uses: int = 1) -> Lease:
        given = real(self, uses)
        leases.append(weakref.ref(given))
        return given

    monkeypatch.setattr(StagingMemory, "lease", lease)
    plan, _ = planned()
    source = FakeSource(plan, lost=[(plan.spans[2].name, 1)])
    gc.disable()
    try:
        with LayerLoader(plan, source, LAYOUT, ROTATIONS, overlap=overlap) as loader:
            loader.layer(0)
            with pytest.raises(BlockLostError):
                loader.layer(1)
        assert len(leases) > 1 and all(each() is None for each in leases)
    finally:
        gc.enable()


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_a_loss_names_every_lost_block_of_the_layer(read_ahead: int) -> None:
    plan, _ = planned()
    lost = [plan.spans[2].name, plan.spans[8].name]
    source = FakeSource(plan, lost=[(lost[0], 2), (lost[1], 2), (plan.spans[4].name, 3)])
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=read_ahead) as loader:
        loader.layer(0)
        loader.layer(1)
        with pytest.raises(BlockLostError, match=r"2 block.*layer 2: gone") as caught:
            loader.layer(2)
    assert set(caught.value.names) == set(lost)
    assert len(caught.value.names) == 2


# ---- when a layer is ready, and closing -------------------------------------------------------------------


class GatedSource(FakeSource):
    """Reads of a layer hang until its gate is open."""

    def __init__(self, plan: BlendPlan) -> None:
        super().__init__(plan)
        self.gates = [threading.Event() for _ in LAYOUT.layers]

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        self.gates[layers[-1]].wait()
        return super().read_layers(names, layers, heads, memory)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_is_ready_once_it_is_read(overlap: bool) -> None:
    plan, _ = planned()
    source = GatedSource(plan)
    pool = DaemonPool(1, "test-reader")
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, threads=pool, overlap=overlap) as loader:
        for layer, gate in enumerate(source.gates):
            assert loader.awaited(layer) is not None
            gate.set()
            awaited = loader.awaited(layer)
            if awaited is not None:
                awaited.result()
            assert loader.awaited(layer) is None
        loaded = [loader.layer(layer) for layer in range(4)]
        assert loader.awaited(0) is None  # given already
    check(plan, source, loaded, 0)
    assert all(name.startswith("test-reader") for name in source.threads)
    assert set(loader.read_s) == {"memory"}


def test_layers_without_records_are_ready_at_once() -> None:
    plan, source = planned()
    nothing_exact = plan.without([span.name for span in plan.spans if span.source is Source.PREFIX])
    with LayerLoader(
        nothing_exact, GatedSource(plan), LAYOUT, ROTATIONS, first_reused_layer=2, threads=DaemonPool(1, "t")
    ) as loader:
        assert loader.awaited(0) is None
        loader.layer(0)
        assert loader.awaited(1) is None
        assert loader.awaited(2) is not None
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=0) as loader:
        assert loader.awaited(0) is None  # reads in the caller's thread


def test_closing_does_not_wait_for_a_read_in_shared_threads() -> None:
    plan, _ = planned()
    source = GatedSource(plan)
    loader = LayerLoader(plan, source, LAYOUT, ROTATIONS, threads=DaemonPool(1, "test-reader"))
    hanging = loader.awaited(0)
    assert hanging is not None
    while not hanging.running():
        time.sleep(0.001)
    loader.close()
    assert not hanging.done()
    for gate in source.gates:
        gate.set()
    hanging.result()
    assert {layer for _, layer in source.reads} == {0}  # what was ahead is not read any more


@pytest.mark.parametrize("overlap", [False, True])
def test_close_while_reading_waits_and_stops(overlap: bool) -> None:
    plan, _ = planned()
    source = FakeSource(plan, delay_s=0.005)
    loader = LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=3, overlap=overlap)
    loader.layer(0)
    loader.close()
    reads = len(source.reads)
    assert reads < 4 * len({s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)})
    assert not any(t.name.startswith("cacheblend-loader") for t in threading.enumerate())
    time.sleep(0.02)
    assert len(source.reads) == reads
    loader.close()


def test_a_prompt_without_hits_starts_no_thread() -> None:
    plan = PLANNER.plan(Prompt.of([text([5]), chunk([6])]), EmptySource())
    with LayerLoader(plan, EmptySource(), LAYOUT, ROTATIONS) as loader:
        keys, _ = loader.layer(0)
        assert not any(t.name.startswith("cacheblend-loader") for t in threading.enumerate())
    assert keys.shape == (2, 2, 8)
