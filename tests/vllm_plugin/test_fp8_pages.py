"""FP8 caches without an engine: what a worker reads and writes, beside the definition.

Who meets such a cache: rows just computed and rows that were placed, in one layer; requests that share blocks with it;
a cache of another kind than its name says; scales that differ; a backend that rounds to the nearest or cuts bits off; a
layer that is not FP8 beside some that are; a kernel that is not there, or is wrong.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paged_scenes
from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels import operations
from cacheblend.core.kernels.attention import attend_rows
from cacheblend.core.kernels.float8 import Float8
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import PLAIN, Served
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.plan.plan import Source
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows
from cacheblend.engines.vllm.worker import prefill_factory
from cacheblend.engines.vllm.worker.paged_cache import RequestBlocks
from cacheblend.engines.vllm.worker.paged_kv import PagedKV, open_pages
from cacheblend.engines.vllm.worker.ranks import Ranks
from paged_scenes import LAYERS, NOTHING, OTHERS, OWN, Fp8, Scene, caches_of, serve_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CACHES = {
    "e4m3": Fp8(),
    "scales": Fp8(scales=(0.037, 0.3)),
    "e5m2": Fp8(E5M2, "fp8_e5m2", (1.0, 0.61)),
    "cut": Fp8(is_cut=True, scales=(0.3, 1.7)),
    "other than its name": Fp8(E4M3, "fp8_e5m2"),
}


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels serve CPUs, under the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    serve_triton(monkeypatch.setattr, operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8, operations.KV_DEVIATION)


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
    rows = len(job.plan)
    made: list[Any] = []
    for layer in range(LAYERS):
        own = type("Own", (Rounded,), {"fp8": fp8})
        held = [torch.zeros(2, rows, 16, dtype=scene.model.dtype) for _ in range(2)]
        if job.local_tokens:
            found = scene.opener._paged[layer].read(torch.tensor(OWN), job.local_tokens)
            for part, known in zip(held, found.unbind(1), strict=True):
                part[:, : job.local_tokens] = known
        made.append(own(*held))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_factory, "PagedKV", lambda layer, pages, blocks: made[scene.opener._paged.index(layer)])
        scene.blend(job)
    return [torch.stack(list(each), dim=1) for each in made]


def steps_apart(found: torch.Tensor, expected: torch.Tensor, fp8: Fp8) -> torch.Tensor:
    """By how many of the kind's numbers two of them differ: those of one sign are in the order of their bytes."""
    ranks = []
    for each in (found, expected):
        parts = [Fp8(fp8.kind, scales=fp8.scales).stored(n, part).int() for n, part in enumerate(each.unbind(1))]
        ranks.append(torch.stack([torch.where(part > 127, 128 - part, part) for part in parts], dim=1))
    return (ranks[0] - ranks[1]).abs()


@pytest.mark.parametrize("held", [0, 32])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", CACHES)
def test_a_blend_in_pages_is_that_of_the_definition(name: str, ratio: float, held: int) -> None:
    """Byte for byte but where a sum in another order falls on the other side of a step. Nobody else's byte changes."""
    fp8 = CACHES[name]
    scene = Scene(in_pages=True, fp8=fp8)
    selector: Any = {0.0: NoRows(), 0.3: Hkvd((1,), (0.3,)), 1.0: AllRows()}[ratio]
    if held:
        scene.blend(scene.job(OWN, source=NOTHING))
    expected = by_definition(scene, fp8, scene.job(OWN, held, selector))
    shared = [*OTHERS, *OWN[: held // 16]]
    before = scene.bytes_of(shared)
    result = scene.blend(scene.job(OWN, held, selector))
    assert result.report.fallbacks == []
    apart = torch.cat(
        [steps_apart(found, wanted, fp8).flatten() for found, wanted in zip(scene.rows(OWN), expected, strict=True)]
    )
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-3
    for now, then in zip(scene.bytes_of(shared), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("layout", ["flash", "keys transposed"])
@pytest.mark.parametrize("name", ["scales", "e5m2"])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_our_kernels_blend_as_pytorch_does(name: str, layout: str, codec: str) -> None:
    scenes = []
    for is_kernel in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            scene = Scene(layout, in_pages=True, fp8=CACHES[name], codec=codec, spec="window")
            if not is_kernel:
                for operation in (operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8):
                    patch.setattr(operation, "_served", {})
            assert operations.ATTEND_FLOAT8.on(torch.device("cpu"), torch.float32).is_kernel == is_kernel
            scene.blend(scene.job(OWN, selector=Hkvd((1,), (0.3,))))
            scenes.append(scene)
    one, other = (scene.rows(OWN) for scene in scenes)
    apart = torch.cat([steps_apart(a, b, CACHES[name]).flatten() for a, b in zip(one, other, strict=True)])
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["flash", "keys transposed"])
@pytest.mark.parametrize("name", CACHES)
def test_the_kind_and_the_places_are_learnt_by_writing(name: str, layout: str, dtype: torch.dtype) -> None:
    fp8 = CACHES[name]
    layer = Scene(layout, in_pages=True, fp8=fp8, dtype=dtype).opener._paged[1]
    assert layer.float8 == Float8(fp8.kind, dtype, *fp8.scales)
    rows = torch.randn(2, 2, 40, 16).to(dtype)
    blocks = RequestBlocks.of([5, 9, 2], 0, 40, 16)
    layer.write(*rows, blocks.slots)
    found = layer.read(blocks.table, 40)
    expected = torch.stack([fp8.kept(part, rows[part]) for part in range(2)], dim=1)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected.float(), rtol=2**-8, atol=0)


def test_equal_rows_have_no_deviation_and_attention_reads_with_scales() -> None:
    """However large they are; a row that is a step away has one."""
    fp8 = CACHES["scales"]
    opener = Scene(in_pages=True, fp8=fp8).opener
    kv = PagedKV(opener._paged[0], opener._pages[0], RequestBlocks.of(OWN, 0, 60, 16))  # type: ignore[index]
    rows = torch.randn(2, 2, 60, 16) * torch.logspace(-3, 1, 60)[:, None]
    kv.place([rows.transpose(0, 1).contiguous()], Placement([Piece(0, 60, 0, 0, 60)]))
    at = torch.arange(60)
    assert not kv.deviation(rows, "kv", at).any()
    assert (kv.deviation(rows * 1.2, "kv", at) > 0).all()
    query, spec = torch.randn(4, 60, 16), opener._model.specs[0]
    expected = attend_rows(query, fp8.kept(0, rows[0]), fp8.kept(1, rows[1]), at, spec)
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
    scene = Scene(in_pages=True, fp8=CACHES["scales"])
    assert [layer.is_fp8 for layer in scene.opener._paged] == [False, True, False, True]
    dense = Scene(in_pages=False, fp8=CACHES["scales"])
    for one in (scene, dense):
        one.blend(one.job(OWN, selector=Hkvd((2,), (0.3,))))
    assert torch.allclose(scene.rows(OWN)[0], dense.rows(OWN)[0], atol=1e-5)  # nothing is rounded in front of it


@pytest.mark.parametrize("kind", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_eight_bits_of_another_kind_are_refused_with_the_way_out(kind: torch.dtype) -> None:
    with pytest.raises(ModelNotBlendableError, match=r"eight bits of no known type.*--kv-cache-dtype bfloat16"):
        Scene(in_pages=False, fp8=Fp8(kind))


def test_a_backend_that_does_not_use_the_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Fp8.stored
    monkeypatch.setattr(Fp8, "stored", lambda self, part, rows: stored(self._replace(scales=(1.0, 1.0)), part, rows))
    with pytest.raises(ModelNotBlendableError, match="eight bits of no known type"):
        Scene(in_pages=True, fp8=CACHES["scales"])


def test_pages_need_kernels_for_eight_bits() -> None:
    """Those for other pages do not help."""
    opener = Scene(in_pages=None, fp8=CACHES["e4m3"]).opener
    alone, cuda = Ranks(SimpleNamespace(size=1, rank=0)), torch.device("cuda")  # type: ignore[arg-type]
    served: Any = Served(lambda *_: None, "Triton")
    with pytest.MonkeyPatch.context() as patch:
        for operation in (operations.ATTEND_ROWS, operations.PLACE):
            patch.setattr(operation, "_served", {(cuda, torch.bfloat16): served})
        for operation in (operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8):
            patch.setattr(operation, "_served", {(cuda, torch.bfloat16): Served(lambda *_: None, PLAIN)})
        what = opener._paged, opener._model.head_shapes, cuda, torch.bfloat16, alone
        assert open_pages(*what, wanted=None) is None
        for operation in (operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8):
            patch.setattr(operation, "_served", {(cuda, torch.bfloat16): served})
        assert open_pages(*what, wanted=None) is not None
