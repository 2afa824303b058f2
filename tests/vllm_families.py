"""Families of decoders as tiny random models that vLLM's CPU build loads: those of `families`, with heads of 32."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from families import BLENDABLE, SMALL, YARN_ROPE

HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Of 32 numbers each, the fewest that the attention of vLLM's CPU build has."""

LATENTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,  # the only ones of the CPU build's kernel
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
}
"""Of models with latent attention."""

_LONG = {"original_max_position_embeddings": 1024}  # vLLM has cosines for so many positions, times the factor

OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 1.0},  # or all answers are alike
    "cohere2": {"logit_scale": 1.0, "sliding_window": 160},
    "mistral-window": {"sliding_window": 160},  # or an answer sees hardly anything that was stored
    "phi": {"num_key_value_heads": 2, "intermediate_size": 256},  # as all that were published; vLLM 0.31 reads neither
    "gpt_neox": {"num_key_value_heads": 2},  # it has as many as heads, and vLLM believes the config
    "deepseek_v2": {**LATENTS, "n_group": 1, "topk_group": 1},  # vLLM's CPU build always has groups
    "deepseek_v2-yarn": {**LATENTS, "n_group": 1, "topk_group": 1, "rope_parameters": {**YARN_ROPE, **_LONG}},
    "deepseek_v3": {**LATENTS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # vLLM reads them
    "glm4_moe_lite": {**LATENTS, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},  # vLLM reads them
}

REACH = (
    *("llama", "mistral-window", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
    *("gemma3_text", "phi", "phi3", "granite", "granitemoe", "glm", "glm4", "glm4_moe", "olmo", "olmo2", "olmo3"),
    *("olmoe", "cohere", "cohere2", "starcoder2", "gpt_oss", "smollm3", "ernie4_5", "seed_oss", "exaone4"),
    *("minimax_m2", "nemotron", "hunyuan_v1_dense", "stablelm", "gpt_neox", "arcee", "apertus"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
"""Names of `families.BLENDABLE`."""

PLAIN_OPERATIONS = {"compilation_config": {"custom_ops": ["none"]}}
ENGINES: dict[str, dict[str, Any]] = dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), PLAIN_OPERATIONS)
"""What vLLM is started with: its CPU kernel for rotations takes slices for whole rows, and turns other numbers."""


def write_model(name: str, folder: Path, **shape: Any) -> Path:
    """A model whose tokens depend on far context: large embeddings, attention that looks something up.

    `shape`: fields of its configuration that are otherwise.
    """
    family = next(each for each in BLENDABLE if each.name == name)
    fields = {**SMALL, **HEADS, **family.overrides, **OVERRIDES.get(name, {}), **shape}
    if "head_dim" in fields:
        fields["head_dim"] = 32
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() >= 2:
            scale = 0.5 if "embed" in label or "lm_head" in label else weight.shape[-1] ** -0.5
            scale *= 1.8 if any(part in label for part in ("q_proj", "k_proj", "q_b_proj")) else 1
            torch.nn.init.normal_(weight, 0, scale)
    model.save_pretrained(folder / name)
    return folder / name
