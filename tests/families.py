"""The shared matrix of architectures: tiny random models of every family, for parity tests and `doctor`."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

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
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED_MOE = {**ROUTED_MOE, "n_group": 2, "topk_group": 1}
YARN_MSCALE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GATED_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LINEAR_HEADS = {"linear_head_dim": 16, "linear_num_heads": 2}
MAMBA2_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
NEMOTRON_H = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "head_dim": 16}
MAMBA2 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
BART = {
    "d_model": 64,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_layers": 1,
}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ALTERNATING = {"sliding_window": 24, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
MIMO = {"sliding_window": 24, **ROUTED_MOE}
PER_LAYER_INPUT = {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
}


@dataclass(frozen=True)
class Family:
    """One architecture of the matrix."""

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # for a refused family: regular expression that the error message matches

    def __str__(self) -> str:
        return self.name


def _family(name: str, model_type: str | None = None, **overrides: Any) -> Family:
    return Family(name, model_type or name, overrides)


def _refused(name: str, reason: str, model_type: str | None = None, **overrides: Any) -> Family:
    return Family(name, model_type or name, overrides, reason)


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
    # Unscaled attention, the class's default, which no published model has, makes rounding of the rotations large.
    _family("granitemoe", num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.25),
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
    _family("nanochat"),
    _family("nemotron"),
    _family("helium", head_dim=16),
    _family("arcee"),
    _family("seed_oss", head_dim=16),
    _family("persimmon"),
    _family("apertus"),
    _family("hunyuan_v1_dense", head_dim=16),
    _family("afmoe", head_dim=16, sliding_window=24, **MOE),
    _family("aria_text", moe_num_experts=4),
    _family("bitnet"),
    _family("cohere2_moe", head_dim=16, sliding_window=24, **MOE),
    _family("cwm", head_dim=16, sliding_window=24),
    _family(
        "dbrx",
        d_model=64,
        n_layers=4,
        n_heads=4,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    ),
    _family("dots1", head_dim=16, n_shared_experts=1, first_k_dense_replace=1, **ROUTED_MOE),
    _family("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    _family("exaone_moe", head_dim=16, sliding_window=24, **MOE),
    _family("flex_olmo", num_experts=4, num_experts_per_tok=2),
    _family("flint", head_dim=16, **ALTERNATING, **MOE),
    _family("gemma3-linear", "gemma3_text", head_dim=16, **ALTERNATING, rope_parameters=GEMMA3_ROPE),
    _family(
        "gemma4_text",
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        **ALTERNATING,
    ),
    _family("gemma4_unified_text", head_dim=16, global_head_dim=32, **ALTERNATING),
    _family("glm4_moe", head_dim=16, **ROUTED_MOE),
    _family("granite_swa", sliding_window=24),
    _family("granitemoe_swa", sliding_window=24, **LOCAL_MOE),
    _family("granitemoehybrid-nope", "granitemoehybrid", **LOCAL_MOE, layer_types=["attention"] * 4),
    _family("granitemoeshared", shared_intermediate_size=32, **LOCAL_MOE),
    _family("hunyuan_v1_moe", head_dim=16, num_experts=4, moe_topk=2),
    _family("hy_v3", head_dim=16, **MOE),
    _family("hyperclovax"),
    _family("jais2"),
    _family("jetmoe", kv_channels=16, num_key_value_heads=4, **{**LOCAL_MOE, "num_experts_per_tok": 1}),
    _family("kolibri1", head_dim=16, **ALTERNATING, **MOE),
    _family("laguna", head_dim=16, num_attention_heads_per_layer=[4, 2, 4, 2], **ALTERNATING, **MOE),
    _family("lfm2-full", "lfm2"),
    _family("mellum", head_dim=16, **MOE),
    _family("mimo_v2_flash", head_dim=16, swa_head_dim=16, v_head_dim=16, swa_v_head_dim=16, **MIMO),
    _family("minimax_m2", head_dim=16, **LOCAL_MOE),
    _family("minimax_m3-full", "minimax_m3_vl_text", head_dim=16, moe_intermediate_size=32, **LOCAL_MOE),
    _family("ministral", head_dim=16, sliding_window=24),
    _family("ministral3", head_dim=16, sliding_window=24),
    _family("mixtral-window", "mixtral", num_local_experts=4, sliding_window=24),
    _family("modernbert-decoder", local_attention=24),
    _family("phimoe", num_local_experts=4),
    _family("qwen3-yarn", "qwen3", head_dim=16, rope_parameters=YARN_ROPE),
    _family("solar_open", head_dim=16, **ROUTED_MOE),
    _family("vaultgemma", head_dim=16, sliding_window=24),
    _family("deepseek_v2", **LATENT, **ROUTED_MOE, first_k_dense_replace=1),
    _family(
        "deepseek_v2-yarn", "deepseek_v2", **{**LATENT, "q_lora_rank": None}, **ROUTED_MOE, rope_parameters=YARN_ROPE
    ),
    _family("deepseek_v3", **LATENT, **GROUPED_MOE, first_k_dense_replace=1),
    _family(
        "deepseek_v3-yarn", "deepseek_v3", **LATENT, **GROUPED_MOE, rope_parameters=YARN_MSCALE, rope_interleave=False
    ),
    _family("glm4_moe_lite", **LATENT, **ROUTED_MOE),
    _family("minicpm3", **LATENT),
    _family("youtu", **LATENT),
    _family("kimi_linear-full", "kimi_linear", **LATENT, **ROUTED_MOE, layer_types=[FULL] * 4),
    _family("axk1", **LATENT, **GROUPED_MOE),
]
# Some families are newer than the oldest supported transformers.
BLENDABLE = [family for family in BLENDABLE if family.model_type in CONFIG_MAPPING]

HYBRID = [
    # Recurrent layers beside attention: exact prefixes are reused with the states behind them
    _family("jamba", mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1, num_experts=1),
    _family("lfm2", layer_types=["conv", FULL, "conv", FULL]),
    _family("lfm2_moe", layer_types=["conv", FULL, "conv", FULL], **MOE),
    _family("qwen3_next", head_dim=16, shared_expert_intermediate_size=32, **GATED_DELTA, **MOE),
    _family("qwen3_5_text", head_dim=16, **GATED_DELTA),
    _family("granitemoehybrid", layer_types=["mamba", "attention"] * 2, **LOCAL_MOE, **MAMBA2_HEADS),
    _family("falcon_h1", **MAMBA2),
    _family("nemotron_h", hybrid_override_pattern="M*M-*-", **{**NEMOTRON_H, "num_hidden_layers": 6}),
    _family("olmo_hybrid", head_dim=16, **GATED_DELTA),
    # ... and attention over latents
    _family("kimi_linear", **LATENT, **ROUTED_MOE, layer_types=[LINEAR, FULL, LINEAR, FULL], **LINEAR_HEADS),
    _family("bailing_hybrid", **LATENT, **ROUTED_MOE, layer_group_size=2, head_dim=16),
    # Attention layers behind the last recurrent one: there rows can be left out
    _family("lfm2-tail", "lfm2", layer_types=["conv", FULL, FULL, FULL]),
    _family("olmo_hybrid-tail", "olmo_hybrid", head_dim=16, layer_types=[LINEAR, FULL, FULL, FULL], **GATED_DELTA),
    _family(
        "granitemoehybrid-tail",
        "granitemoehybrid",
        layer_types=["mamba", *["attention"] * 3],
        **LOCAL_MOE,
        **MAMBA2_HEADS,
    ),
]
HYBRID = [family for family in HYBRID if family.model_type in CONFIG_MAPPING]

REFUSED = [
    _refused("llama-dynamic", "depend on the prompt's length", "llama", rope_parameters=DYNAMIC_ROPE),
    # Positions are added to the embeddings
    _refused("gpt2", "positions to its embeddings", n_layer=4, n_head=4, n_embd=64),
    _refused("opt", "positions to its embeddings", ffn_dim=128, word_embed_proj_dim=64),
    _refused("xglm", "positions to its embeddings", d_model=64, attention_heads=4, num_layers=4, ffn_dim=64),
    _refused("gpt_bigcode", "positions to its embeddings", n_layer=4, n_head=4, n_embd=64),
    _refused("biogpt", "positions to its embeddings"),
    _refused("bert-decoder", "positions to its embeddings", "bert", is_decoder=True),
    _refused("bart", "position", **BART),
    _refused("pegasus", "position", **BART),
    # Their own attention functions, which cannot be replaced
    _refused("bloom", "alibi", n_layer=4, n_head=4),
    _refused("mpt", "cannot be run", n_layers=4, n_heads=4, d_model=64),
    _refused("falcon-alibi", "cannot be run", "falcon", alibi=True),
    _refused("falcon-rope", "cannot be run", "falcon", alibi=False, num_kv_heads=2),
    _refused("gptj", "cannot be (run|re-positioned)", n_layer=4, n_head=4, n_embd=64, rotary_dim=8),
    _refused("codegen", "cannot be (run|re-positioned)", n_layer=4, n_head=4, n_embd=64, rotary_dim=8),
    _refused("gpt_neox_japanese", "cannot be run"),
    _refused("doge", "cannot be run"),
    _refused("diffllama", "attention interface 2 times"),
    # Latent attention to tokens that an indexer selects, two attentions a layer
    _refused("deepseek_v32", "deepseek_v32 attends sparsely: .* 2048 tokens", **LATENT, **ROUTED_MOE),
    _refused("glm_moe_dsa", "glm_moe_dsa attends sparsely", **LATENT, **ROUTED_MOE),
    _refused("axk2", "axk2 attends sparsely", **LATENT, **ROUTED_MOE),
    _refused("dots3_note_text", "dots3_note_text attends sparsely", **LATENT, **ROUTED_MOE),
    _refused("hy_v4", "hy_v4 attends sparsely", **LATENT, **ROUTED_MOE),
    _refused("longcat_flash", "decoder layers", **LATENT, **ROUTED_MOE),
    # Keys and values that are not of the same shape
    _refused("mimo_v2_flash-narrow", "keys .* values", "mimo_v2_flash", head_dim=16, v_head_dim=8, **MIMO),
    # Layers that mix rows outside attention, or attention that is not causal by position and window
    _refused("mamba", "no layer .* has attention", state_size=8),
    _refused("minimax", "layer 1 .* cannot be run on its own", head_dim=16, **LOCAL_MOE),
    _refused("inkling_text", "to its attention|layer 0", head_dim=16, num_local_experts=4, **ROUTED_MOE, **ALTERNATING),
    _refused(
        "llama4_text", "fixed chunks", attention_chunk_size=32, intermediate_size_mlp=64, head_dim=16, **LOCAL_MOE
    ),
    _refused(
        "minimax_m3-sparse",
        "block_indices",
        "minimax_m3_vl_text",
        head_dim=16,
        moe_intermediate_size=32,
        layer_types=["minimax_m3_sparse", FULL] * 2,
        **LOCAL_MOE,
    ),
    # Layers with arguments that blending does not support
    _refused("gemma3n_text", "hidden_size_per_layer_input = 8", head_dim=16, num_kv_shared_layers=0, **PER_LAYER_INPUT),
    _refused("recurrent_gemma", "argument 1", lru_width=64, attention_window_size=24),
]
REFUSED = [family for family in REFUSED if family.model_type in CONFIG_MAPPING]


SHARED = set[int]()
"""Of the models that `tiny_model` made: what is known of one stays true."""


@cache
def tiny_model(family_name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random model of the family, with matrices scaled up so that layers have an effect. Shared: do not change it."""
    family = next(f for f in [*BLENDABLE, *HYBRID, *REFUSED] if f.name == family_name)
    config = AutoConfig.for_model(family.model_type, **{**SMALL, **family.overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # older transformers choose SDPA, which drops the soft-cap
    for parameter in model.parameters():  # buffers (inverse frequencies) stay fp32, as in a loaded model
        parameter.data = (parameter.data * (3 if parameter.dim() > 1 else 1)).to(dtype)
    SHARED.add(id(model))
    return model
