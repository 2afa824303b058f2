"""Re-positioning against rotations taken pair by pair in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.rope import SHIFTABLE_ROPE, KeyRotation, Pairing, reposition_keys, shift_limit, turn_by

HEADS, ROWS, HEAD_DIM = 2, 6, 12
PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
DIMS = (12, 8, 2)  # the whole head; parts of it


def rotation(rotary_dim: int, pairing: Pairing) -> KeyRotation:
    return KeyRotation(1e4 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim), pairing)


def keys(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(HEADS, ROWS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(x: torch.Tensor, rotation: KeyRotation, offsets: list[int]) -> torch.Tensor:
    return reposition_keys(x, turn_by(rotation, torch.tensor(offsets)))


def by_pairs(x: torch.Tensor, rotation: KeyRotation, offsets: list[int]) -> torch.Tensor:
    """The oracle: every pair of dimensions as a complex number, turned in fp64."""
    out, half = x.double().clone(), len(rotation.inv_freq)
    for i in range(half):
        first, second = (i, i + half) if rotation.pairing == "half" else (2 * i, 2 * i + 1)
        angle = torch.tensor(offsets).double() * rotation.inv_freq[i].double()
        turned = torch.complex(out[..., first], out[..., second]) * torch.polar(torch.ones_like(angle), angle)
        out[..., first], out[..., second] = turned.real, turned.imag
    return out


offset_lists = st.lists(st.integers(-5000, 5000), min_size=ROWS, max_size=ROWS)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", DIMS)
@settings(max_examples=20)
@given(offsets=offset_lists)
def test_equals_the_oracle(pairing: Pairing, rotary_dim: int, offsets: list[int]) -> None:
    turn = rotation(rotary_dim, pairing)
    x = keys()
    before = x.clone()
    got = moved(x, turn, offsets)
    torch.testing.assert_close(got.double(), by_pairs(x, turn, offsets), rtol=0, atol=2e-6)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(x, before)


@pytest.mark.parametrize("pairing", PAIRINGS)
@settings(max_examples=20)
@given(a=offset_lists, b=offset_lists)
def test_two_moves_are_one(pairing: Pairing, a: list[int], b: list[int]) -> None:
    turn = rotation(8, pairing)
    together = moved(keys(), turn, [i + j for i, j in zip(a, b, strict=True)])
    torch.testing.assert_close(moved(moved(keys(), turn, a), turn, b), together, rtol=0, atol=3e-6)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_half_precision_is_rounded_once_and_no_move_changes_no_bit(pairing: Pairing) -> None:
    """The only error is that of the result's last bit, which bf16 arithmetic would exceed."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(moved(keys(dtype), rotation(12, pairing), [0] * ROWS), keys(dtype))
    offsets = [3, -70, 511, 4000, -4096, 100_000]
    x, turn = keys(torch.bfloat16), rotation(12, pairing)
    got = moved(x, turn, offsets)
    exact = by_pairs(x, turn, offsets)
    assert got.dtype == torch.bfloat16
    assert bool(((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all())


def test_far_positions_keep_their_angle_and_dot_products_depend_on_the_distance_alone() -> None:
    """An fp32 angle of 100,000 rad is off by up to 0.004 rad."""
    turn = turn_by(KeyRotation(torch.tensor([1 / 3], dtype=torch.float64), "half"), torch.tensor([299_999]))
    assert float(turn.cos) == pytest.approx(math.cos(299_999 / 3), abs=1e-6)
    assert float(turn.sin) == pytest.approx(math.sin(299_999 / 3), abs=1e-6)
    whole, query, key = rotation(12, "half"), keys(seed=1)[:, :1], keys(seed=2)[:, :1]
    near = (moved(query, whole, [9]) * moved(key, whole, [4])).sum(-1)
    far = (moved(query, whole, [1009]) * moved(key, whole, [1004])).sum(-1)
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)


def test_shiftable_ropes_have_no_limit_and_longrope_that_of_its_switch() -> None:
    for kind in (*SHIFTABLE_ROPE, None):
        assert shift_limit({"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64}) is None
    assert shift_limit({}) is None
    assert shift_limit({"rope_type": "longrope", "original_max_position_embeddings": 4096}) == 4096


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, "'longrope'.*depend on the prompt's length.*without blending"),
        ({"rope_type": "dynamic", "original_max_position_embeddings": 64}, "'dynamic'.*prompt's length"),
        ({"rope_type": "spiral"}, "'spiral' is not known; shiftable are default, linear, llama3, yarn"),
    ],
)
def test_the_other_ropes_are_refused(rope: dict[str, object], message: str) -> None:
    with pytest.raises(ModelNotBlendableError, match=message):
        shift_limit(rope)
