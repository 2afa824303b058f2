"""The loader over a source whose records say where they came from."""

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.kernels import placing
from cacheblend.core.kernels.placing import ROWS_AT_ONCE
from cacheblend.core.kernels.rope import KeyRotation, Turn, reposition_keys, turn_by
from cacheblend.core.load import loader as loader_module
from cacheblend.core.load import read_size
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.load.read_size import AT_ONCE, AT_ONCE_TO_DEVICE, ReadSize
from cacheblend.core.load.staging import Lease, StagingMemory
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.naming import BlockName, root_name
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


class FakeSource:
    """Random records, the same for the same block and layer."""

    def __init__(self, plan: BlendPlan, lost: Sequence[tuple[BlockName, int]] = (), delay_s: float = 0.0) -> None:
        self.held = {s.name: plan.prompt.token_ids[s.start : s.stop] for s in plan.spans[: len(plan.spans) - 1]}
        self.lost, self.delay_s = set(lost), delay_s
        self.reads: list[tuple[BlockName, int]] = []
        self.threads: set[str] = set()

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [BlockEntry(self.held[n], LAYOUT, "memory") if n in self.held else None for n in names]

    def record(self, name: BlockName, layer: int) -> torch.Tensor:
        shape = LAYOUT.layers[layer]
        generator = torch.Generator().manual_seed(int.from_bytes(name[:6], "little") + layer)
        return torch.randn(shape.kv_heads, 2, len(self.held[name]), shape.head_dim, generator=generator)

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay_s * len(names) * len(layers))
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


def planned(drop: int | None = None) -> tuple[BlendPlan, FakeSource]:
    """BOS | A (exact) | text | B | C | B | question; `drop` takes one span out of the store."""
    a, b, c = chunk(range(10, 16)), chunk(range(20, 29)), chunk(range(30, 33))
    prompt = Prompt.of([text([BOS]), a, text([2, 3]), b, c, b, text([4, 5])])
    names = PLANNER.plan(prompt, FakeSource(PLANNER.plan(prompt, EmptySource())))
    source = FakeSource(names)
    for span in names.spans:
        if names.prompt.segments[span.segment].is_chunk is False and span.start:
            source.held.pop(span.name, None)
    if drop is not None:
        source.held.pop(names.spans[drop].name)
    return PLANNER.plan(prompt, source), source


def check(plan: BlendPlan, source: FakeSource, loaded: Sequence[tuple[torch.Tensor, torch.Tensor]], first: int) -> None:
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
    monkeypatch.setattr(read_size, "MOMENT_S", 0.0)


@pytest.mark.parametrize("moment_s", [0.0, 1e9])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("read_ahead", [0, 1, 3, 100])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_buffers_are_filled_in_any_order_of_reading(
    read_ahead: int, first: int, overlap: bool, moment_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_size, "MOMENT_S", moment_s)
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


def deep_plan(layers: int) -> tuple[KVLayout, BlendPlan]:
    """A chunk of 4 tokens behind another one that misses, in a model of so many layers."""
    layout = KVLayout((LayerShape(2, 8),) * layers, torch.float32)
    plan, source = planned()
    kept = [span.name for span in plan.spans if span.source is Source.LOADED]
    source.held = {name: ids for name, ids in source.held.items() if name in kept}
    return layout, PLANNER.plan(plan.prompt, source)


class CountingSource:
    """Zeros; notes which layers each call asked for."""

    def __init__(self, plan: BlendPlan) -> None:
        self.tokens = {span.name: len(span) for span in plan.spans}
        self.calls: list[range] = []

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        self.calls.append(layers)
        return [[torch.zeros(2, 2, self.tokens[name], 8) for _ in layers] for name in names]


@pytest.mark.parametrize("overlap", [False, True])
def test_fast_reads_grow_and_slow_ones_do_not(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is read once, with those behind it; never across the layer from which on chunks are read."""
    layout, plan = deep_plan(30)
    for moment_s, together in ((1e9, [1, 2, 4, 8, 13]), (0.0, [1] * 28)):
        monkeypatch.setattr(read_size, "MOMENT_S", moment_s)
        source = CountingSource(plan)
        options = {"first_reused_layer": 2, "read_ahead": 1, "overlap": overlap}
        with LayerLoader(plan, source, layout, [None] * 30, **options) as loader:
            for index in range(30):
                loader.layer(index)
                while loader._pending and not loader._pending[max(loader._pending)].done():
                    time.sleep(0.001)
        assert [layer for call in source.calls for layer in call] == list(range(2, 30))
        assert [len(call) for call in source.calls] == together


@pytest.mark.parametrize("overlap", [False, True])
def test_a_released_layer_is_freed_before_the_others_that_were_read_with_it(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_size, "MOMENT_S", 1e9)
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


def test_large_records_are_read_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_size, "MOMENT_S", 1e9)
    layout, plan = deep_plan(12)
    for at_once, most in ((1, 1), (3 * 2 * 2 * 4 * 8 * 4, 3)):  # bytes of a block of 4 tokens in as many layers
        monkeypatch.setattr(loader_module, "AT_ONCE", at_once)
        source = CountingSource(plan)
        with LayerLoader(plan, source, layout, [None] * 12) as loader:
            for index in range(12):
                loader.layer(index)
        assert max(len(call) for call in source.calls) == most


@pytest.mark.parametrize("inference_mode", [False, True])
def test_another_thread_fills_buffers_that_were_made_in_inference_mode(inference_mode: bool) -> None:
    """As in vLLM; torch lets nobody outside of that mode write to them."""
    plan, source = planned()
    with torch.inference_mode(inference_mode), LayerLoader(plan, source, LAYOUT, ROTATIONS, overlap=True) as loader:
        check(plan, source, [loader.layer(i) for i in range(len(LAYOUT.layers))], 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_keys_move_in_the_thread_that_has_the_processor_for_it(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: set[bool] = set()

    def spied(keys: torch.Tensor, turn: Turn) -> torch.Tensor:
        moved.add(threading.current_thread().name in source.threads)
        return reposition_keys(keys, turn)

    monkeypatch.setattr(placing, "reposition_keys", spied)
    plan, source = planned()
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, overlap=overlap) as loader:
        check(plan, source, [loader.layer(i) for i in range(len(LAYOUT.layers))], 0)
    assert moved == {overlap}


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


@pytest.mark.parametrize(("read_ahead", "overlap"), [(0, False), (2, False), (2, True)])
def test_a_layer_is_given_again_as_it_stands(read_ahead: int, overlap: bool) -> None:
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


@pytest.mark.parametrize(("read_ahead", "overlap"), [(0, False), (2, False), (2, True)])
def test_what_an_engine_holds_itself_is_taken_from_there(read_ahead: int, overlap: bool) -> None:
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
                assert torch.equal(part[:, 5:], wanted[:, 5:])
    assert RESIDENT not in {name for name, _ in source.reads}
    assert {name for name, _ in source.reads} < {span.name for span in plan.spans}
    lost = held.without("all")
    with LayerLoader(lost, source, LAYOUT, ROTATIONS, resident=rows.__getitem__, **options) as loader:
        assert not loader.layer(0).keys.any()


def test_a_repeated_chunk_moves_to_each_of_its_places() -> None:
    plan, source = planned()
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as loader:
        keys, values = loader.layer(0)
    one, other = ([s for s in plan.spans if s.segment == i] for i in (3, 5))
    assert [s.name for s in one] == [s.name for s in other]
    first, again = (slice(spans[0].start, spans[-1].stop) for spans in (one, other))
    assert torch.equal(values[:, first], values[:, again])
    distance = torch.full((9,), other[0].start - one[0].start)
    torch.testing.assert_close(
        reposition_keys(keys[:, first], turn_by(FULL, distance)), keys[:, again], rtol=0, atol=1e-5
    )


def test_misses_are_not_read() -> None:
    plan, source = planned(drop=5)
    assert [s.source for s in plan.spans if s.segment == 3] == [Source.LOADED, Source.MISS, Source.LOADED]
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=0) as loader:
        check(plan, source, [loader.layer(i) for i in range(4)], 0)


def test_a_rank_reads_its_heads() -> None:
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


def test_runs_longer_than_one_turn() -> None:
    """More moved rows in a row than are re-positioned at once."""
    big = Planner(ROOT, Anchor("bos", BOS), block_size=1500)
    prompt = Prompt.of([text([BOS, 7]), *(chunk([9 + i] * 3001) for i in range(2)), text([2])])
    source = FakeSource(big.plan(prompt, EmptySource()))
    plan = big.plan(prompt, source).without([big.plan(prompt, source).spans[0].name])
    assert sum(len(s) for s in plan.spans if s.source is Source.LOADED) > ROWS_AT_ONCE
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as loader:
        check(plan, source, [loader.layer(i) for i in range(4)], 0)


class GatedSource(FakeSource):
    """Reads of a layer hang until its gate is open."""

    def __init__(self, plan: BlendPlan) -> None:
        super().__init__(plan)
        self.gates = [threading.Event() for _ in LAYOUT.layers]

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        self.gates[layers[-1]].wait()
        return super().read_layers(names, layers, heads, memory)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_is_ready_once_it_is_read(overlap: bool) -> None:
    plan, _ = planned()
    source = GatedSource(plan)
    pool = DaemonPool(1, "test-reader")
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, threads=pool, overlap=overlap) as loader:
        for layer, gate in enumerate(source.gates):
            assert not loader.is_ready(layer)
            gate.set()
            awaited = loader.awaited(layer)
            if awaited is not None:
                awaited.result()
            assert loader.is_ready(layer)
        loaded = [loader.layer(layer) for layer in range(4)]
        assert loader.is_ready(0)  # given already
    check(plan, source, loaded, 0)
    assert all(name.startswith("test-reader") for name in source.threads)
    assert set(loader.read_s) == {"memory"}


def test_layers_without_records_are_ready_at_once() -> None:
    plan, source = planned()
    nothing_exact = plan.without([span.name for span in plan.spans if span.source is Source.PREFIX])
    with LayerLoader(
        nothing_exact, GatedSource(plan), LAYOUT, ROTATIONS, first_reused_layer=2, threads=DaemonPool(1, "t")
    ) as loader:
        assert loader.is_ready(0)
        loader.layer(0)
        assert loader.is_ready(1)
        assert not loader.is_ready(2)
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, read_ahead=0) as loader:
        assert loader.is_ready(0)  # reads in the caller's thread


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


class _Elsewhere:
    """An engine's cache: a layer's place is a `LayerKV` that is full of other numbers."""

    def __init__(self, rows: int) -> None:
        self.layers = [
            LayerKV(*torch.full((2, shape.kv_heads, rows, shape.head_dim), 9.0).unbind()) for shape in LAYOUT.layers
        ]

    @property
    def is_untouched(self) -> bool:
        return all(bool((part == 9.0).all()) for kv in self.layers for part in kv)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("first", [0, 3])
def test_records_are_placed_in_an_engines_cache_and_nothing_else_is(
    read_ahead: int, first: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, source = planned()
    cache = _Elsewhere(len(plan))
    monkeypatch.setattr(LayerLoader, "_buffers", None)
    options: dict[str, Any] = {"first_reused_layer": first, "read_ahead": read_ahead, "overlap": overlap}
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, caches=cache.layers.__getitem__, **options) as loader:
        found = [loader.layer(index) for index in range(len(LAYOUT.layers))]
        assert all(one is other for one, other in zip(found, cache.layers, strict=True))
    check(plan, source, cache.layers, first)
    for layer, kv in enumerate(cache.layers):
        for span in plan.spans:
            if not (span.source is Source.PREFIX or (span.source is Source.LOADED and layer >= first)):
                assert bool((kv.keys[:, span.start : span.stop] == 9.0).all())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loader_that_was_closed_writes_to_no_engines_cache(overlap: bool) -> None:
    """Its blocks may be another request's by then; what is read ahead is only placed by who asks for the layer."""
    plan, source = planned()
    begun, gate, cache = threading.Event(), threading.Event(), _Elsewhere(len(plan))
    real = source.read_layers

    def held(*args: Any) -> Any:
        begun.set()
        gate.wait(30)
        return real(*args)

    source.read_layers = held  # type: ignore[method-assign]
    threads = DaemonPool(2, "readers")
    options: dict[str, Any] = {"overlap": overlap, "threads": threads, "read_ahead": 3}
    loader = LayerLoader(plan, source, LAYOUT, ROTATIONS, caches=cache.layers.__getitem__, **options)
    assert loader.awaited(0) is not None
    assert begun.wait(30)
    loader.close()
    gate.set()
    threads.close()
    threads.join()
    assert source.reads and cache.is_untouched


def test_a_device_is_given_more_of_a_block_at_once() -> None:
    """Records of a MiB: one layer a read on the host, and eight where they are copied to a device afterwards."""
    layout = KVLayout((LayerShape(8, 128),) * 32, torch.bfloat16)
    found = []
    for at_once in (AT_ONCE, AT_ONCE_TO_DEVICE):
        size = ReadSize(layout, 256, at_once)
        for _ in range(5):
            size.learn(size.layers, 0.0)
        found.append(size.layers)
    assert found == [1, 8]
