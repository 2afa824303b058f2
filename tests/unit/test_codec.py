"""Compressed records: sizes, what is lost at most, and that a head's bytes are its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.codec import CODECS, GROUP, codec_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def record_of(
    heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Keys with a few large channels, as models have them."""
    record = torch.randn(heads, 2, tokens, head_dim, generator=torch.Generator().manual_seed(seed))
    record[:, 0, :, ::7] *= 20
    return record.to(dtype)


def back(name: str, record: torch.Tensor) -> torch.Tensor:
    codec = codec_of(name)
    _, _, tokens, head_dim = record.shape
    return codec.decode(codec.encode(record), tokens, head_dim, record.dtype)


def largest_errors(name: str, record: torch.Tensor) -> torch.Tensor:
    """What each number may be off by, from the definition: half a step of what shares a scale."""
    numbers = record.float()
    if name == "int8":
        return numbers.abs().amax(-1, keepdim=True) / 127 * 0.51 + 4e-5
    if name == "fp8":
        return numbers.abs() / 16 + numbers.abs().amax(-1, keepdim=True) / 448 * 0.01 + 4e-5
    keys, values = numbers.unbind(1)
    steps = torch.empty_like(keys)
    for start in range(0, keys.shape[1], GROUP):
        rows = keys[:, start : start + GROUP]
        steps[:, start : start + GROUP] = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 15
    of_values = ((values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)) / 15).expand_as(values)
    return torch.stack([steps, of_values], dim=1) * 0.52 + numbers.abs().amax() * 2e-3 + 4e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200, 256])
def test_what_is_lost_is_bounded_by_the_scale(name: str, tokens: int, dtype: torch.dtype) -> None:
    record = record_of(3, tokens, 32, dtype)
    decoded = back(name, record)
    assert decoded.dtype == dtype and decoded.shape == record.shape
    slack = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype] * record.float().abs()
    assert bool(((decoded.float() - record.float()).abs() <= largest_errors(name, record) + slack).all())


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 4), st.integers(1, 140), st.integers(1, 70))
@settings(deadline=None)
def test_sizes_are_as_said_and_heads_are_apart(name: str, heads: int, tokens: int, head_dim: int) -> None:
    codec, record = codec_of(name), record_of(heads, tokens, head_dim, torch.bfloat16)
    encoded = codec.encode(record)
    assert encoded.flatten(1).view(torch.uint8).shape == (heads, codec.head_bytes(tokens, head_dim, record.dtype))
    decoded = codec.decode(encoded, tokens, head_dim, record.dtype)
    one = codec.decode(encoded[-1:], tokens, head_dim, record.dtype)
    assert torch.equal(one, decoded[-1:])
    assert torch.equal(codec.encode(record[-1:]), encoded[-1:])
    assert torch.equal(decoded, record) or not codec.is_exact


@pytest.mark.parametrize(("name", "at_most"), [("int8", 0.516), ("fp8", 0.516), ("int4", 0.282)])
def test_numbers_at_the_limits(name: str, at_most: float) -> None:
    for fill in (0.0, 1.0, -3.5, 1e-9, 6e4):
        record = torch.full((2, 2, 70, 16), fill)
        assert back(name, record) == pytest.approx(record, rel=0.05, abs=1e-4)
    if name != "int4":  # a huge number does not overflow
        assert bool(back(name, torch.ones(1, 2, 3, 8) * 1e38).isfinite().all())
    for bad in (float("nan"), float("inf")):
        record = record_of(1, 4, 8)
        record[0, 1, 2, 3] = bad
        with pytest.raises(InvalidInputError, match="use the codec raw"):
            codec_of(name).encode(record)
    assert codec_of(name).head_bytes(256, 64, torch.bfloat16) <= at_most * 2 * 256 * 64 * 2  # bytes of bf16
    with pytest.raises(InvalidInputError, match="'zip'; there are raw, int8, fp8, int4"):
        codec_of("zip")
