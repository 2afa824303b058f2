"""Every use of vLLM's internals that concerns the type of numbers in its KV cache. vLLM's FP8 caches hold bytes
(uint8); backends see them as one of torch's float8 types. Numbers are divided by a layer's scale when they are written,
and multiplied by it when they are read; there is one for keys and one for values, from the checkpoint, else 1."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cacheblend.core.errors import ModelNotBlendableError

PLAIN_TYPES = ("auto", "bfloat16", "float16")  # types of a KV cache that keeps numbers as they are
FP8_TYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")  # types with one scale for a layer's keys and one for its values
_WAY_OUT = "--kv-cache-dtype bfloat16 makes another one"


def refused_cache(cache_config: Any, hf_config: Any) -> str:
    """What is refused about the cache that the command or, with "auto", the checkpoint asks for; or ""; `hf_config`: of
    the model; a checkpoint's scales are used with FP8 types of the command, too."""
    asked = str(cache_config.cache_dtype)
    if asked not in (*PLAIN_TYPES, *FP8_TYPES):
        return f"a KV cache of type {asked} ({_WAY_OUT})"
    if asked in PLAIN_TYPES[1:]:
        return ""
    only_scales = asked in FP8_TYPES  # the command has chosen the type
    for name, scheme in _schemes(hf_config):
        reason = ""
        if not isinstance(scheme, dict):
            reason = "" if only_scales or str(scheme).upper() == "FP8" else f"type {scheme}"
        elif scheme.get("strategy", "tensor") != "tensor":
            reason = f"strategy {scheme['strategy']!r}: blending knows one scale for a layer"
        elif not only_scales:
            is_static_8 = scheme.get("num_bits", 8) == 8 and not scheme.get("dynamic")
            is_known = is_static_8 and scheme.get("type", "float") == "float"
            reason = "" if is_known else "another type than FP8 with static scales"
        if reason:
            return f"a KV cache of {reason} ({name} of the checkpoint: {scheme!r}; {_WAY_OUT})"
    return ""


def is_fp8(cache_config: Any, hf_config: Any) -> bool:
    """Whether a cache that is not refused is FP8, in at least one layer; see `refused_cache`."""
    asked = str(cache_config.cache_dtype)
    return asked in FP8_TYPES or (asked == "auto" and any(True for _ in _schemes(hf_config)))


def check_caches(layers: Sequence[Any]) -> None:
    """Refuses attention modules whose caches hold what blending cannot write or read. Raises ModelNotBlendableError:
    with the way out."""
    for layer in layers:
        found, reason = str(getattr(layer, "kv_cache_dtype", "auto")), ""
        if found not in (*PLAIN_TYPES, *FP8_TYPES):
            reason = f"a KV cache of type {found}, which blending does not write"
        elif found in FP8_TYPES and (layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1):
            reason = f"a KV cache of type {found} with a scale for each head, and blending knows one for a layer"
        if reason:
            raise ModelNotBlendableError(f"{layer.layer_name} has {reason}; start vLLM with --kv-cache-dtype bfloat16")


def fp8_scales(layer: Any) -> tuple[float, float] | None:
    """The scales of an attention module's keys and values, as the host knows them; None: its cache is not FP8."""
    if str(getattr(layer, "kv_cache_dtype", "auto")) not in FP8_TYPES:
        return None
    return float(layer._k_scale_float), float(layer._v_scale_float)


@contextmanager
def plain_queries(layers: Sequence[Any]) -> Iterator[None]:
    """Inside, attention modules do not quantise queries, as some backends have them do beside an FP8 cache. What is
    captured then does not depend on the cache's type, and blends lose nothing by it."""
    quantisers = {layer: layer.query_quant for layer in layers if getattr(layer, "query_quant", None) is not None}
    for layer in quantisers:
        layer.query_quant = None
    try:
        yield
    finally:
        for layer, quantiser in quantisers.items():
            layer.query_quant = quantiser


def _schemes(hf_config: Any) -> Iterator[tuple[str, Any]]:
    stored = getattr(hf_config, "quantization_config", None) or {}
    inner = stored.get("quantization") if isinstance(stored, dict) else None
    for each in (stored, inner or {}):
        for name in ("kv_cache_scheme", "kv_cache_quant_algo") if isinstance(each, dict) else ():
            if each.get(name):
                yield name, each[name]


def float32_precision(dtype: torch.dtype) -> str | None:
    """In what workers multiply numbers of a model of float32, if it is less; None: it is not, or the model's is another
    type. The setting is the environment's, the same in all of vLLM's processes; only workers apply it."""
    from vllm import envs

    precision = str(getattr(envs, "VLLM_FLOAT32_MATMUL_PRECISION", "highest"))
    return precision if dtype == torch.float32 and precision != "highest" else None
