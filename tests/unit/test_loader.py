"""The loader: which records fill its buffers and engines' caches, at which positions; how many layers each read takes,
how far ahead, when they are done, lost blocks, and its end."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.kernels import kv_placement
from cacheblend.core.kernels.kv_placement import ROWS_AT_ONCE, Located
from cacheblend.core.kernels.rope import KeyRotation, Turn, reposition_keys, turn_by
from cacheblend.core.load import loader as loader_module
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.load.loader import AT_ONCE, AT_ONCE_TO_DEVICE, LayerLoader, ReadSize
from cacheblend.core.load.staging_buffers import Lease, Staging, StagingMemory, _steps, copied_together
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName, root_name
from cacheblend.core.plan.blocks import BlockEntry, EmptySource, KVLayout, LayerShape, RecordMemory
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text

ROOT = root_name("model", "float32")
BOS = 1
LAYOUT = KVLayout((LayerShape(2, 8), LayerShape(2, 8), LayerShape(4, 4), LayerShape(2, 8)), torch.float32)
FULL, HALF = (KeyRotation(1e2 ** (-torch.arange(n) / n), "half") for n in (4, 2))
ROTATIONS = (FULL, None, HALF, FULL)
PLANNER = Planner(ROOT, Anchor("bos", BOS), block_size=4)


class RandomRecords(EmptySource):
    """Random records, the same for the same block and layer.

    Attributes:
        lost: blocks, and the layers from which they cannot be read.
        before: called with the layers of each read, in its thread.
        calls: the layers of each read.
        reads: block and layer of each record.
        threads: names of those that read.
    """

    def __init__(self, plan: BlendPlan, lost: Sequence[tuple[BlockName, int]] = (), layout: KVLayout = LAYOUT) -> None:
        self.held = {s.name: plan.prompt.token_ids[s.start : s.stop] for s in plan.spans[: len(plan.spans) - 1]}
        self.lost, self.layout = set(lost), layout
        self.before: Callable[[range], object] = lambda layers: None
        self.calls, self.reads, self.threads = list[range](), list[tuple[BlockName, int]](), set[str]()

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [BlockEntry(self.held[n], self.layout, "memory") if n in self.held else None for n in names]

    def record(self, name: BlockName, layer: int) -> torch.Tensor:
        shape = self.layout.layers[layer]
        generator = torch.Generator().manual_seed(int.from_bytes(name[:6], "little") + layer)
        return torch.randn(shape.kv_heads, 2, len(self.held[name]), shape.head_dim, generator=generator)

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        self.threads.add(threading.current_thread().name)
        self.before(layers)
        self.calls.append(layers)
        self.reads += [(name, layer) for name in names for layer in layers]
        heads = slice(None) if heads is None else heads
        return [
            BlockLostError([name], "gone")
            if any((name, layer) in self.lost for layer in layers)
            else [self._in(memory, self.record(name, layer)[heads]) for layer in layers]
            for name in names
        ]

    @staticmethod
    def _in(memory: RecordMemory | None, record: torch.Tensor) -> torch.Tensor:
        if memory is None:
            return record
        taken = memory(record.nbytes)
        taken.copy_(record.contiguous().view(-1).view(torch.uint8))
        return taken.view(record.dtype).view(record.shape)


def gated(source: RandomRecords) -> list[threading.Event]:
    """From now on reads of a layer hang until its gate is open."""
    gates = [threading.Event() for _ in LAYOUT.layers]
    source.before = lambda layers: gates[layers[-1]].wait()
    return gates


def planned(drop: int | None = None) -> tuple[BlendPlan, RandomRecords]:
    """BOS | A (exact) | text | B | C | B | question; `drop` takes one span out of the store."""
    a, b, c = chunk(range(10, 16)), chunk(range(20, 29)), chunk(range(30, 33))
    prompt = Prompt.of([text([BOS]), a, text([2, 3]), b, c, b, text([4, 5])])
    names = PLANNER.plan(prompt, RandomRecords(PLANNER.plan(prompt, EmptySource())))
    source = RandomRecords(names)
    for span in names.spans:
        if names.prompt.segments[span.segment].is_chunk is False and span.start:
            source.held.pop(span.name, None)
    if drop is not None:
        source.held.pop(names.spans[drop].name)
    return PLANNER.plan(prompt, source), source


def deep(layers: int) -> tuple[KVLayout, BlendPlan, RandomRecords]:
    """A chunk of 4 tokens behind another one that misses, in a model of so many layers."""
    layout = KVLayout((LayerShape(2, 8),) * layers, torch.float32)
    plan, _ = planned()
    source = RandomRecords(plan, layout=layout)
    kept = [span.name for span in plan.spans if span.source is Source.LOADED]
    source.held = {name: ids for name, ids in source.held.items() if name in kept}
    return layout, PLANNER.plan(plan.prompt, source), source


def check(
    plan: BlendPlan, source: RandomRecords, loaded: Sequence[tuple[torch.Tensor, torch.Tensor]], first: int
) -> None:
    for layer, (keys, values) in enumerate(loaded):
        shape = LAYOUT.layers[layer]
        assert keys.shape == values.shape == (shape.kv_heads, len(plan), shape.head_dim)
        for span in plan.spans:
            wanted = span.source is Source.PREFIX or (span.source is Source.LOADED and layer >= first)
            assert ((span.name, layer) in source.reads) == wanted
            if not wanted:
                continue
            record = source.record(span.name, layer)
            expected, rotation = record[:, 0], ROTATIONS[layer]
            if rotation is not None and span.source is Source.LOADED:
                shift = torch.full((len(span),), span.start - span.stored_start)
                expected = reposition_keys(expected, turn_by(rotation, shift))
            torch.testing.assert_close(keys[:, span.start : span.stop], expected, rtol=0, atol=1e-6)
            assert torch.equal(values[:, span.start : span.stop], record[:, 1])


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read counts as slow, so that layers are read one by one; what is fast depends on the machine."""
    monkeypatch.setattr(loader_module, "MOMENT_S", 0.0)


@pytest.mark.parametrize("moment_s", [0.0, 1e9])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("read_ahead", [0, 1, 3, 100])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_buffers_are_filled_in_any_order_of_reading(
    read_ahead: int, first: int, overlap: bool, moment_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "MOMENT_S", moment_s)
    plan, source = planned()
    sources = [s.source for s in plan.spans]
    assert sources == [*[Source.PREFIX] * 3, Source.TEXT, *[Source.LOADED] * 7, Source.TEXT]
    options = {"first_reused_layer": first, "read_ahead": read_ahead, "overlap": overlap}
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, **options) as loader:
        loaded = [loader.layer(i) for i in range(len(LAYOUT.layers))]
    check(plan, source, loaded, first)
    in_thread = not any(name.startswith("cacheblend-loader") for name in source.threads)
    assert in_thread == (read_ahead == 0)
    assert loader.load_s > 0
    assert loader.wait_s > 0


class SideBySide(RandomRecords):
    """A block's records of one read lie side by side."""

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        read = super().read_layers(names, layers, heads)
        return [list(torch.stack(records).unbind()) for records in read]


@pytest.mark.parametrize("in_caches", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_records_that_are_sent_by_block_fill_what_those_read_one_by_one_fill(
    first: int, in_caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA from pinned memory: only the copies are the host's here."""
    plan, _ = planned()
    layout = KVLayout((LayerShape(2, 8),) * 9, torch.float32)
    source, rotations, sent = SideBySide(plan, layout=layout), [FULL, None, FULL] * 3, list[list[Located]]()
    source.held |= {s.name: plan.prompt.token_ids[s.start : s.stop] for s in plan.spans}
    with LayerLoader(plan, source, layout, rotations, first_reused_layer=first, read_ahead=0) as loader:
        expected = [loader.layer(index) for index in range(9)]

    def buffers(*_: Any) -> LayerKV:
        return LayerKV(*torch.full((2, 2, len(plan), 8), torch.nan).unbind())

    def send(self: Staging, layers: Sequence[Sequence[torch.Tensor]]) -> Sequence[Sequence[torch.Tensor]]:
        steps = _steps(layers)
        if steps is None:
            return layers
        sent.append(copied_together(layers, steps, torch.device("cpu")))
        return sent[-1]

    monkeypatch.setattr(loader_module, "MOMENT_S", 1e9)
    monkeypatch.setattr(LayerLoader, "_buffers", buffers)
    monkeypatch.setattr(Staging, "send", send)
    options: dict[str, Any] = {"first_reused_layer": first, "overlap": True, "caches": buffers if in_caches else None}
    with LayerLoader(plan, source, layout, rotations, **options) as loader:
        loader._device = torch.device("meta")  # else the records stay where they were read to
        found = [loader.layer(index) for index in range(9)]
    assert sum(map(len, sent)) == 9 and max(map(len, sent)) > 1, "every layer is sent by block, some together"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([*one], [*other], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_keys_move_in_the_free_thread(overlap: bool, inference_mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode too, as in vLLM; torch lets nobody outside of that mode write to buffers made in it."""
    moved: set[bool] = set()

    def spied(keys: torch.Tensor, turn: Turn) -> torch.Tensor:
        moved.add(threading.current_thread().name in source.threads)
        return reposition_keys(keys, turn)

    monkeypatch.setattr(kv_placement, "reposition_keys", spied)
    plan, source = planned()
    with torch.inference_mode(inference_mode), LayerLoader(plan, source, LAYOUT, ROTATIONS, overlap=overlap) as loader:
        check(plan, source, [loader.layer(i) for i in range(len(LAYOUT.layers))], 0)
    assert moved == {overlap}


@pytest.mark.parametrize(("read_ahead", "overlap"), [(0, False), (2, False), (2, True)])
def test_layers_are_given_again_and_what_an_engine_holds_is_taken(read_ahead: int, overlap: bool) -> None:
    """What was written into it since stays; nothing is read or moved twice."""
    plan, source = planned()
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=read_ahead, overlap=overlap) as loader:
        first = [loader.layer(i) for i in range(len(LAYOUT.layers))]
        check(plan, source, first, 0)
        first[1].write(torch.tensor([3, 7]), torch.full((2, 2, 8), 5.0), torch.full((2, 2, 8), 6.0))
        reads, seconds = len(source.reads), loader.load_s
        again = [loader.layer(i) for i in range(len(LAYOUT.layers))]
    assert all(a.keys is b.keys and a.values is b.values for a, b in zip(first, again, strict=True))
    assert again[1].keys[:, [3, 7]].eq(5).all() and again[1].values[:, [3, 7]].eq(6).all()
    assert (len(source.reads), loader.load_s) == (reads, seconds)
    # what the engine holds itself
    plan, source = planned()
    held = plan.with_resident(5)  # BOS, and four of A's six rows
    rows = [torch.randn(s.kv_heads, 2, 5, s.head_dim) for s in LAYOUT.layers]
    options = {"read_ahead": read_ahead, "overlap": overlap}
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, **options) as loader:
        expected = [loader.layer(i) for i in range(4)]
    source.reads.clear()
    with LayerLoader(held, source, LAYOUT, ROTATIONS, resident=rows.__getitem__, **options) as loader:
        for layer in range(4):
            for part, own, wanted in zip(loader.layer(layer), rows[layer].unbind(1), expected[layer], strict=True):
                assert torch.equal(part[:, :5], own)
                torch.testing.assert_close(part[:, 5:], wanted[:, 5:], rtol=0, atol=0, equal_nan=True)
    assert RESIDENT not in {name for name, _ in source.reads}
    assert {name for name, _ in source.reads} < {span.name for span in plan.spans}
    lost = held.without("all")
    with LayerLoader(lost, source, LAYOUT, ROTATIONS, resident=rows.__getitem__, **options) as loader:
        for part, own in zip(loader.layer(0), rows[0].unbind(1), strict=True):  # which no store can lose
            assert torch.equal(part[:, :5], own) and part[:, 5:].isnan().all()  # see conftest


def test_a_rank_reads_its_heads_misses_are_not_read_and_runs_may_be_longer_than_one_turn() -> None:
    plan, source = planned()
    layout = KVLayout(tuple(LayerShape(1, s.head_dim) for s in LAYOUT.layers), torch.float32)
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as whole:
        all_heads = [whole.layer(i) for i in range(4)]
    with LayerLoader(plan, source, layout, ROTATIONS, heads=slice(1, 2)) as part:
        for layer in range(4):
            keys, values = part.layer(layer)
            for span in plan.spans:
                if span.source in (Source.PREFIX, Source.LOADED):
                    rows = slice(span.start, span.stop)
                    assert torch.equal(keys[:, rows], all_heads[layer].keys[1:2, rows])
                    assert torch.equal(values[:, rows], all_heads[layer].values[1:2, rows])
    # misses
    plan, source = planned(drop=5)
    assert [s.source for s in plan.spans if s.segment == 3] == [Source.LOADED, Source.MISS, Source.LOADED]
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=0) as loader:
        check(plan, source, [loader.layer(i) for i in range(4)], 0)
    # more moved rows in a row than are re-positioned at once
    big = Planner(ROOT, Anchor("bos", BOS), block_size=1500)
    prompt = Prompt.of([text([BOS, 7]), *(chunk([9 + i] * 3001) for i in range(2)), text([2])])
    source = RandomRecords(big.plan(prompt, EmptySource()))
    plan = big.plan(prompt, source).without([big.plan(prompt, source).spans[0].name])
    assert sum(len(s) for s in plan.spans if s.source is Source.LOADED) > ROWS_AT_ONCE
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as loader:
        check(plan, source, [loader.layer(i) for i in range(4)], 0)


# ---- an engine's cache ------------------------------------------------------------------------------------
def elsewhere(rows: int) -> list[LayerKV]:
    """An engine's cache, full of other numbers."""
    sizes = [(2, shape.kv_heads, rows, shape.head_dim) for shape in LAYOUT.layers]
    return [LayerKV(*torch.full(size, 9.0).unbind()) for size in sizes]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("first", [0, 3])
def test_records_are_placed_in_an_engines_cache_and_nothing_else_is(
    read_ahead: int, first: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, source = planned()
    cache = elsewhere(len(plan))
    monkeypatch.setattr(LayerLoader, "_buffers", None)
    options: dict[str, Any] = {"first_reused_layer": first, "read_ahead": read_ahead, "overlap": overlap}
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, caches=cache.__getitem__, **options) as loader:
        found = [loader.layer(index) for index in range(len(LAYOUT.layers))]
        assert all(one is other for one, other in zip(found, cache, strict=True))
    check(plan, source, cache, first)
    for layer, kv in enumerate(cache):
        for span in plan.spans:
            if not (span.source is Source.PREFIX or (span.source is Source.LOADED and layer >= first)):
                assert bool((kv.keys[:, span.start : span.stop] == 9.0).all())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_loader_writes_to_no_engines_cache_and_stops_reading(overlap: bool) -> None:
    """Its blocks may be another request's by then; what is read ahead is only placed by who asks for the layer."""
    plan, source = planned()
    begun, gate, cache = threading.Event(), threading.Event(), elsewhere(len(plan))
    source.before = lambda layers: (begun.set(), gate.wait(30))
    threads = DaemonPool(2, "readers")
    options: dict[str, Any] = {"overlap": overlap, "threads": threads, "read_ahead": 3}
    loader = LayerLoader(plan, source, LAYOUT, ROTATIONS, caches=cache.__getitem__, **options)
    assert loader.awaited(0) is not None
    assert begun.wait(30)
    loader.close()
    gate.set()
    threads.close()
    threads.join()
    assert source.reads and all(bool((part == 9.0).all()) for kv in cache for part in kv)
    # closing waits for the read under way
    plan, source = planned()
    source.before = lambda layers: time.sleep(0.05)
    loader = LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=3, overlap=overlap)
    loader.layer(0)
    loader.close()
    reads = len(source.reads)
    assert len(source.calls) < 4
    assert not any(t.name.startswith("cacheblend-loader") for t in threading.enumerate())
    time.sleep(0.02)
    assert len(source.reads) == reads
    loader.close()


# ---- how much at once -------------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [False, True])
def test_fast_reads_grow_and_slow_ones_do_not(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is read once, with those behind it; never across the layer from which on chunks are read."""
    for moment_s, together in ((1e9, [1, 2, 4, 8, 13]), (0.0, [1] * 28)):
        monkeypatch.setattr(loader_module, "MOMENT_S", moment_s)
        layout, plan, source = deep(30)
        options = {"first_reused_layer": 2, "read_ahead": 1, "overlap": overlap}
        with LayerLoader(plan, source, layout, [None] * 30, **options) as loader:
            for index in range(30):
                loader.layer(index)
                while loader._pending and not loader._pending[max(loader._pending)].done():
                    time.sleep(0.001)
        assert [layer for call in source.calls for layer in call] == list(range(2, 30))
        assert [len(call) for call in source.calls] == together


def test_large_records_are_read_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a MiB: one layer a read on the host, and eight where they are copied to a device afterwards."""
    large = KVLayout((LayerShape(8, 128),) * 32, torch.bfloat16)
    for at_once, wanted in ((AT_ONCE, 1), (AT_ONCE_TO_DEVICE, 8)):
        size = ReadSize(large, 256, 256, at_once)
        for _ in range(5):
            size.learn(size.of(), 0.0)
        assert size.of() == wanted
    monkeypatch.setattr(loader_module, "MOMENT_S", 1e9)
    for at_once, most in ((1, 1), (3 * 2 * 2 * 4 * 8 * 4, 3)):  # bytes of a block of 4 tokens in as many layers
        monkeypatch.setattr(loader_module, "AT_ONCE", at_once)
        layout, plan, source = deep(12)
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


# ---- memory, and lost blocks ------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [False, True])
def test_failed_reads_and_released_layers_keep_nothing_alive(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until a garbage collection: its slabs are missing to others until then."""
    leases: list[weakref.ref[Lease]] = []
    real = StagingMemory.lease

    def lease(self: StagingMemory, uses: int = 1) -> Lease:
        given = real(self, uses)
        leases.append(weakref.ref(given))
        return given

    monkeypatch.setattr(StagingMemory, "lease", lease)
    plan, _ = planned()
    source = RandomRecords(plan, lost=[(plan.spans[2].name, 1)])
    gc.disable()
    try:
        with LayerLoader(plan, source, LAYOUT, ROTATIONS, overlap=overlap) as loader:
            loader.layer(0)
            with pytest.raises(BlockLostError):
                loader.layer(1)
        assert len(leases) > 1 and all(each() is None for each in leases)
    finally:
        gc.enable()
    # a released layer is freed before the others that were read with it
    monkeypatch.setattr(loader_module, "MOMENT_S", 1e9)
    layout, plan, source = deep(12)
    with LayerLoader(plan, source, layout, [None] * 12, overlap=overlap) as loader:
        for index in range(12):
            keys = weakref.ref(loader.layer(index).keys)
            loader.release(index)
            assert keys() is None, f"layer {index} of the reads {source.calls}"


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_a_loss_names_every_lost_block_of_the_layer(read_ahead: int) -> None:
    plan, _ = planned()
    lost = [plan.spans[2].name, plan.spans[8].name]
    source = RandomRecords(plan, lost=[(lost[0], 2), (lost[1], 2), (plan.spans[4].name, 3)])
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=read_ahead) as loader:
        loader.layer(0)
        loader.layer(1)
        with pytest.raises(BlockLostError, match=r"2 block.*layer 2: gone") as caught:
            loader.layer(2)
    assert set(caught.value.names) == set(lost)
    assert len(caught.value.names) == 2


# ---- when a layer is ready, and closing -------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_is_ready_once_it_is_read(overlap: bool) -> None:
    (plan, source), pool = planned(), DaemonPool(1, "test-reader")
    gates = gated(source)
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, threads=pool, overlap=overlap) as loader:
        for layer, gate in enumerate(gates):
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


def test_layers_without_records_are_ready_at_once_and_closing_waits_for_no_shared_thread() -> None:
    nothing = PLANNER.plan(Prompt.of([text([5]), chunk([6])]), EmptySource())
    with LayerLoader(nothing, EmptySource(), LAYOUT, ROTATIONS) as loader:
        assert loader.layer(0).keys.shape == (2, 2, 8)
        assert not any(t.name.startswith("cacheblend-loader") for t in threading.enumerate())
    plan, source = planned()
    gated(source)
    nothing_exact = plan.without([span.name for span in plan.spans if span.source is Source.PREFIX])
    options: dict[str, Any] = {"first_reused_layer": 2, "threads": DaemonPool(1, "t")}
    with LayerLoader(nothing_exact, source, LAYOUT, ROTATIONS, **options) as loader:
        assert loader.awaited(0) is None
        loader.layer(0)
        assert loader.awaited(1) is None
        assert loader.awaited(2) is not None
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=0) as loader:
        assert loader.awaited(0) is None  # reads in the caller's thread
    plan, source = planned()  # a read in a shared thread goes on
    gates = gated(source)
    loader = LayerLoader(plan, source, LAYOUT, ROTATIONS, threads=DaemonPool(1, "test-reader"))
    hanging = loader.awaited(0)
    assert hanging is not None
    while not hanging.running():
        time.sleep(0.001)
    loader.close()
    assert not hanging.done()
    for gate in gates:
        gate.set()
    hanging.result()
    assert {layer for _, layer in source.reads} == {0}  # what was ahead is not read any more


def test_a_call_waits_for_a_thread_that_there_is_where_the_system_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, go_on = DaemonPool(2, "test-scarce"), threading.Event()
    first = pool.submit(go_on.wait, 30)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        second = pool.submit(int, "7")
        with pytest.raises(RuntimeError, match=r"no|can't"):
            DaemonPool(1, "test-none").submit(int)
    go_on.set()
    assert first.result(30) and second.result(30) == 7
    pool.close()


def test_layers_are_read_by_the_caller_where_the_system_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    plan, source = planned()
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as loader, LayerLoader(plan, source, LAYOUT, ROTATIONS) as lost:
        for index in range(len(LAYOUT.layers)):
            assert loader.awaited(index) is None
            assert loader.layer(index).keys.any()
        source.lost |= {(name, 0) for name in source.held}
        assert lost.awaited(0) is None
        with pytest.raises(BlockLostError):
            lost.layer(0)


def test_a_second_pass_over_released_layers_is_read_ahead_too() -> None:
    """As of a prompt behind its question's pass: read one by one, it would wait for each layer."""
    plan, source = planned()
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as loader:
        for _ in range(2):
            source.calls.clear()
            source.threads.clear()
            for index in range(len(LAYOUT.layers)):
                loader.layer(index)
                loader.release(index)
            assert all(name.startswith("cacheblend-loader") for name in source.threads)
            loader.rewind()
