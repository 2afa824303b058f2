"""Blends in vLLM's own paged cache, without an engine: the rows are those in buffers, and nobody else's are touched.

Also where that cache is FP8: rows just computed and rows that were placed, in one layer; requests that share blocks
with it; a cache of another kind than its name says; scales that differ; a backend that rounds to the nearest or cuts
bits off; a layer that is not FP8 beside some that are; a kernel that is not there, or is wrong.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged_scenes
from cacheblend.core.errors import BlockLostError, CacheBlendError, ModelNotBlendableError
from cacheblend.core.fuse import rows
from cacheblend.core.kernels import operations
from cacheblend.core.kernels.attention import HeadShape, attend_rows
from cacheblend.core.kernels.float8 import Float8
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import PLAIN, Served
from cacheblend.core.load import layer_kv
from cacheblend.core.load.capture import ChunkJob, blocks_of
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Corrected, Head, Hkvd, NoRows
from cacheblend.engines.vllm import workspace
from cacheblend.engines.vllm.jobs import CaptureJob
from cacheblend.engines.vllm.worker import paged_kv, prefill_factory
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer, RequestBlocks
from cacheblend.engines.vllm.worker.paged_kv import PagedKV, open_pages
from cacheblend.engines.vllm.worker.ranks import Ranks
from cacheblend.engines.vllm.workspace import HELD_COPIES, ModelSizes, workspace_of
from campaign import rotating
from paged_scenes import LAYERS, LAYOUTS, NOTHING, OTHERS, OWN, SPECS, Fp8, Scene, caches_of, serve_triton
from read_counting import CountReads

SELECTORS = {
    "none": NoRows(),
    "hkvd": Hkvd((1,), (0.3,)),
    "gradual": Hkvd((1, 2), (0.4, 0.1)),
    "query": Query(0.3),
    "hops": Query(0.3, words=1.0, hops=2),
    "hybrid": Hybrid((1, 2), (0.3, 0.1), early=0.6),
    "all": AllRows(),
    "corrected": Corrected(Head(0.3), 0.5),
}
MORE = [7, 13, 16, 18, 20]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Ranks(SimpleNamespace(size=1, rank=0))  # type: ignore[arg-type]

EACH = (("flash", "plain"), ("keys transposed", "window"), ("flash", "cap"), ("keys transposed", "sinks"))
"""Each layout and each way to attend, which every run draws: our kernels take their time under the interpreter."""


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels serve CPUs, under the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    serve_triton(monkeypatch.setattr)


@contextmanager
def untouched(scene: Scene, blocks: Sequence[int]) -> Iterator[None]:
    """Nothing in these blocks changes meanwhile."""
    before = scene.bytes_of(blocks)
    yield
    for now, then in zip(scene.bytes_of(blocks), before, strict=True):
        assert torch.equal(now, then)


def check_rows(found: Scene, right: Scene, tolerance: float = 1e-5, blocks: Sequence[int] = OWN) -> None:
    for mine, its in zip(found.rows(blocks), right.rows(blocks), strict=True):
        assert float((mine.float() - its.float()).abs().max()) <= tolerance


def compare(dense: Scene, paged: Scene, tolerance: float = 1e-5, *, held: int = 0, selector: str = "hkvd") -> None:
    """Runs the same job both ways on equal caches; `held`: leading rows that vLLM's cache has already."""
    for one in (dense, paged):
        if held:  # computed by an earlier request, and shared with others
            one.blend(one.job(OWN, source=NOTHING))
    with untouched(paged, [*OTHERS, *OWN[: held // 16]]):
        results = [one.blend(one.job(OWN, held, SELECTORS[selector])) for one in (dense, paged)]
    assert results[0].report.recomputed_tokens == results[1].report.recomputed_tokens
    assert results[0].report.fallbacks == results[1].report.fallbacks == []
    check_rows(paged, dense, tolerance)


@pytest.mark.parametrize("held", [0, 32, 80])
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_blend_in_pages_is_that_in_buffers(selector: str, held: int) -> None:
    """Whatever selects, and however much of the prompt vLLM holds (its text only, or some of a chunk)."""
    compare(Scene(in_pages=False), Scene(in_pages=True), held=held, selector=selector)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(("layout", "spec"), rotating(product(LAYOUTS, SPECS), EACH))
def test_by_our_kernels_with_windows_caps_and_sinks_over_any_layout(layout: str, spec: str) -> None:
    dense = Scene(layout=layout, in_pages=False, spec=spec)
    assert operations.ATTEND_ROWS.on(CPU, torch.float32).is_kernel
    compare(dense, Scene(layout=layout, in_pages=True, spec=spec), 2e-5, held=32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(("selector", "codec"), [("hybrid", "raw"), ("hkvd", "int8"), ("gradual", "int4")])
def test_by_our_kernels_in_bfloat16_with_codecs_and_the_question(selector: str, codec: str) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "codec": codec}
    compare(Scene(in_pages=False, **how), Scene(in_pages=True, **how), 0.07, selector=selector)


class Faulty:
    """A store that counts the layers it reads, and loses one block at a layer as often as it is told."""

    def __init__(self, store: Any, layer: int = -1, times: int = 0) -> None:
        self._store, self._layer, self._times, self.layers_read = store, layer, times, 0

    def find(self, names: Any) -> Any:
        return self._store.find(names)

    def read_layers(self, names: Any, layers: range, *rest: Any) -> Any:
        self.layers_read += len(layers)
        found = self._store.read_layers(names, layers, *rest)
        if self._layer in layers and self._times:
            self._times -= 1
            found[0] = BlockLostError([names[0]], "gone")
        return found

    def round_trip_s(self, tier: str) -> float:
        return 0.0


def test_pages_need_neither_buffers_nor_a_copy_of_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a layer is read once where the question is asked: its pass leaves it in the cache; buffers are freed, and
    filled again."""
    reads = []
    for in_pages in (False, True):
        one = Scene(in_pages=in_pages)
        one.opener.store = counting = Faulty(one.store)  # type: ignore[assignment]
        one.blend(one.job(OWN, selector=SELECTORS["query"]))
        reads.append(counting.layers_read)
    assert reads[0] == 2 * reads[1] > 0
    monkeypatch.setattr(PagedLayer, "read", None)
    monkeypatch.setattr(LayerLoader, "_buffers", None)
    for selector in SELECTORS.values():
        assert one.blend(one.job(OWN, 32, selector)).report.fallbacks == []


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("held", [0, 32])
@pytest.mark.parametrize(("layer", "times"), [(1, 1), (3, 1), (3, 2), (2, 3)])
def test_lost_blocks_restart_the_prefill_in_the_same_pages(layer: int, times: int, held: int) -> None:
    """Once, and then all is computed: the held rows too, which stay as they are."""
    dense, paged = Scene(in_pages=False), Scene(in_pages=True)
    for one in (dense, paged):
        one.blend(one.job(OWN, source=NOTHING))
        one.opener.store = Faulty(one.store, layer, times)  # type: ignore[assignment]
    with untouched(paged, [*OTHERS, *OWN[: held // 16]]):
        fallbacks = [one.blend(one.job(OWN, held, SELECTORS["hkvd"])).report.fallbacks for one in (dense, paged)]
    assert fallbacks[0] == fallbacks[1] != []
    check_rows(paged, dense)


def test_a_prompt_that_is_given_up_writes_nothing_more_and_can_begin_in_other_blocks() -> None:
    """As when a request is preempted: its blocks are another's then."""
    dense, paged = Scene(in_pages=False), Scene(in_pages=True)
    given_up = paged.opener.blend(paged.job(OWN, selector=SELECTORS["hkvd"]))
    given_up.advance(2)
    given_up.close()
    other = [*MORE, *OWN[:10]][::-1]
    with untouched(paged, [*(block for block in OWN if block not in other), *OTHERS]):
        paged.blend(paged.job(other, selector=SELECTORS["hkvd"]))
    dense.blend(dense.job(other, selector=SELECTORS["hkvd"]))
    check_rows(paged, dense, blocks=other)


def test_no_record_is_placed_in_a_shared_block() -> None:
    paged = Scene(in_pages=True)
    kv = PagedKV(paged.opener._paged[0], paged.opener._pages[0], RequestBlocks.of(OWN, 32, 100, 16))  # type: ignore[index]
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
    what = opener._paged, opener.model.head_shapes
    assert open_pages(*what, CPU, torch.float32, ALONE, wanted=False) is None
    assert open_pages(*what, CPU, torch.float32, ALONE, wanted=True) is not None
    assert not caplog.records
    assert open_pages(*what, CPU, torch.bfloat16, ALONE, wanted=True) is None
    assert "has the type torch.float32, and the model torch.bfloat16" in caplog.text
    assert open_pages(*what, CUDA, torch.float64, ALONE, wanted=None) is None  # what no kernel is made for
    assert "no kernel serves HeadShape" in caplog.text
    refusing = SimpleNamespace(size=2, rank=0, maximum=lambda values: [max(each, 1) for each in values])
    assert open_pages(*what, CPU, torch.float32, Ranks(refusing), wanted=True) is None  # type: ignore[arg-type]
    assert "another rank does" in caplog.text


def test_an_opener_has_its_kernels_checked_in_the_models_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its first request."""
    asked: list[Any] = []
    monkeypatch.setattr(
        prefill_factory, "serve", lambda *args, **options: asked.append((*args[:2], dict(args[2]), options))
    )
    Scene(in_pages=None, spec="window")
    ((device, dtype, layers, options),) = asked
    assert (device, dtype, set(layers)) == (CPU, torch.float32, {HeadShape(4, 2, 16, 40)})
    assert None not in layers.values() and options == {"page": 16, "float8": False}


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


# ---- FP8 caches, beside the definition -----------------------------------------------------------------------------

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CACHES = {
    "e4m3": Fp8(),
    "scales": Fp8(scales=(0.037, 0.3)),
    "e5m2": Fp8(E5M2, "fp8_e5m2", (1.0, 0.61)),
    "cut": Fp8(is_cut=True, scales=(0.3, 1.7)),
    "other than its name": Fp8(E4M3, "fp8_e5m2"),
}


class Rounded(LayerKV):
    """The definition: buffers of the prompt's length, every number of which is rounded as it comes.

    Rows just computed are rounded as the backend does, placed ones to the nearest, and rows that are compared like
    those that were placed.
    """

    fp8: Fp8

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().write(positions, self.fp8.kept(0, keys), self.fp8.kept(1, values))

    def place(self, records: Any, placement: Any, rotation: Any = None) -> None:
        super().place(records, placement, rotation)
        nearest = self.fp8._replace(is_cut=False)
        for piece in placement.pieces:
            for number, part in enumerate(self):
                part[:, piece.start : piece.stop] = nearest.kept(number, part[:, piece.start : piece.stop])

    def deviation(self, fresh: Any, measure: Any, positions: torch.Tensor) -> torch.Tensor:
        nearest = self.fp8._replace(is_cut=False)
        return super().deviation([nearest.kept(n, part) for n, part in enumerate(fresh)], measure, positions)


def by_definition(scene: Scene, fp8: Fp8, job: Any) -> list[torch.Tensor]:
    """The rows of each layer, [kv_heads, 2, rows, head_dim], after a blend of buffers that are rounded."""
    made: list[Any] = []
    for layer in range(LAYERS):
        own = type("Own", (Rounded,), {"fp8": fp8})
        held = [torch.zeros(2, len(job.plan), 16, dtype=scene.model.dtype) for _ in range(2)]
        if job.local_tokens:
            found = scene.opener._paged[layer].read(torch.tensor(OWN), job.local_tokens)
            for part, known in zip(held, found.unbind(1), strict=True):
                part[:, : job.local_tokens] = known
        made.append(own(*held))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_factory, "PagedKV", lambda layer, pages, blocks: made[scene.opener._paged.index(layer)])
        scene.blend(job)
    return [torch.stack(list(each), dim=1) for each in made]


def check_steps(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor], fp8: Fp8) -> None:
    """The same but where a sum in another order falls on the other side of a step: by how many of the kind's numbers
    two of them differ; those of one sign are in the order of their bytes."""
    ranks = []
    for layers in (found, right):
        parts = [
            Fp8(fp8.kind, scales=fp8.scales).stored(number, part).int().flatten()
            for layer in layers
            for number, part in enumerate(layer.unbind(1))
        ]
        ranks.append(torch.cat([torch.where(part > 127, 128 - part, part) for part in parts]))
    apart = (ranks[0] - ranks[1]).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-3


@pytest.mark.parametrize("held", [0, 32])
@pytest.mark.parametrize("selector", ["none", "hkvd", "all"])
@pytest.mark.parametrize("name", CACHES)
def test_a_blend_in_fp8_pages_is_that_of_the_definition(name: str, selector: str, held: int) -> None:
    """And nobody else's byte changes."""
    fp8 = CACHES[name]
    scene = Scene(in_pages=True, fp8=fp8)
    if held:
        scene.blend(scene.job(OWN, source=NOTHING))
    right = by_definition(scene, fp8, scene.job(OWN, held, SELECTORS[selector]))
    with untouched(scene, [*OTHERS, *OWN[: held // 16]]):
        result = scene.blend(scene.job(OWN, held, SELECTORS[selector]))
    assert result.report.fallbacks == []
    check_steps(scene.rows(OWN), right, fp8)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("layout", ["flash", "keys transposed"])
@pytest.mark.parametrize("name", ["scales", "e5m2"])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_our_kernels_blend_in_fp8_as_pytorch_does(name: str, layout: str, codec: str) -> None:
    scenes = []
    for is_kernel in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            scene = Scene(layout, in_pages=True, fp8=CACHES[name], codec=codec, spec="window")
            if not is_kernel:
                for operation in (operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8):
                    patch.setattr(operation, "_served", {})
            assert operations.ATTEND_FLOAT8.on(CPU, torch.float32).is_kernel == is_kernel
            scene.blend(scene.job(OWN, selector=SELECTORS["hkvd"]))
            scenes.append(scene)
    check_steps(scenes[0].rows(OWN), scenes[1].rows(OWN), CACHES[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["flash", "keys transposed"])
@pytest.mark.parametrize("name", CACHES)
def test_the_kind_and_the_places_are_learnt_by_writing(name: str, layout: str, dtype: torch.dtype) -> None:
    fp8 = CACHES[name]
    layer = Scene(layout, in_pages=True, fp8=fp8, dtype=dtype).opener._paged[1]
    assert layer.float8 == Float8(fp8.kind, dtype, *fp8.scales)
    given = torch.randn(2, 2, 40, 16).to(dtype)
    blocks = RequestBlocks.of([5, 9, 2], 0, 40, 16)
    layer.write(*given, blocks.slots)
    found = layer.read(blocks.table, 40)
    expected = torch.stack([fp8.kept(part, given[part]) for part in range(2)], dim=1)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected.float(), rtol=2**-8, atol=0)


def test_equal_rows_have_no_deviation_and_attention_reads_with_scales() -> None:
    """However large they are; a row that is a step away has one."""
    fp8 = CACHES["scales"]
    opener = Scene(in_pages=True, fp8=fp8).opener
    kv = PagedKV(opener._paged[0], opener._pages[0], RequestBlocks.of(OWN, 0, 60, 16))  # type: ignore[index]
    given = torch.randn(2, 2, 60, 16) * torch.logspace(-3, 1, 60)[:, None]
    kv.place([given.transpose(0, 1).contiguous()], Placement([Piece(0, 60, 0, 0, 60)]))
    at = torch.arange(60)
    assert not kv.deviation(given, "kv", at).any()
    assert (kv.deviation(given * 1.2, "kv", at) > 0).all()
    query, spec = torch.randn(4, 60, 16), opener.model.specs[0]
    expected = attend_rows(query, fp8.kept(0, given[0]), fp8.kept(1, given[1]), at, spec)
    assert torch.allclose(kv.attend(query, at, spec), expected, atol=1e-5)


def test_a_capture_is_the_same_beside_any_cache() -> None:
    """It computes in buffers of its own: so the names of what is stored need not say which cache was there."""
    stored = []
    for fp8 in (None, *CACHES.values()):
        scene = Scene(in_pages=True, fp8=fp8)
        names = [span.name for span in scene.job(OWN).plan.spans if span.source is Source.LOADED]
        stored.append(scene.store.read_layers(names, range(LAYERS)))
    assert len(stored[0]) > 3
    for records in stored[1:]:
        for found, expected in zip(records, stored[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_pages_rows_are_rounded_once_as_they_are_copied() -> None:
    fp8 = CACHES["cut"]
    scene, plain = Scene(in_pages=False, fp8=fp8), Scene(in_pages=False)
    for one in (scene, plain):
        one.blend(one.job(OWN, selector=NoRows()))
    for found, exact in zip(scene.rows(OWN), plain.rows(OWN), strict=True):
        expected = torch.stack([fp8.kept(part, rows) for part, rows in enumerate(exact.unbind(1))], dim=1)
        assert torch.equal(found, expected)


def test_layers_of_both_kinds_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--kv-cache-dtype-skip-layers` makes them."""

    def mixed(put: Any, shape: Any, dtype: Any, fp8: Any = None) -> list[Any]:
        plain, eight = caches_of(put, shape, dtype), caches_of(put, shape, dtype, fp8)
        return [plain[0], eight[1], plain[2], eight[3]]

    monkeypatch.setattr(paged_scenes, "caches_of", mixed)
    scene, dense = (Scene(in_pages=in_pages, fp8=CACHES["scales"]) for in_pages in (True, False))
    assert [layer.is_fp8 for layer in scene.opener._paged] == [False, True, False, True]
    for one in (scene, dense):
        one.blend(one.job(OWN, selector=Hkvd((2,), (0.3,))))
    assert torch.allclose(scene.rows(OWN)[0], dense.rows(OWN)[0], atol=1e-5)  # nothing is rounded in front of it


@pytest.mark.parametrize("kind", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_eight_bits_of_another_kind_or_without_the_scale_are_refused_with_the_way_out(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotBlendableError, match=r"eight bits of no known type.*--kv-cache-dtype bfloat16"):
        Scene(in_pages=False, fp8=Fp8(kind))
    stored = Fp8.stored
    monkeypatch.setattr(Fp8, "stored", lambda self, part, rows: stored(self._replace(scales=(1.0, 1.0)), part, rows))
    with pytest.raises(ModelNotBlendableError, match="eight bits of no known type"):
        Scene(in_pages=True, fp8=CACHES["scales"])


def test_pages_need_kernels_for_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for other pages do not help."""
    opener = Scene(in_pages=None, fp8=CACHES["e4m3"]).opener

    def serve(name: str, *which: Any) -> None:
        for operation in which:
            monkeypatch.setattr(operation, "_served", {(CUDA, torch.bfloat16): Served(lambda *_: None, name)})

    serve("Triton", operations.ATTEND_ROWS, operations.PLACE)
    serve(PLAIN, operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8)
    what = opener._paged, opener.model.head_shapes, CUDA, torch.bfloat16, ALONE
    assert open_pages(*what, wanted=None) is None
    serve("Triton", operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8)
    assert open_pages(*what, wanted=None) is not None


# ---- the most memory that a blend takes at a time, against the arithmetic of the workspace -------------------------

ROWS = 234  # of the scene's prompt without its last token
SIZES = ModelSizes(
    layers=LAYERS,
    width=paged_scenes.HIDDEN,
    intermediate=0,
    query_width=paged_scenes.HEADS * paged_scenes.WIDTH,
    kv_width=paged_scenes.KV_HEADS * paged_scenes.WIDTH,
    head_dim=paged_scenes.WIDTH,
    item_bytes=4,
    longest=ROWS,
    tile_rows=48,
)
LAYER = 2 * SIZES.kv_width * ROWS * 4


class Peak(TorchDispatchMode):
    """Bytes of the storages that this thread's operations made and that are alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for each in _tensors(out):
            storage = each.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known.add(key)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
                self.most = max(self.most, self.alive)
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.alive -= nbytes


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for part in value.values() for each in _tensors(part)]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


def test_what_is_counted_is_what_is_alive() -> None:
    with Peak() as peak:
        one = torch.ones(1000)
        two = one + 1
        view = two[10:]
        assert peak.alive == 8000
        del one, two
        assert peak.alive == 4000
        del view
    assert (peak.alive, peak.most) == (0, 8000)


def test_held_rows_are_copied_so_often_and_no_more() -> None:
    paged, table = Scene(in_pages=False).opener._paged[0], torch.tensor(OWN)
    paged.read(table, ROWS)  # the layout is known
    with Peak() as peak:
        paged.read(table, ROWS)
    blocks = 2 * SIZES.kv_width * len(OWN) * paged_scenes.SIZE * 4  # the rows, rounded up to blocks
    assert HELD_COPIES * blocks >= peak.most > 2 * LAYER


@pytest.mark.parametrize("selector", [Hkvd((1,), (0.3,)), Query(0.3)], ids=["hkvd", "question"])
def test_a_blend_takes_no_more_than_its_parts_and_less_in_pages(selector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention apart, which a device's kernel computes; nobody else waits for the store."""
    for module in (layer_kv, paged_kv):
        monkeypatch.setattr(module, "attend_rows", lambda query, *_: query.transpose(0, 1).contiguous())
    monkeypatch.setattr(workspace, "ROWS_OPEN", 0)
    monkeypatch.setattr(workspace, "READ_AHEAD_BYTES", 0)
    weights = 3 * 4 * paged_scenes.HEADS * 12 * ROWS  # of the question's 12 rows at most
    monkeypatch.setattr(workspace, "_WEIGHTS", weights)
    most = {}
    for in_pages in (False, True):
        one = Scene(in_pages=in_pages)
        one.blend(one.job(OWN, 32, selector))  # what is made once is there
        job = one.job(OWN, 32, selector)
        with Peak() as peak:
            one.blend(job)
        counted = workspace_of(replace(SIZES, in_pages=in_pages))
        parts = counted.hidden + counted.layers + counted.held + max(counted.tile, workspace.question_bytes(SIZES))
        assert parts >= peak.most > parts // 5
        most[in_pages] = peak.most
    assert most[False] - most[True] >= LAYER


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_section_of_a_history_takes_no_more_than_what_is_reserved(
    in_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short section behind a long prefix; as it is computed, so without what copies it to the host."""
    for module in (layer_kv, paged_kv):
        monkeypatch.setattr(module, "attend_rows", lambda query, *_: query.transpose(0, 1).contiguous())
    monkeypatch.setattr(workspace, "ROWS_OPEN", 0)
    monkeypatch.setattr(workspace, "READ_AHEAD_BYTES", 0)
    monkeypatch.setattr(workspace, "_WEIGHTS", 0)
    scene, kv = Scene(in_pages=in_pages), list[Any]()
    ids = as_token_ids([(11 * n) % paged_scenes.VOCAB for n in range(ROWS)])
    scene.compute(CaptureJob(ChunkJob((), ids), scene.planner), kv)
    scene.store.write_all(blocks_of(ChunkJob((), ids), scene.planner, kv)[:6])
    job = CaptureJob(ChunkJob((), ids), scene.planner, exact=scene.planner.plan(Prompt.of([text(ids)]), scene.store))
    assert job.exact is not None and job.tokens == ROWS - 6 * 32
    kv.clear()
    scene.compute(job, kv)  # what is made once is there
    kv.clear()
    with Peak() as peak:
        scene.compute(job, kv)
    counted = workspace_of(replace(SIZES, tile_rows=job.tokens, in_pages=in_pages, has_histories=True))
    without = workspace_of(replace(SIZES, tile_rows=job.tokens, in_pages=in_pages))
    assert counted.hidden + counted.chunks + counted.tile >= peak.most > without.chunks
