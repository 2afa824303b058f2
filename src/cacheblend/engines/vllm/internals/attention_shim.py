"""What stands in for vLLM's attention modules while layers are run on some rows of a prompt.

Of latent attention (MLA):

MLAAttention(q, latent, rotated)   [n, heads, key_dim + rotary_dim], [n, rank], [n, 1, rotary_dim]
its cache on CPUs                  [blocks, block size, rank + rotary_dim]: latent, then rotated part
W_UK_T, W_UV                       [heads, key_dim, rank], [heads, rank, value_dim]: what `kv_b_proj` does
"""

from collections.abc import Callable
from typing import Any

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.latent import UpProjection, attend_absorbed, parts

AttentionAnswer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query, keys, values), [n, heads, head_dim] each, to the attention's output [n, heads, head_dim]."""


NO_ADAPTER = 0  # what vLLM calls the LoRA adapter of rows without one; adapters count from 1


class AttentionShim:
    """Replaces an attention module in vLLM's look-up, and passes its queries, keys and values to `answer`."""

    def __init__(self, real: Any) -> None:
        self.real, self.kv_cache, self.layer_name = real, real.kv_cache, real.layer_name
        self.impl = self
        self.answer: AttentionAnswer | None = None

    def do_kv_cache_update(self, *_: Any) -> None:
        """Does nothing: the blended prefill writes fresh KV itself."""

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        """Attention of [n, heads, head_dim] each; writes to `output` as vLLM's implementations do."""
        answer, output = self.opened(query, options["output"])
        return output.copy_(answer(query, key, value).view_as(output))

    def opened(self, query: torch.Tensor, output: torch.Tensor) -> tuple[AttentionAnswer, torch.Tensor]:
        """What answers, and where the answer goes. Raises ModelNotBlendableError: queries come in another type than the
        answer has."""
        if self.answer is None:
            raise RuntimeError(f"{self.layer_name} was called outside of a layer runner")
        if query.dtype != output.dtype:
            raise ModelNotBlendableError(
                f"{self.layer_name} quantises its queries to {query.dtype}; start vLLM with --kv-cache-dtype bfloat16"
            )
        return self.answer, output


_CHECKED_ROWS = 8


def is_latent(layer: Any) -> bool:
    """Whether an attention module keeps latents."""
    return type(layer).__name__ == "MLAAttention"


def kept_width(layer: Any) -> int:
    """Numbers that a module keeps of a token, an even number. Raises ModelNotBlendableError: it is odd."""
    rank, rotary_dim = int(layer.kv_lora_rank), int(layer.qk_rope_head_dim)
    if (rank + rotary_dim) % 2:
        raise ModelNotBlendableError(
            f"{layer.layer_name} keeps {rank} + {rotary_dim} numbers of a token; an even number can be blended"
        )
    return rank + rotary_dim


def latent_spec(layer: Any) -> AttentionSpec:
    """How a module attends. Raises ModelNotBlendableError: in a way that is not blended."""
    if getattr(layer, "use_sparse", False) or getattr(layer, "indexer", None) is not None:
        raise ModelNotBlendableError(
            f"{layer.layer_name} attends sparsely, to tokens that an indexer selects; the indexer's own keys are not "
            "in the store"
        )
    return AttentionSpec(scaling=float(layer.scale), window=getattr(layer, "sliding_window", None), is_latent=True)


def up_projection(layer: Any) -> UpProjection:
    """The matrices by which a module expands latents, as vLLM keeps them for decoding: views, renewed with weights.
    Raises ModelNotBlendableError: its backend keeps them in a form of its own."""
    keys, values = getattr(layer, "W_UK_T", None), getattr(layer, "W_UV", None)
    if keys is None or values is None:
        raise ModelNotBlendableError(
            f"{layer.layer_name}: the attention backend {layer.attn_backend.get_name()} packs the up-projection; "
            "choose another one (--attention-backend CPU_MLA on CPUs)"
        )
    return UpProjection(keys, values.transpose(1, 2))


def check_expansion(layer: Any, tolerance: float) -> None:
    """Checks that a module's `kv_b_proj`, by which vLLM's prefill expands latents, is `up_projection` and nothing else.
    Raises ModelNotBlendableError: it is not."""
    up = up_projection(layer)
    drawn = torch.randn(_CHECKED_ROWS, int(layer.kv_lora_rank), generator=torch.Generator().manual_seed(0))
    latent = drawn.to(up.keys)
    own = layer.kv_b_proj(latent)[0].view(_CHECKED_ROWS, up.keys.shape[0], -1).transpose(0, 1).float()
    mine = torch.cat(up.expand(latent), dim=-1).float()
    if mine.shape != own.shape or not (mine - own).norm() <= tolerance * own.norm():
        raise ModelNotBlendableError(
            f"{layer.layer_name} expands its latents in another way than by one matrix for each head"
        )


def write_latents(layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows to a module's paged cache, in its backend's layout; see `interface.write_paged`; `keys, values`: [n,
    1, width], the halves of what is kept (`core.kernels.latent`)."""
    turned, latent = parts(keys.transpose(0, 1), values.transpose(0, 1), int(layer.qk_rope_head_dim))
    rows = latent[0].contiguous(), turned.transpose(0, 1).contiguous()
    layer.impl.do_kv_cache_update(*rows, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)


class LatentShim(AttentionShim):
    """Replaces a module with latent attention: attends in the absorbed form, over what `answer` attends to."""

    hisparse_cache = None
    prepare_kv_cache_update = update_kv_cache = AttentionShim.do_kv_cache_update

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self._spec = latent_spec(real)

    def forward_impl(
        self, query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        """Attention of queries [n, heads, key_dim + rotary_dim], see the module; writes to `output`."""
        answer, output = self.opened(query, options["output"])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            return answer(*(part.transpose(0, 1) for part in (q, k, v)))

        turned, kept, up = rotated.transpose(0, 1), latent[None], up_projection(self.real)
        found = attend_absorbed(query.transpose(0, 1), turned, kept, up, attend, self._spec)
        return output.copy_(found.reshape(output.shape))
