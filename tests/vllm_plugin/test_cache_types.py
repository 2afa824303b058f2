"""Caches that change numbers otherwise than FP8 with a scale for a layer are refused by name, whoever asks for them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.internals.attention_shim import AttentionShim
from cacheblend.engines.vllm.internals.kv_cache import check_caches, fp8_scales, is_fp8, plain_queries, refused_cache
from vllm_requests import refusals

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("cache_dtype", "stored", "found"),
    [
        ("auto", None, ""),
        ("bfloat16", {"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, ""),  # the command wins
        ("float16", None, ""),
        ("fp8", None, ""),
        ("fp8_e4m3", {"kv_cache_scheme": SCHEME}, ""),
        ("fp8_e5m2", None, ""),
        ("nvfp4", None, "a KV cache of type nvfp4"),
        ("fp8_per_token_head", None, "a KV cache of type fp8_per_token_head"),
        ("int8_per_token_head", None, "a KV cache of type int8_per_token_head"),
        ("fp8_inc", None, "a KV cache of type fp8_inc"),
        ("auto", {"quant_method": "compressed-tensors", "kv_cache_scheme": None}, ""),
        ("auto", {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, ""),
        ("auto", {"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "another type than FP8 with static scales"),
        ("auto", {"kv_cache_scheme": {**SCHEME, "dynamic": True}}, "another type than FP8 with static scales"),
        ("auto", {"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}, "strategy 'attn_head': blending knows one"),
        ("fp8", {"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}, "kv_cache_scheme of the checkpoint"),
        ("auto", {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, ""),
        ("auto", {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "type NVFP4 (kv_cache_quant_algo of"),
        ("auto", {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "INT8"}}, "type INT8 (kv_cache"),
    ],
)
def test_by_the_configuration(cache_dtype: str, stored: Any, found: str) -> None:
    refused = refusals(cache_dtype, hf={} if stored is None else {"quantization_config": stored})
    if not found:
        assert refused == []
    else:
        assert len(refused) == 1
        assert found in refused[0] and "--kv-cache-dtype bfloat16" in refused[0]


def test_scales_that_change_while_serving_are_refused() -> None:
    """They would be 1 when blending reads them, and others later."""
    hf = SimpleNamespace()
    assert "calculate_kv_scales" in refused_cache(SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True), hf)
    assert refused_cache(SimpleNamespace(cache_dtype="auto", calculate_kv_scales=True), hf) == ""


def layers_of(cache_dtype: str, scale: Any = 1.0) -> list[Any]:
    scales = {"_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(scale)}
    layers = [SimpleNamespace(layer_name=f"layers.{n}", kv_cache_dtype="auto", **scales) for n in range(3)]
    layers[2].kv_cache_dtype = cache_dtype
    return layers


def test_by_the_layers_that_were_made() -> None:
    """Which is the last word: a layer may have taken another type than the configuration names."""
    fitting = [*layers_of("fp8", 0.25), SimpleNamespace(layer_name="old")]
    check_caches(fitting)
    fitting[2]._k_scale_float, fitting[2]._v_scale_float = 0.25, 0.5
    assert [fp8_scales(layer) for layer in fitting] == [None, None, (0.25, 0.5), None]
    changing = layers_of("fp8_e5m2")
    changing[2].calculate_kv_scales = True
    for layers, message in (
        (layers_of("nvfp4"), r"layers\.2 has a KV cache of type nvfp4, .* --kv-cache-dtype bfloat16"),
        (layers_of("fp8", [1.0, 1.0]), r"layers\.2 .* a scale for each head, .* --kv-cache-dtype bfloat16"),
        (changing, r"layers\.2 .* found while serving \(calculate_kv_scales\); .* --kv-cache-dtype bfloat16"),
    ):
        with pytest.raises(ModelNotBlendableError, match=message):
            check_caches(layers)


@pytest.mark.parametrize(
    ("cache_dtype", "stored", "expected"),
    [
        ("auto", None, False),
        ("bfloat16", {"kv_cache_scheme": SCHEME}, False),
        ("fp8_e5m2", None, True),
        ("auto", {"kv_cache_scheme": SCHEME}, True),  # whether or not vLLM has said so to this process
        ("auto", {"quantization": {"kv_cache_quant_algo": "FP8"}}, True),
    ],
)
def test_both_sides_know_whether_a_cache_is_fp8(cache_dtype: str, stored: Any, expected: bool) -> None:
    hf = SimpleNamespace(**({} if stored is None else {"quantization_config": stored}))
    assert is_fp8(SimpleNamespace(cache_dtype=cache_dtype), hf) is expected


def test_queries_are_not_quantised_while_layers_run_for_a_blend() -> None:
    """As FlashAttention has them beside FP8 caches; afterwards vLLM's own passes have them quantised again."""
    quantiser = torch.nn.Identity()
    with_one, without = torch.nn.Module(), SimpleNamespace()
    with_one.query_quant = quantiser
    with pytest.raises(KeyError), plain_queries([with_one, without]):
        assert with_one.query_quant is None
        raise KeyError
    assert with_one.query_quant is quantiser

    shim = AttentionShim(SimpleNamespace(kv_cache=None, layer_name="layers.3"))
    shim.answer = lambda query, keys, values: query
    query = torch.ones(2, 8)
    with pytest.raises(ModelNotBlendableError, match=r"layers\.3 quantises its queries to torch\.float8_e4m3fn; .*16"):
        shim.forward(None, query.to(torch.float8_e4m3fn), query, query, output=torch.empty(2, 8))
