"""What a model's config says by itself, before weights are read: whether it can be blended, and the KV layout."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.rope import shift_limit
from cacheblend.core.plan.blocks import KVLayout, LayerShape


def expected_layout(config: PretrainedConfig, dtype: torch.dtype | None = None) -> KVLayout:
    """The KV layout by a config alone, for plans and measurements that load no model; `survey_model` finds the real
    one.

    Assumes that all layers have the same shape. `dtype` None: that of the config, or fp32 if it has none.

    Raises:
        AttributeError: the config lacks the number of layers, heads or dimensions.
    """
    config = config.get_text_config()
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if rank := getattr(config, "kv_lora_rank", None):  # a latent and a rotated key part in halves, see `kernels.latent`
        kept = int(rank) + int(getattr(config, "qk_rope_head_dim", None) or 0)
        return KVLayout((LayerShape(1, -(-kept // 2)),) * int(config.num_hidden_layers), dtype)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVLayout((LayerShape(int(heads), int(width)),) * int(config.num_hidden_layers), dtype)


def check_config(config: Any) -> None:
    """Refuses models by config alone that would fail later with unclear errors.

    Raises:
        ModelNotBlendableError: an encoder-decoder model, attention to tokens that an indexer selects, inputs to each
            layer, layers that share KV, or a RoPE that cannot be shifted.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotBlendableError(f"{config.model_type} is an encoder-decoder model; only decoders are blended")
    text = config.get_text_config(decoder=True)
    top, kinds = getattr(text, "index_topk", None), getattr(text, "layer_types", None)
    if "indexed_attention" in (kinds or ()) or (top and not kinds):
        raise ModelNotBlendableError(
            f"{text.model_type} attends sparsely: an indexer selects the {top} tokens that "
            "each row attends to (DeepSeek sparse attention), so a row's KV depends on a selection that stored KV does "
            "not have; serve it without blending"
        )
    unsupported = {
        "hidden_size_per_layer_input": "gives each layer an input of its own beside the hidden states",
        "num_kv_shared_layers": "has layers that use the keys and values of others",
    }
    for name, found in unsupported.items():
        if value := getattr(text, name, None):
            raise ModelNotBlendableError(
                f"{text.model_type} {found} ({name} = {value}), which blending does not support; "
                f"models of {text.model_type} whose config.json has 0 there can be blended"
            )
    list(shift_limits(text))


def shift_limits(config: Any) -> Iterator[int | None]:
    """Shift limit of each RoPE in the config: one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        yield shift_limit({"original_max_position_embeddings": original, **rope})
