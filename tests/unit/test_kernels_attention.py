"""The attention kernel against the dense oracle: under Triton's interpreter, on a GPU where there is one."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.core.kernels.attention_spec import AttentionSpec
from campaign import SHARE, share
from kernel_cases import ATTENTION_TOLERANCE, compare, compare_attention
from reference_attention import dense_attention

triton = pytest.importorskip("triton", reason="Triton is not installed here")
from cacheblend.core.kernels import attention_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_SCORES = 1_000_000 if SHARE == 1 else 200_000  # the interpreter takes about a second for the former


@st.composite
def cases(draw):
    """(query, keys, values, positions, spec) of any shape that models have, and splits of the keys."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    head_dim = draw(st.sampled_from([8, 16, 64, 96, 128, 256]))
    length = draw(st.integers(1, 200) | st.integers(1, 200) | st.integers(1, 200) | st.integers(1, 2000))
    most = max(1, MAX_SCORES // (kv_heads * group * length))
    rows = min(length, most, draw(st.integers(1, 20) | st.integers(1, 300)))
    dtype = draw(st.sampled_from(list(ATTENTION_TOLERANCE)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        positions = torch.randperm(length, generator=random)[:rows].sort().values
    else:  # the end of the prompt
        positions = torch.arange(length - rows, length)
    shapes = (kv_heads * group, rows, head_dim), (kv_heads, length, head_dim), (kv_heads, length, head_dim)
    query, keys, values = (torch.randn(shape, generator=random).to(DEVICE, dtype) for shape in shapes)
    sinks = torch.randn(kv_heads * group, generator=random).to(DEVICE) if draw(st.booleans()) else None
    spec = AttentionSpec(
        draw(st.sampled_from([0.05, head_dim**-0.5, 0.5])),
        draw(st.sampled_from([None, None, 1, 40, 500])),
        draw(st.sampled_from([None, None, 5.0, 30.0])),
        sinks,
    )
    return query, keys, values, positions.to(DEVICE), spec, draw(st.sampled_from([None, None, 1, 2, 7]))


SETTINGS = settings(max_examples=share(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@SETTINGS
@given(cases())
def test_any_rows_over_dense_buffers(case) -> None:
    compare_attention(*case)


@SETTINGS
@given(cases(), st.sampled_from([16, 32, 48]))
def test_any_rows_over_a_paged_cache(case, page) -> None:
    compare_attention(*case, page=page)


def test_what_is_behind_the_last_row_is_not_read() -> None:
    query, keys, values = torch.randn(4, 3, 64), torch.randn(2, 200, 64), torch.randn(2, 200, 64)
    positions = torch.tensor([5, 70, 130])
    expected = dense_attention(query, keys, values, positions, AttentionSpec(0.125))
    keys[:, 131:] = values[:, 131:] = torch.nan
    moved = (each.to(DEVICE) for each in (query, keys, values, positions))
    out = attention_triton.attend_rows(*moved, AttentionSpec(0.125))
    compare(torch.allclose(out.cpu(), expected, atol=2e-5))


def test_views_and_no_rows() -> None:
    query = torch.randn(3, 4, 64, device=DEVICE).transpose(0, 1)  # as a layer's projection leaves it
    keys, values = (torch.randn(50, 2, 64, device=DEVICE).transpose(0, 1) for _ in range(2))
    compare_attention(query, keys, values, torch.tensor([1, 2, 49], device=DEVICE), AttentionSpec(0.1))
    empty = attention_triton.attend_rows(
        query[:, :0], keys, values, torch.empty(0, dtype=torch.int64), AttentionSpec(1)
    )
    assert empty.shape == (0, 4, 64)
