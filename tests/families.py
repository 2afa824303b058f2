"""The shared matrix of architectures: tiny random models of every family that the parity tests and `doctor` run on."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 512
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """One row of the matrix."""

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _family(name: str, model_type: str | None = None, **overrides: Any) -> Family:
    return Family(name, model_type or name, overrides)


BLENDABLE = [
    _family("llama"),
    _family("llama-llama3", "llama", rope_parameters=LLAMA3_ROPE),
    _family("llama-yarn", "llama", rope_parameters=YARN_ROPE),
    _family("llama-linear", "llama", rope_parameters=LINEAR_ROPE),
    _family("llama-mha", "llama", num_key_value_heads=4, attention_bias=True),
    _family("mistral", sliding_window=None),
    _family("mistral-window", "mistral", sliding_window=24),
    _family("mixtral", num_local_experts=4),
    _family("qwen2"),
    _family("qwen2-window", "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=2),
    _family("qwen2_moe", **MOE, shared_expert_intermediate_size=32),
    _family("qwen3", head_dim=16),
    _family("qwen3_moe", head_dim=16, **MOE),
    _family("phi", partial_rotary_factor=0.5),
    _family("phi3"),
    _family("phi3-longrope", "phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=1024),
    _family("gemma", head_dim=16),
    _family("gemma2", head_dim=16, sliding_window=24, query_pre_attn_scalar=16),
    _family("gemma3_text", head_dim=16, sliding_window=24, query_pre_attn_scalar=16, num_hidden_layers=7),
    _family("olmo"),
    _family("olmo2"),
    _family("olmo3", sliding_window=24),
    _family("olmoe", num_experts=4, num_experts_per_tok=2),
    _family("granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    _family("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    _family("cohere"),
    _family("cohere2", sliding_window=24),
    _family("stablelm"),
    _family("glm", head_dim=16),
    _family("glm4", head_dim=16),
    _family("smollm3"),
    _family("gpt_oss", head_dim=16, sliding_window=24, num_local_experts=4),
    _family("ernie4_5"),
    _family("starcoder2"),
    _family("exaone4", sliding_window=24),
    _family("gpt_neox"),
    _family("nemotron"),
    _family("helium", head_dim=16),
    _family("arcee"),
    _family("seed_oss", head_dim=16),
    _family("persimmon"),
    _family("apertus"),
    _family("hunyuan_v1_dense", head_dim=16),
    _family("falcon-rope", "falcon", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
]

REFUSED = [
    _family("llama-dynamic", "llama", rope_parameters=DYNAMIC_ROPE),
    _family("gpt2", n_layer=4, n_head=4, n_embd=64),
    _family("opt", ffn_dim=128, word_embed_proj_dim=64),
    _family("bloom", n_layer=4, n_head=4),
    _family("mpt", n_layers=4, n_heads=4, d_model=64),
    _family("mamba", state_size=8),
    _family("falcon-alibi", "falcon", alibi=True),
    _family("deepseek_v2", kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16),
    _family("deepseek_v3", kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16),
    _family("llama4_text", num_local_experts=2, attention_chunk_size=32, intermediate_size_mlp=64, head_dim=16),
]


@lru_cache(maxsize=None)
def tiny_model(family_name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random model of the family, its matrices scaled up so that layers matter. Do not change it."""
    family = next(f for f in [*BLENDABLE, *REFUSED] if f.name == family_name)
    config = AutoConfig.for_model(family.model_type, **{**SMALL, **family.overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def names(families: list[Family]) -> Iterator[str]:
    """Their names."""
    return (family.name for family in families)


if __name__ == "__main__":
    print(*names(BLENDABLE), sep="\n", file=sys.stdout)
