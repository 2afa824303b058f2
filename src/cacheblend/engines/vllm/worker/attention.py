"""How each layer attends, and what it keeps of a token: the two kinds of attention modules that vLLM has.

    Attention      keys and values of heads                            records [kv_heads, 2, tokens, head_dim]
    MLAAttention   a latent and one rotated key part for all heads     records [1, 2, tokens, width / 2]

The second is a strategy of its own, since vLLM's model code calls it otherwise (`compat_latent.LatentShim`), and since
heads see keys and values that only its up-projection makes of what is kept. Records are those of the embedded engine
(`core.kernels.latent`), and everything behind the shim is the same for both: loading, re-positioning, deviation,
attention over any rows.
"""

from dataclasses import dataclass
from typing import Any

from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.engines.vllm import compat_latent, compat_model
from cacheblend.engines.vllm.compat_shim import AttentionShim


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention, on this rank.

    Attributes:
        shim: takes the place of vLLM's module while the layer is run.
        spec: how it attends.
        kept: shape of its records.
        heads: of queries, and of what they attend to.
    """

    shim: AttentionShim
    spec: AttentionSpec
    kept: LayerShape
    heads: HeadShape


def attention_of(layer: Any, tolerance: float) -> LayerAttention:
    """Of one of vLLM's attention modules.

    Args:
        layer: the module.
        tolerance: of sums in another order, as a share.

    Raises:
        ModelNotBlendableError: it attends in a way that is not blended.
    """
    return _of_latents(layer, tolerance) if compat_latent.is_latent(layer) else _of_heads(layer)


def _of_heads(layer: Any) -> LayerAttention:
    spec = compat_model.attention_spec(layer)
    kept = LayerShape(int(layer.num_kv_heads), int(layer.head_size))
    heads = HeadShape(int(layer.num_heads), kept.kv_heads, kept.head_dim, spec.window)
    return LayerAttention(AttentionShim(layer), spec, kept, heads)


def _of_latents(layer: Any, tolerance: float) -> LayerAttention:
    spec, width = compat_latent.latent_spec(layer), compat_latent.kept_width(layer)
    compat_latent.check_expansion(layer, tolerance)
    heads = HeadShape(int(layer.num_heads), 1, width, spec.window, is_latent=True)
    return LayerAttention(compat_latent.LatentShim(layer), spec, LayerShape(1, heads.placed_dim), heads)
