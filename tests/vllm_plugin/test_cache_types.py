"""Caches that change numbers are refused by name, whoever asks for them."""

from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend.core.errors import ModelNotBlendableError
from vllm_running import needs_vllm

pytestmark = needs_vllm

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("cache_dtype", "stored", "found"),
    [
        ("auto", None, ""),
        ("bfloat16", {"kv_cache_scheme": SCHEME}, ""),  # the command wins
        ("float16", None, ""),
        ("fp8", None, "fp8"),
        ("fp8_e5m2", None, "fp8_e5m2"),
        ("auto", {"quant_method": "compressed-tensors", "kv_cache_scheme": None}, ""),
        (
            "auto",
            {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME},
            "kv_cache_scheme of the checkpoint",
        ),
        ("auto", {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "'FP8' (kv_cache_quant_algo of"),
        ("auto", {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "'FP8' (kv_cache_quant"),
    ],
)
def test_by_the_configuration(cache_dtype: str, stored: Any, found: str) -> None:
    from cacheblend.engines.vllm import compat

    parallel = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_size=1, distributed_executor_backend="uni", world_size=1
    )
    hf = SimpleNamespace(
        architectures=["LlamaForCausalLM"], **({} if stored is None else {"quantization_config": stored})
    )
    model = SimpleNamespace(
        hf_config=hf, hf_text_config=hf, use_mla=False, is_multimodal_model=False, runner_type="generate"
    )
    config: Any = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        lora_config=None,
        speculative_config=None,
    )
    refused = compat.refusals(config)
    if not found:
        assert refused == []
    else:
        assert len(refused) == 1
        assert found in refused[0] and "--kv-cache-dtype bfloat16" in refused[0]


def test_by_the_layers_that_were_made() -> None:
    """Which is the last word: a layer may have taken another type than the configuration names."""
    from cacheblend.engines.vllm import compat_model

    layers = [SimpleNamespace(layer_name=f"layers.{n}", kv_cache_dtype="auto") for n in range(3)]
    compat_model.check_caches([*layers, SimpleNamespace(layer_name="old")])
    layers[2].kv_cache_dtype = "fp8"
    with pytest.raises(
        ModelNotBlendableError, match=r"layers\.2 has a KV cache of type fp8, .* --kv-cache-dtype bfloat16"
    ):
        compat_model.check_caches(layers)
