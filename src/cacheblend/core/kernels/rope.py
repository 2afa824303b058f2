"""Re-positioning of keys: R(p + d) = R(d) R(p), so stored keys are moved by rotating them once more. A rotation
consists of a model's inverse frequencies and the way its dimensions are paired. Attention scaling (YaRN's mscale) is
already part of the stored keys and must not be applied again, so it is not part of a rotation. This module knows keys
and angles; engines say which rotation a layer has."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.upload import upload

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """How one layer's keys are rotated by their position."""

    inv_freq: torch.Tensor  # [rotary_dim / 2] radians per position, fp32 or wider, on the CPU
    # dimension i is paired with i + rotary_dim / 2 (``half``: Llama, NeoX), or 2 i with 2 i + 1 (``interleaved``:
    # GPT-J, GLM, Cohere). Dimensions from rotary_dim on are not rotated.
    pairing: Pairing

    @property
    def rotary_dim(self) -> int:  # leading dimensions of a head that are rotated
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Turn:
    """Cosines and sines of each row's shift, [rows or 1, rotary_dim / 2] fp32 each."""

    cos: torch.Tensor
    sin: torch.Tensor
    pairing: Pairing


def turn_by(rotation: KeyRotation, offsets: torch.Tensor, device: torch.device | str = "cpu") -> Turn:
    """The turn that moves each row by its offset, [rows] int64: new position minus stored position, may be negative.
    Angles are computed in fp64: at an offset of 100,000 an fp32 angle would be off by 0.004 rad."""
    unique, inverse = torch.unique(offsets.cpu(), return_inverse=True)
    angles = unique.double()[:, None] * rotation.inv_freq.double()[None, :]
    cos, sin = angles.cos().float()[inverse], angles.sin().float()[inverse]
    return Turn(upload(cos, torch.device(device)), upload(sin, torch.device(device)), rotation.pairing)


def reposition_keys(keys: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Keys [kv_heads, rows, head_dim] of any float dtype at their new positions (algorithm: delta-RoPE); computed in
    fp32 (bf16 arithmetic has 10 % more error)."""
    half = turn.cos.shape[-1]
    turned = keys.clone()
    if turn.pairing == "half":
        halves = (slice(0, half), slice(half, 2 * half))
    else:
        halves = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    first, second = (keys[..., part].float() for part in halves)
    # Passes over the rows take the time: four compute, into one buffer, and two round.
    moved = torch.mul(first, turn.cos).addcmul_(second, turn.sin, value=-1)
    turned[..., halves[0]] = moved
    turned[..., halves[1]] = torch.mul(second, turn.cos, out=moved).addcmul_(first, turn.sin)
    return turned


SHIFTABLE_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


def shift_limit(rope_parameters: dict[str, Any]) -> int | None:
    """Longest prompt in which keys of this RoPE can be shifted by a constant; None: no limit. `rope_parameters`: of one
    layer type, in transformers' form (``rope_type`` and its parameters). Raises `ModelNotBlendableError`: its
    frequencies depend on the prompt's length, or the type is unknown."""
    kind = rope_parameters.get("rope_type") or "default"
    if kind in SHIFTABLE_ROPE:
        return None
    if kind == "longrope" and rope_parameters.get("original_max_position_embeddings"):
        # Up to this length LongRoPE uses one fixed set of factors, beyond it another for all positions.
        return int(rope_parameters["original_max_position_embeddings"])
    if kind in ("dynamic", "longrope"):
        raise ModelNotBlendableError(
            f"RoPE of type {kind!r} has frequencies that depend on the prompt's length: stored keys cannot be "
            "shifted by a constant; serve this model without blending"
        )
    raise ModelNotBlendableError(
        f"RoPE of type {kind!r} is not known; shiftable are {', '.join(SHIFTABLE_ROPE)}, and short prompts of longrope"
    )
