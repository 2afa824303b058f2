"""Kernels of pages of eight bits on the device: they take longest to compile, and few caches need them."""

import pytest
import torch

from cacheblend.core.kernels import attention, kv_placement, operations
from cacheblend.core.kernels.attention import HeadShape
from kernel_cases import compare

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
pytest.importorskip("triton", reason="Triton is not installed here")

from cacheblend.core.kernels import attention_triton, kv_placement_triton  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_of_eight_bits(head_dim: int, dtype: torch.dtype) -> None:
    """The checks before such pages are used, at the sizes that models have."""
    device, shapes = torch.device(DEVICE), (HeadShape(8, 2, head_dim), HeadShape(8, 2, head_dim, 128))
    attends, places = operations.float8_attention_differs, operations.float8_placing_differs
    found = attends(attention_triton.attend_rows, attention.attend_rows, device, dtype, shapes)
    compare(found == "", found)
    found = places(kv_placement_triton.place, kv_placement.place, device, dtype, (2, head_dim))
    compare(found == "", found)
