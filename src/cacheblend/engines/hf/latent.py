"""Latent attention (MLA) of transformers models: what their layers cache, and attention over it in the absorbed form. A
layer makes of each row a latent (normalised) and one rotated key part, hands both to the cache, and expands what the
cache gives back to keys and values of every head (`expand_kv`). Here a `LatentTap` takes the cache's place and notes
both, and attention is over the kept vectors themselves (`core.kernels.latent`): what was loaded is never expanded."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels import latent as kernels
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.latent import UpProjection


@dataclass(frozen=True)
class LatentShape:
    """What a layer with latent attention keeps of a token: a latent of `rank` numbers and a rotated key part of
    `rotary_dim` (0: the layer has no positions); and to how many that is expanded, in keys and values of all heads."""

    rank: int
    rotary_dim: int
    expanded: int

    @property
    def width(self) -> int:
        return self.rank + self.rotary_dim


@dataclass
class LatentTap:
    """Takes the place of the cache in a layer's call: notes what the layer would cache, and gives it back."""

    latent: torch.Tensor | None = None
    rotated: torch.Tensor | None = None

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [1, 1, n, rank] and rotated key parts [1, 1, n, rotary_dim], as they are."""
        self.latent, self.rotated = latent, rotated
        return latent, rotated


def latent_attention(layer: nn.Module) -> Any:
    """The module of a decoder layer that attends over latents; None if it has none."""
    return next((module for module in layer.modules() if hasattr(module, "expand_kv")), None)


def attend_absorbed(
    module: Any, query: torch.Tensor, tap: LatentTap, attend: Attend, spec: AttentionSpec
) -> torch.Tensor:
    """A layer's attention in the absorbed form, [n, heads, value_dim]. `module` is the layer's attention; `query` is
    [heads, n, key_dim + rotary_dim], the rotated part last; `tap` has what the layer caches of the same rows; `attend`
    is over the kept vectors. Raises `ModelNotBlendableError` if it cached nothing."""
    if tap.latent is None or tap.rotated is None:
        raise ModelNotBlendableError(f"{type(module).__name__} attends over latents without caching them")
    latent, rotated = tap.latent[0], tap.rotated[0]
    up = up_projection(module, latent, query.shape[-1] - rotated.shape[-1])
    return kernels.attend_absorbed(query, rotated, latent, up, attend, spec)


def up_projection(module: Any, latent: torch.Tensor, key_dim: int) -> UpProjection:
    """The matrices by which a layer's attention expands latents [1, n, rank] of the dtype and device that it computes
    in; `key_dim` is that of a head's key without its rotated part. Of a plain projection they are its own weights.
    Others (quantised, or with adapters) are asked what they make of each dimension alone, once: modules of a view are
    copies, renewed when adapters are switched."""
    linear, rank = module.kv_b_proj, latent.shape[-1]
    if type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and linear.weight.dtype == latent.dtype:
        return UpProjection.of(linear.weight.view(-1, key_dim + int(module.v_head_dim), rank), key_dim)
    known: UpProjection | None = module.__dict__.get("_cacheblend_up")
    if known is None or known.keys.dtype != latent.dtype or known.keys.device != latent.device:
        unit = torch.eye(rank, dtype=latent.dtype, device=latent.device)
        weight = linear(unit).T.reshape(-1, key_dim + int(module.v_head_dim), rank)
        known = module.__dict__["_cacheblend_up"] = UpProjection.of(weight, key_dim)
    return known


@torch.no_grad()
def latent_shape(module: Any, like: torch.Tensor) -> LatentShape:
    """The shape of a layer's attention module; `like` has the dtype and device that it computes in. Raises
    `ModelNotBlendableError` if it keeps an odd number, or its own expansion is not `up_projection` of latents."""
    rank, rotary_dim, heads = int(module.kv_lora_rank), int(module.qk_rope_head_dim), int(module.num_heads)
    if (rank + rotary_dim) % 2:
        raise ModelNotBlendableError(
            f"{type(module).__name__} keeps {rank} + {rotary_dim} numbers of a token; an even number can be blended"
        )
    drawn = torch.randn(1, 1, 8, rank + rotary_dim, generator=torch.Generator().manual_seed(0)).to(like)
    latent, rotated = drawn[..., :rank], drawn[..., rank:]
    own = module.expand_kv(latent, rotated)
    up = up_projection(module, latent[0], own[0].shape[-1] - rotary_dim)
    plain, values = (part[None] for part in up.expand(latent[0, 0]))
    keys = torch.cat([plain, rotated.expand(-1, heads, -1, -1)], dim=-1)
    pairs = zip((keys, values), own, strict=True)
    # Up to rounding in 16 bits, which is below 0.01.
    if not all(a.shape == b.shape and (a.float() - b.float()).norm() <= 0.02 * b.float().norm() for a, b in pairs):
        raise ModelNotBlendableError(
            f"{type(module).__name__} expands its latents in another way than by one matrix for each head"
        )
    return LatentShape(rank, rotary_dim, heads * (keys.shape[-1] + values.shape[-1]))


def check_caching(layer: nn.Module) -> None:
    """Refuses a layer that makes a latent and caches the keys and values that it is expanded to, as code that comes
    with a model may; transformers' own caches the latent. Raises `ModelNotBlendableError`."""
    for module in layer.modules():
        if rank := getattr(module, "kv_lora_rank", None):
            raise ModelNotBlendableError(
                f"{type(module).__name__} has latent attention (kv_lora_rank = {rank}), but caches expanded keys and "
                "values; open the model with transformers' own class, not with code that comes with it"
            )
