"""Keys moved to other positions, against fp64; norms in one call: those that compute what PyTorch's does."""

import copy
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.rope import SHIFTABLE_ROPE, KeyRotation, Pairing, reposition_keys, shift_limit, turn_by
from cacheblend.engines.hf.view import run_norms_in_one_call
from families import tiny_model

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


def test_far_positions_keep_their_angle_and_ropes_that_do_not_shift_are_refused() -> None:
    """An fp32 angle of 100,000 rad is off by up to 0.004 rad."""
    turn = turn_by(KeyRotation(torch.tensor([1 / 3], dtype=torch.float64), "half"), torch.tensor([299_999]))
    assert float(turn.cos) == pytest.approx(math.cos(299_999 / 3), abs=1e-6)
    assert float(turn.sin) == pytest.approx(math.sin(299_999 / 3), abs=1e-6)
    for kind in (*SHIFTABLE_ROPE, None):
        assert shift_limit({"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64}) is None
    assert shift_limit({}) is None
    assert shift_limit({"rope_type": "longrope", "original_max_position_embeddings": 4096}) == 4096
    for rope, message in (
        ({"rope_type": "longrope"}, "'longrope'.*depend on the prompt's length.*without blending"),
        ({"rope_type": "dynamic", "original_max_position_embeddings": 64}, "'dynamic'.*prompt's length"),
        ({"rope_type": "spiral"}, "'spiral' is not known; shiftable are default, linear, llama3, yarn"),
    ):
        with pytest.raises(ModelNotBlendableError, match=message):
            shift_limit(rope)


def layers_of(family: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model's decoder layers, twice, with drawn weights of norms."""
    model = copy.deepcopy(tiny_model(family)).to(dtype)
    drawn = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.dim() == 1:
            weight.data.copy_(torch.rand(weight.shape, generator=drawn) + 0.5)
    layers = model.get_submodule("model.layers")
    return layers, copy.deepcopy(layers)


def norms(layers: Any) -> list[Any]:
    return [module for module in layers.modules() if type(module).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "of_a_layer"), [("llama", 2), ("qwen3", 4), ("gpt_oss", 2), ("gemma3_text", 0)])
def test_norms_compute_the_same(family: str, of_a_layer: int, dtype: torch.dtype) -> None:
    own, others = layers_of(family, dtype)
    assert run_norms_in_one_call(others) == of_a_layer * len(own)
    for norm, other in zip(norms(own), norms(others), strict=True):
        assert isinstance(other, type(norm))
        rows = torch.randn(1, 7, len(norm.weight)).to(dtype) * 3
        with torch.no_grad():
            error = (norm(rows).float() - other(rows).float()).abs()
        assert bool((error <= 2 * torch.finfo(dtype).eps * norm(rows).float().abs() + 1e-6).all())
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in others.named_parameters()]


class OddRMSNorm(nn.Module):
    """Multiplies before it rounds, and by twice the weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.eps, self.factor = nn.Parameter(torch.ones(16)), 1e-5, factor

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)
        return self.factor * normed * self.weight * (1.0 if gate is None else gate)


def test_what_a_norm_does_besides_stays() -> None:
    same, twice = nn.ModuleList([OddRMSNorm(1.0)]), nn.ModuleList([OddRMSNorm(2.0)])
    assert (run_norms_in_one_call(same), run_norms_in_one_call(twice)) == (1, 0)
    rows, gate = torch.randn(3, 16), torch.randn(3, 16)
    assert torch.equal(same[0](rows, gate), OddRMSNorm(1.0)(rows, gate))
    assert torch.equal(same[0](rows.double()), OddRMSNorm(1.0)(rows.double()))
    seen = list[int]()
    same[0].register_forward_hook(lambda *_: seen.append(1))
    same[0].weight.data.mul_(3)
    assert torch.allclose(same[0](rows), 3 * OddRMSNorm(1.0)(rows), atol=1e-5) and seen == [1]
    norm = OddRMSNorm(1.0)  # the weights of a model that runs are never touched
    shared, weight = norm._parameters, norm.weight
    kept = list[bool]()
    norm.register_forward_hook(lambda *_: kept.append(shared["weight"] is weight))
    assert run_norms_in_one_call([norm]) == 1 and norm._parameters is shared
    assert kept == [True] and norm.weight is weight


class ManyRMSNorm(nn.Module):
    """One class of many norms, as models have them: what it computes is decided by what each is given."""

    def __init__(self, eps: float, kind: str, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(weight), eps, kind
        self.inner = nn.Linear(16, 16) if kind == "inner" else None
        self.register_buffer("shift", torch.full((16,), 0.5) if kind == "shift" else None)
        self.options = {"factor": 0.5 if kind == "options" else 1.0}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = self.eps * (4.0 if self.kind == "eps" else 1.0)
        normed = hidden_states.float() * torch.rsqrt(hidden_states.float().square().mean(-1, keepdim=True) + eps)
        weight = {"offset": 1 + self.weight, "absolute": self.weight.abs(), "square": self.weight.square()}
        normed = normed if self.kind != "coarse" else normed.to(torch.float8_e5m2).float()
        out = (normed * weight.get(self.kind, self.weight).float()).to(hidden_states.dtype)
        out = out if self.inner is None else self.inner(out)
        return (out if self.shift is None else out + self.shift) * self.options["factor"]


KINDS = ["plain", "plain", "offset", "absolute", "square", "coarse", "eps", "inner", "shift", "options"]


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_modules_of_one_class_are_told_apart_by_what_they_compute(seed: int) -> None:
    """In any order, and also where the first one's weight, all ones or positive, hides what another's shows."""
    draw, drawn = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    weights = (torch.ones(16), torch.rand(16, generator=drawn), torch.randn(16, generator=drawn), torch.zeros(16))
    each = [ManyRMSNorm(draw.choice((1e-5, 1e-3)), kind, draw.choice(weights).clone()) for kind in KINDS * 2]
    draw.shuffle(each)
    norms = nn.ModuleList(each).to(dtype)
    own = copy.deepcopy(norms)
    assert run_norms_in_one_call(norms) == sum(norm.kind == "plain" for norm in each)
    for norm, other in zip(own, norms, strict=True):
        weight = torch.randn(16, generator=drawn)  # which may be written to later
        norm.weight.copy_(weight), other.weight.copy_(weight)
        for scale in (1.0, 0.01):
            rows = (torch.randn(5, 16, generator=drawn) * scale).to(dtype)
            error = (norm(rows).float() - other(rows).float()).abs()
            assert bool((error <= 2 * torch.finfo(dtype).eps * norm(rows).float().abs() + 1e-6).all()), norm.kind
