"""Blends in vLLM's own paged cache: the rows of a blend in buffers, and nobody else's blocks touched."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.errors import BlockLostError, CacheBlendError
from cacheblend.core.fuse import rows
from cacheblend.core.kernels import operations
from cacheblend.core.kernels.attention_spec import HeadShape
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows
from cacheblend.engines.vllm.worker import paged_kv, prefill_factory
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer, RequestBlocks
from cacheblend.engines.vllm.worker.paged_kv import PagedKV, open_pages
from cacheblend.engines.vllm.worker.ranks import Ranks
from campaign import rotating
from paged_scenes import LAYOUTS, NOTHING, OTHERS, OWN, SPECS, Scene, serve_triton
from read_counting import CountReads

SELECTORS = {
    "none": NoRows(),
    "hkvd": Hkvd((1,), (0.3,)),
    "gradual": Hkvd((1, 2), (0.4, 0.1)),
    "query": Query(0.3),
    "hops": Query(0.3, words=1.0, hops=2),
    "hybrid": Hybrid((1, 2), (0.3, 0.1), early=0.6),
    "all": AllRows(),
}
MORE = [7, 13, 16, 18, 20]

EACH = (("flash", "plain"), ("keys transposed", "window"), ("flash", "cap"), ("keys transposed", "sinks"))
"""Each layout and each way to attend, which every run draws: our kernels take their time under the interpreter."""


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels serve CPUs, under the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    serve_triton(monkeypatch.setattr, operations.ATTEND_ROWS, operations.PLACE, operations.KV_DEVIATION)


def compare(dense: Any, paged: Any, tolerance: float, *, held: int = 0, selector: str = "hkvd") -> None:
    """Runs the same job both ways on equal caches; `held`: leading rows that vLLM's cache has already."""
    for one in (dense, paged):
        if held:  # computed by an earlier request, and shared with others
            one.blend(one.job(OWN, source=NOTHING))
    shared = OWN[: held // 16]
    before = paged.bytes_of([*OTHERS, *shared])
    results = [one.blend(one.job(OWN, held, SELECTORS[selector])) for one in (dense, paged)]
    assert results[0].report.recomputed_tokens == results[1].report.recomputed_tokens
    assert results[0].report.fallbacks == results[1].report.fallbacks == []
    for found, expected in zip(paged.rows(OWN), dense.rows(OWN), strict=True):
        assert float((found.float() - expected.float()).abs().max()) <= tolerance
    for now, then in zip(paged.bytes_of([*OTHERS, *shared]), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("held", [0, 32, 80])
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_blend_in_pages_is_that_in_buffers(selector: str, held: int) -> None:
    """Whatever selects, and however much of the prompt vLLM holds (its text only, or some of a chunk)."""
    compare(Scene(in_pages=False), Scene(in_pages=True), 1e-5, held=held, selector=selector)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(("layout", "spec"), rotating(product(LAYOUTS, SPECS), EACH))
def test_by_our_kernels_with_windows_caps_and_sinks_over_any_layout(layout: str, spec: str) -> None:
    dense = Scene(layout=layout, in_pages=False, spec=spec)
    assert operations.ATTEND_ROWS.on(torch.device("cpu"), torch.float32).is_kernel
    compare(dense, Scene(layout=layout, in_pages=True, spec=spec), 2e-5, held=32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(("selector", "codec"), [("hybrid", "raw"), ("hkvd", "int8"), ("gradual", "int4")])
def test_by_our_kernels_in_bfloat16_with_codecs_and_the_question(selector: str, codec: str) -> None:
    how = {"dtype": torch.bfloat16, "codec": codec}
    compare(Scene(in_pages=False, **how), Scene(in_pages=True, **how), 0.07, selector=selector)


def test_pages_need_neither_buffers_nor_a_copy_of_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Scene(in_pages=True)

    def never(*_: Any) -> Any:
        raise AssertionError("gathered, or buffered")

    monkeypatch.setattr(PagedLayer, "read", never)
    monkeypatch.setattr(LayerLoader, "_buffers", never)
    for selector in SELECTORS.values():
        assert paged.blend(paged.job(OWN, 32, selector)).report.fallbacks == []


def test_a_layer_is_read_once_where_the_question_is_asked() -> None:
    """The question's pass leaves it in the cache; buffers are freed, and filled again."""
    reads = []
    for in_pages in (False, True):
        one, layers_read = Scene(in_pages=in_pages), list[int]()
        one.opener._store = Counting(one.store, layers_read)
        one.blend(one.job(OWN, selector=SELECTORS["query"]))
        reads.append(sum(layers_read))
    assert reads[0] == 2 * reads[1] > 0


class Counting:
    """The store; `seen` gets how many layers each call reads."""

    def __init__(self, store: Any, seen: list[int]) -> None:
        self._store, self._seen = store, seen

    def read_layers(self, names: Any, layers: range, *rest: Any) -> Any:
        self._seen.append(len(layers))
        return self._store.read_layers(names, layers, *rest)

    def round_trip_s(self, tier: str) -> float:
        return 0.0


class Losing:
    """The store, which loses one block at a layer, as often as it is told."""

    def __init__(self, store: Any, layer: int, times: int) -> None:
        self._store, self._layer, self._times = store, layer, times

    def find(self, names: Any) -> Any:
        return self._store.find(names)

    def read_layers(self, names: Any, layers: range, *rest: Any) -> Any:
        found = self._store.read_layers(names, layers, *rest)
        if self._layer in layers and self._times:
            self._times -= 1
            found[0] = BlockLostError([names[0]], "gone")
        return found

    def round_trip_s(self, tier: str) -> float:
        return 0.0


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("held", [0, 32])
@pytest.mark.parametrize(("layer", "times"), [(1, 1), (3, 1), (3, 2), (2, 3)])
def test_lost_blocks_restart_the_prefill_in_the_same_pages(layer: int, times: int, held: int) -> None:
    """Once, and then all is computed: the held rows too, which stay as they are."""
    dense, paged = Scene(in_pages=False), Scene(in_pages=True)
    fallbacks = []
    for one in (dense, paged):
        one.blend(one.job(OWN, source=NOTHING))
        one.opener._store = Losing(one.store, layer, times)
    before = paged.bytes_of([*OTHERS, *OWN[: held // 16]])
    for one in (dense, paged):
        fallbacks.append(one.blend(one.job(OWN, held, SELECTORS["hkvd"])).report.fallbacks)
    assert fallbacks[0] == fallbacks[1] != []
    for found, expected in zip(paged.rows(OWN), dense.rows(OWN), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)
    for now, then in zip(paged.bytes_of([*OTHERS, *OWN[: held // 16]]), before, strict=True):
        assert torch.equal(now, then)


def test_a_prompt_that_is_given_up_writes_nothing_more_and_can_begin_in_other_blocks() -> None:
    """As when a request is preempted: its blocks are another's then."""
    dense, paged = Scene(in_pages=False), Scene(in_pages=True)
    given_up = paged.opener.blend(paged.job(OWN, selector=SELECTORS["hkvd"]))
    given_up.advance(2)
    given_up.close()
    before = paged.bytes_of([*OWN, *OTHERS])
    other = [*MORE, *OWN[:10]][::-1]
    untouched = [block for block in OWN if block not in other]
    paged.blend(paged.job(other, selector=SELECTORS["hkvd"]))
    dense.blend(dense.job(other, selector=SELECTORS["hkvd"]))
    for found, expected in zip(paged.rows(other), dense.rows(other), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)
    kept = [[*OWN, *OTHERS].index(block) for block in [*untouched, *OTHERS]]
    for now, then in zip(paged.bytes_of([*untouched, *OTHERS]), before, strict=True):
        blocks = [slice(16 * at, 16 * at + 16) for at in kept]
        assert torch.equal(now, torch.cat([then[:, :, at] for at in blocks], dim=2))


def test_no_record_is_placed_in_a_shared_block() -> None:
    paged = Scene(in_pages=True)
    kv = PagedKV(paged.opener._paged[0], paged.opener._pages[0], RequestBlocks.of(OWN, 32, 100, 16))
    record = torch.randn(2, 2, 20, 16)
    kv.place([record], Placement([Piece(0, 20, 0, 32, 20)]))
    with pytest.raises(CacheBlendError, match="placed at row 31; rows up to 32 are shared"):
        kv.place([record], Placement([Piece(0, 20, 0, 31, 20)]))
    assert torch.equal(kv.rows(torch.arange(32, 52)).keys, record[:, 0])
    assert kv.keys.shape == kv.values.shape == (2, 100, 16)


def test_blocks_that_a_window_has_passed_keep_a_prompt_in_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The null block stands for all of them."""
    dense, paged = Scene(in_pages=False, spec="window"), Scene(in_pages=True, spec="window")
    monkeypatch.setattr(PagedKV, "write", None)
    blocks = [0, 0, *OWN[2:]]
    for one in (dense, paged):
        one.blend(one.job(blocks, held=32, selector=SELECTORS["hkvd"]))
    table = torch.tensor(OWN[2:])
    for one, other in zip(dense.opener._paged, paged.opener._paged, strict=True):
        assert torch.equal(one.read(table, 200), other.read(table, 200))


def test_who_decides_whether_pages_are_used(caplog: pytest.LogCaptureFixture) -> None:
    opener = Scene(in_pages=None).opener
    assert opener._pages is None  # on a CPU nobody asked for them
    model, alone = opener._model, Ranks(SimpleNamespace(size=1, rank=0))  # type: ignore[arg-type]
    what = opener._paged, model.head_shapes
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert open_pages(*what, cpu, torch.float32, alone, wanted=False) is None
    assert open_pages(*what, cpu, torch.float32, alone, wanted=True) is not None
    assert not caplog.records
    assert open_pages(*what, cpu, torch.bfloat16, alone, wanted=True) is None
    assert "has the type torch.float32, and the model torch.bfloat16" in caplog.text
    assert open_pages(*what, cuda, torch.float64, alone, wanted=None) is None  # what no kernel is made for
    assert "no kernel serves HeadShape" in caplog.text

    class Other:
        size, rank = 2, 0

        def maximum(self, values: list[int]) -> list[int]:
            return [max(each, 1) for each in values]

    assert open_pages(*what, cpu, torch.float32, Ranks(Other()), wanted=True) is None  # type: ignore[arg-type]
    assert "another rank does" in caplog.text


def test_an_opener_has_its_kernels_checked_in_the_models_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its first request."""
    asked: list[Any] = []
    monkeypatch.setattr(prefill_factory, "serve", lambda *args, **options: asked.append(args))
    Scene(in_pages=None, spec="window")
    ((device, dtype, shapes),) = asked
    assert (device, dtype, set(shapes)) == (torch.device("cpu"), torch.float32, {HeadShape(4, 2, 16, 40)})


@pytest.mark.parametrize("held", [0, 32])
def test_no_layer_in_pages_waits_for_the_device(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is where the embedded engine waits too: nothing is added by blocks, slots or what vLLM holds."""
    paged = Scene(in_pages=True)
    written: list[Any] = []
    # A device's kernels and its backend wait for nothing; the stand-ins here do.
    monkeypatch.setattr(paged_kv, "attend_rows", lambda query, *_: query.transpose(0, 1).contiguous())
    monkeypatch.setattr(paged_kv, "place", lambda *_: None)
    monkeypatch.setattr(rows, "_is_on_host", lambda tensor: False)  # as on a device, where its order is not checked
    monkeypatch.setattr(PagedLayer, "write", lambda self, keys, values, slots: written.append(slots))
    job = paged.job(OWN, held, Hkvd((1,), (0.3,)))
    with CountReads() as counted, paged.opener.blend(job) as prefill:
        before = len(counted.calls)
        prefill.advance(4)
    assert prefill.done and written
    assert counted.calls[before:] == []
