"""Every kernel beside its counterpart on the device, in both 16-bit types, at the sizes that models have.

Kernels are compiled for each kind of layer, so that cases are chosen to cover and not to multiply.
"""

from typing import Any

import pytest
import torch

from cacheblend.core.kernels import attention, operations
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.rope import KeyRotation
from kernel_cases import compare, compare_attention, compare_deviation, compare_placing, records

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
pytest.importorskip("triton", reason="Triton is not installed here")

from cacheblend.core.kernels import attention_triton  # noqa: E402

in_both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

LENGTH = 1500
ROWS = {"few": 3, "some": 40, "many": 700}
"""Few rows share a tile's keys between several programs; many fill whole tiles."""

# head_dim, heads, KV heads, window, soft-cap, sinks, page (0: dense buffers)
LAYERS: dict[str, tuple[int, int, int, int | None, float | None, bool, int]] = {
    "64": (64, 8, 2, None, None, False, 0),
    "64, window and sinks, in pages": (64, 8, 1, 128, None, True, 16),
    "96, one head a KV head, in pages": (96, 3, 3, None, None, False, 32),
    "96, soft-cap": (96, 6, 2, None, 20.0, False, 0),
    "128": (128, 8, 2, None, None, False, 0),
    "128, in pages": (128, 10, 2, None, None, False, 48),
    "128, window": (128, 8, 2, 100, None, False, 0),
    "256, window and soft-cap": (256, 4, 2, 512, 50.0, False, 0),
    "256, everything, in pages": (256, 4, 2, 40, 30.0, True, 16),
}


@in_both_types
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layer", LAYERS)
def test_attention(layer: str, rows: str, dtype: torch.dtype) -> None:
    head_dim, heads, kv_heads, window, softcap, has_sinks, page = LAYERS[layer]
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, ROWS[rows], head_dim), (kv_heads, LENGTH, head_dim), (kv_heads, LENGTH, head_dim)
    tensors = [torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes]
    positions = torch.randperm(LENGTH, generator=draw)[: ROWS[rows]].sort().values.to(DEVICE)
    sinks = torch.randn(heads, generator=draw).to(DEVICE) if has_sinks else None
    compare_attention(*tensors, positions, AttentionSpec(head_dim**-0.5, window, softcap, sinks), page=page or None)


# codec, pairing, share of the dimensions that is rotated, head_dim, page (0: dense buffers)
PLACINGS: list[tuple[str, Any, float, int, int]] = [
    ("raw", "half", 1, 128, 0),
    ("raw", "half", 0.5, 256, 16),
    ("raw", "interleaved", 1, 64, 16),
    ("raw", "interleaved", 0.5, 96, 0),
    ("int8", "half", 1, 128, 0),
    ("int8", "interleaved", 0.5, 64, 16),
    ("fp8", "half", 0.5, 96, 16),
    ("fp8", "interleaved", 1, 128, 0),
    ("int4", "half", 1, 128, 16),
    ("int4", "interleaved", 0.5, 256, 0),
]


@in_both_types
@pytest.mark.parametrize(("codec", "pairing", "share", "head_dim", "page"), PLACINGS)
def test_placing(codec: str, pairing: Any, share: float, head_dim: int, page: int, dtype: torch.dtype) -> None:
    tokens, kv_heads = [256, 256, 33], 3
    pieces = [Piece(0, 256, 0, 7, 256, 90_000), Piece(1, 256, 100, 400, 156, -60), Piece(2, 33, 1, 300, 31, 0)]
    pairs = int(share * head_dim) // 2
    rotation = KeyRotation(5e5 ** (-torch.arange(pairs) / pairs), pairing)
    made = records(codec, tokens, kv_heads, head_dim, dtype, 0, DEVICE)
    case = made, Placement(pieces, codec), rotation, (kv_heads, 600, head_dim), dtype
    compare_placing(case, page or None)


@in_both_types
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_deviation(head_dim: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    heads, rows, length = 8, 2458, 16384
    fresh = torch.randn(2, heads, rows, head_dim, generator=draw).to(DEVICE, dtype).unbind()
    loaded = torch.randn(2, heads, length, head_dim, generator=draw).to(DEVICE, dtype).unbind()
    positions = torch.randperm(length, generator=draw)[:rows].sort().values.to(DEVICE)
    for measure in ("kv", "k", "v"):
        compare_deviation(fresh, loaded, measure, positions)
    compare_deviation(fresh, [each[:, :rows] for each in loaded], "kv")


@in_both_types
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_ask(head_dim: int, dtype: torch.dtype) -> None:
    shapes = HeadShape(8, 2, head_dim), HeadShape(8, 1, head_dim, 128), HeadShape(8, 8, head_dim)
    kernel, plain = attention_triton.attend_asking, attention.attend_asking
    found = operations.asking_differs(kernel, plain, torch.device(DEVICE), dtype, shapes)
    compare(found == "", found)
