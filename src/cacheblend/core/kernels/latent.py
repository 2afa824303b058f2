"""Latent attention: how the one vector that a layer keeps of a token lies in keys and values of equal width.

    kept       [ rotated part r | latent c ................... ]     576 numbers in DeepSeek-V3: 64 and 512
    keys       [ rotated part r | start of c ]                       288
    values                                   [ rest of c ..... ]     288

So records, buffers, codecs, re-positioning (partial rotation of the keys) and deviation are those of a layer with one
KV head. Attention needs the vector as a whole. A head's key is (W_k c, r) and its value W_v c; instead of expanding the
latents, its query can be multiplied with W_k in front of the attention, and its mixed latents with W_v behind it:

    q . (W_k c, r) = (W_k^T q_c, q_r) . (c, r)             sum a W_v c = W_v sum a c

`attend_absorbed` does both products. Attention then has queries as wide as the kept vectors, and these are keys and
values of all heads (`AttentionSpec.is_latent`). Knows no engine.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from cacheblend.core.kernels.attention import AttentionSpec

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]
"""See `core.fuse.runner.Attend`."""


class UpProjection(NamedTuple):
    """From a latent [rank] to each head's key, without its rotated part, and value."""

    keys: torch.Tensor
    """[heads, key_dim, rank]"""
    values: torch.Tensor
    """[heads, value_dim, rank]"""

    @classmethod
    def of(cls, weight: torch.Tensor, key_dim: int) -> "UpProjection":
        """Of both, [heads, key_dim + value_dim, rank]."""
        return cls(weight[:, :key_dim], weight[:, key_dim:])

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [n, rank] to keys, without their rotated part, and values, [heads, n, key_dim or value_dim]."""
        return latent @ self.keys.transpose(1, 2), latent @ self.values.transpose(1, 2)


def attend_absorbed(
    query: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    up: UpProjection,
    attend: Attend,
    spec: AttentionSpec,
) -> torch.Tensor:
    """A layer's attention in the absorbed form, [n, heads, value_dim]. `query`: [heads, n, key_dim + rotary_dim], the
    rotated part last. `rotated`, `latent`: what the layer keeps of the same rows, [1, n, rotary_dim] and [1, n, rank].
    `attend`: over the kept vectors."""
    rotary_dim = rotated.shape[-1]
    key_dim = query.shape[-1] - rotary_dim
    plain, turned = query[..., :key_dim], query[..., key_dim:]
    absorbed = torch.cat([turned, torch.bmm(plain, up.keys)], dim=-1)
    mixed = attend(absorbed, *halves(rotated, latent), replace(spec, is_latent=True))
    values = torch.bmm(mixed[..., rotary_dim:].transpose(0, 1), up.values.transpose(1, 2))
    return values.transpose(0, 1)


def halves(rotated: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [1, n, (rotary_dim + rank) / 2] and views of one, of what a layer keeps: the key part with a
    position [1, n, rotary_dim], where rotary_dim may be 0, and the latent [1, n, rank]; their sum is even."""
    keys, values = torch.cat([rotated, latent], dim=-1).chunk(2, dim=-1)
    return keys, values


def parts(keys: torch.Tensor, values: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The opposite of `halves`: the rotated part [1, n, rotary_dim] and the latent [1, n, rank]."""
    kept = joined(keys, values)
    return kept[..., :rotary_dim], kept[..., rotary_dim:]


def joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The kept vectors, [..., n, 2 * width], of two halves [..., n, width]: a copy, unless both are views of one."""
    width = keys.shape[-1]
    lies_together = (
        keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        and keys.stride() == values.stride()
        and keys.stride(-1) == 1
        and keys.stride(-2) >= 2 * width
        and values.storage_offset() == keys.storage_offset() + width
    )
    if lies_together:
        return keys.as_strided((*keys.shape[:-1], 2 * width), keys.stride())
    return torch.cat([keys, values], dim=-1)


def attended(keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention multiplies queries with and what it mixes: keys and values, or twice the kept vectors."""
    if not spec.is_latent:
        return keys, values
    kept = joined(keys, values)
    return kept, kept
