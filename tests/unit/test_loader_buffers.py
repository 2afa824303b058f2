"""The loader's buffers: which records fill them, at which positions, and engines' caches in their place."""

import threading
from typing import Any

import pytest
import torch

from cacheblend.core.kernels import kv_placement
from cacheblend.core.kernels.kv_placement import ROWS_AT_ONCE
from cacheblend.core.kernels.rope import Turn, reposition_keys, turn_by
from cacheblend.core.load import loader as loader_module
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.plan.blocks import EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import RESIDENT, Source
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from loader_sources import BOS, FULL, LAYOUT, ROOT, ROTATIONS, FakeSource, check, planned


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

    monkeypatch.setattr(kv_placement, "reposition_keys", spied)
    plan, source = planned()
    with LayerLoader(plan, source, LAYOUT, ROTATIONS, overlap=overlap) as loader:
        check(plan, source, [loader.layer(i) for i in range(len(LAYOUT.layers))], 0)
    assert moved == {overlap}


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


def test_runs_longer_than_one_turn() -> None:
    """More moved rows in a row than are re-positioned at once."""
    big = Planner(ROOT, Anchor("bos", BOS), block_size=1500)
    prompt = Prompt.of([text([BOS, 7]), *(chunk([9 + i] * 3001) for i in range(2)), text([2])])
    source = FakeSource(big.plan(prompt, EmptySource()))
    plan = big.plan(prompt, source).without([big.plan(prompt, source).spans[0].name])
    assert sum(len(s) for s in plan.spans if s.source is Source.LOADED) > ROWS_AT_ONCE
    with LayerLoader(plan, source, LAYOUT, ROTATIONS) as loader:
        check(plan, source, [loader.layer(i) for i in range(4)], 0)


# ---- an engine's cache ------------------------------------------------------------------------------------


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
