"""transformers' caches of a prompt: from them, and to them, in the form of the core's buffers."""

from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cacheblend.core.kernels.latent import halves, parts
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.hf.recurrent import LayerKinds, States


def rotary_dims(model: nn.Module) -> dict[int, int]:
    """Numbers of the rotated key part of each layer of a model that attends over latents, by the layer's index."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    return {int(module.layer_idx): int(module.qk_rope_head_dim) for module in found}


def whole_cache(model: Any, kinds: LayerKinds) -> DynamicCache:
    """An empty cache that keeps all tokens, also in layers with a sliding window."""
    if not kinds.has_other_layers:
        return DynamicCache()  # without a config it knows no windows
    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(each) is DynamicSlidingWindowLayer else each for each in cache.layers]
    return cache


def layers_with_states(model: Any) -> set[int]:
    """The layers for which transformers' own cache keeps a state, as far as its config tells.

    In half precision a state may be too small in a few rows of noise to be told from rounding.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # of a config that it does not understand: such a model runs with a cache of its own
        return set()
    return {index for index, layer in enumerate(layers) if hasattr(layer, "update_recurrent_state")}


def kv_of_cache(model: nn.Module, cache: DynamicCache, row: int = 0) -> list[LayerKV]:
    """The KV of one sequence in transformers' cache, in the form of the core's buffers; of layers with attention.

    Where a layer attends over latents, transformers has the latent in the place of keys, and the rotated part in that
    of values.
    """
    dims = rotary_dims(model)
    kept = {
        index: (layer.keys[row], layer.values[row])
        for index, layer in enumerate(cache.layers)
        if getattr(layer, "keys", None) is not None
    }
    return [
        LayerKV(*(halves(second, first) if index in dims else (first, second)))
        for index, (first, second) in kept.items()
    ]


def fill_cache(model: Any, kv: list[LayerKV], states: States | None = None) -> DynamicCache:
    """Moves a prompt's KV into a cache of transformers' model; empties `kv`, one entry per layer (of no heads where a
    layer has no attention), so that no layer is held twice. `states` of recurrent layers are copied.
    """
    cache, dims = DynamicCache(config=model.config), rotary_dims(model)
    for layer in range(len(kv)):
        first, second = kv.pop(0)
        if layer in dims:
            second, first = parts(first, second, dims[layer])
        if first.shape[0]:
            cache.update(first[None], second[None], layer)
    for layer, state in (states or {}).items():
        for (kind, number), part in state.items():
            update = cache.update_conv_state if kind == "conv" else cache.update_recurrent_state
            update(part, layer, state_idx=number)
    return cache
