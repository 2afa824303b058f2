"""Re-positioning of keys: R(p + d) = R(d) R(p), so stored keys move by rotating them once more.

A rotation is a model's own inverse frequencies and the way its dimensions pair up. Attention scaling (YaRN's
mscale) is part of the stored keys already and must not be applied again, so it has no place here. This module
knows keys and angles; engines say which rotation a layer has.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from cacheblend.core.errors import ModelNotBlendableError

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """How one layer's keys turn with their position.

    Attributes:
        inv_freq: [rotary_dim / 2] radians per position, fp32 or wider, on the CPU.
        pairing: dimension i turns with i + rotary_dim / 2 (``half``: Llama, NeoX) or 2 i with 2 i + 1
            (``interleaved``: GPT-J, GLM, Cohere). Dimensions from rotary_dim on do not turn.
    """

    inv_freq: torch.Tensor
    pairing: Pairing

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that turn."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Turn:
    """Cosines and sines of one shift a row, each [rows or 1, rotary_dim / 2] fp32."""

    cos: torch.Tensor
    sin: torch.Tensor
    pairing: Pairing


def turn_by(rotation: KeyRotation, offsets: torch.Tensor, device: torch.device | str = "cpu") -> Turn:
    """The turn that moves each row by its offset.

    Args:
        rotation: of the layer.
        offsets: [rows] int64, new position less stored position; may be negative.
        device: where the keys will be.

    Angles are taken in fp64: at an offset of 100,000 an fp32 angle would be off by 0.004 rad.
    """
    unique, inverse = torch.unique(offsets.cpu(), return_inverse=True)
    angles = unique.double()[:, None] * rotation.inv_freq.double()[None, :]
    cos, sin = angles.cos().float()[inverse], angles.sin().float()[inverse]
    return Turn(cos.to(device), sin.to(device), rotation.pairing)


def reposition_keys(keys: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Keys at their new positions (algorithm: delta-RoPE).

    Args:
        keys: [kv_heads, rows, head_dim], any float dtype.
        turn: of the rows' shifts.

    Returns:
        [kv_heads, rows, head_dim] in the keys' dtype; the arithmetic is fp32 (in bf16 it costs a tenth more
        error).
    """
    half = turn.cos.shape[-1]
    turned = keys.clone()
    if turn.pairing == "half":
        halves = (slice(0, half), slice(half, 2 * half))
    else:
        halves = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    first, second = (keys[..., part].float() for part in halves)
    # Each pass over the rows costs: four that compute, into one buffer, and two that round.
    moved = torch.mul(first, turn.cos).addcmul_(second, turn.sin, value=-1)
    turned[..., halves[0]] = moved
    turned[..., halves[1]] = torch.mul(second, turn.cos, out=moved).addcmul_(first, turn.sin)
    return turned


SHIFTABLE_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


def shift_limit(rope_parameters: dict[str, Any]) -> int | None:
    """Longest prompt in which keys of this RoPE can be shifted by a constant; None: no limit.

    Args:
        rope_parameters: one layer type's, as transformers keeps them (``rope_type`` and what belongs to it).

    Raises:
        ModelNotBlendableError: its frequencies depend on the prompt's length, or it is not known here.
    """
    kind = rope_parameters.get("rope_type") or "default"
    if kind in SHIFTABLE_ROPE:
        return None
    if kind == "longrope" and rope_parameters.get("original_max_position_embeddings"):
        # Up to its switch LongRoPE uses one fixed set of factors; behind it another, for all positions at once.
        return int(rope_parameters["original_max_position_embeddings"])
    if kind in ("dynamic", "longrope"):
        raise ModelNotBlendableError(
            f"RoPE of type {kind!r} has frequencies that depend on the prompt's length: stored keys cannot be "
            "shifted by a constant; serve this model without blending"
        )
    raise ModelNotBlendableError(
        f"RoPE of type {kind!r} is not known; shiftable are {', '.join(SHIFTABLE_ROPE)}, and longrope below its switch"
    )
