"""Tiny random models that vLLM's CPU build loads, and LoRA adapters of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from families import BLENDABLE, SMALL, YARN_ROPE

SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=160),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, norm_topk_prob=True),
}
OPT = OPTConfig(
    vocab_size=2048, hidden_size=64, word_embed_proj_dim=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2
)
"""Adds positions to its embeddings, and cannot be blended."""


def make_model(config: PretrainedConfig, folder: Path) -> Path:
    """A random model whose tokens depend on far context: large embeddings, attention that looks something up."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() >= 2:
            scale = 0.5 if "embed" in label or "lm_head" in label else weight.shape[-1] ** -0.5
            scale *= 1.8 if any(part in label for part in ("q_proj", "k_proj", "q_b_proj")) else 1
            torch.nn.init.normal_(weight, 0, scale)
    model.save_pretrained(folder)
    return folder


def copy_model(model: Path, folder: Path, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    """A model folder with other weights, and these fields of its configuration."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


# ---- layers with a window, or with all rows, in vLLM's hybrid KV cache manager -------------------------------------

PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
PATTERNS = {"gpt-oss": PATTERN[1:]}  # vLLM's takes every other layer, whatever is configured


def group_count(family: str) -> int:
    """Groups of KV cache that vLLM makes of the default layers: the period of their types."""
    return len(PATTERNS.get(family, PATTERN))


def make_hybrid(folder: Path, family: str, window: int, layers: Sequence[str] | None = None) -> Path:
    """A model with this window and these types of layers, six by default."""
    types = [*(layers or PATTERNS.get(family, PATTERN) * (6 // group_count(family)))]
    shape = SHAPE | {"max_position_embeddings": 8192, "num_hidden_layers": len(types)}
    shape |= {"layer_types": types, "sliding_window": window}
    config: PretrainedConfig
    if family == "gemma3":
        config = Gemma3TextConfig(**shape, query_pre_attn_scalar=32)
    elif family == "gpt-oss":
        config = GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2)
    else:
        config = MinistralConfig(**shape)
    make_model(config, folder)
    if family == "ministral":  # vLLM's class of the older name reads the types of layers too
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MistralForCausalLM"]}))
    return folder


# ---- families of decoders: those of `families`, with heads of 32, the fewest of vLLM's CPU build -------------------

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


def make_family(name: str, folder: Path, **shape: Any) -> Path:
    """A model of a family in a folder of this one; `shape`: fields of its configuration that are otherwise."""
    family = next(each for each in BLENDABLE if each.name == name)
    fields = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, **family.overrides}
    fields |= {**OVERRIDES.get(name, {}), **shape}
    if "head_dim" in fields:
        fields["head_dim"] = 32
    return make_model(AutoConfig.for_model(family.model_type, **fields), folder / name)


# ---- LoRA adapters of the models of `MODELS` in PEFT's format, written by hand -------------------------------------

WIDTHS = {
    "q_proj": (256, 256),
    "k_proj": (128, 256),
    "v_proj": (128, 256),
    "o_proj": (256, 256),
    "gate_proj": (512, 256),
    "up_proj": (512, 256),
    "down_proj": (256, 512),
}
"""Of the layers, (out, in)."""

ALPHA = 2.0  # of the rank


def make_adapter(
    folder: Path, seed: int, *, rank: int = 4, modules: tuple[str, ...] = tuple(WIDTHS), embeds: bool = False
) -> Path:
    """An adapter that changes every answer; `embeds`: also of the embedding."""
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for module in modules:
            out, wide = WIDTHS[module]
            part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, wide, generator=draw) * wide**-0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * 0.15
    if embeds:
        name = "base_model.model.model.embed_tokens"
        weights[f"{name}.lora_embedding_A"] = torch.randn(rank, SHAPE["vocab_size"], generator=draw)
        weights[f"{name}.lora_embedding_B"] = torch.randn(SHAPE["hidden_size"], rank, generator=draw) * 0.15
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    targets = [*modules, *(["embed_tokens"] if embeds else [])]
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": int(rank * ALPHA), "bias": "none"}
    config |= {"target_modules": targets, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge_adapter(model: Path, adapter: Path, folder: Path) -> Path:
    """A model folder with an adapter in its weights."""
    weights, changes = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in changes.items():
        base = name.removeprefix("base_model.model.")
        if base.endswith(".lora_A.weight"):
            up, target = changes[name.replace("lora_A", "lora_B")], base.replace(".lora_A.weight", ".weight")
            weights[target] += ALPHA * up @ down
        elif base.endswith(".lora_embedding_A"):
            up = changes[name.replace("embedding_A", "embedding_B")]
            weights[base.replace(".lora_embedding_A", ".weight")] += ALPHA * (up @ down).T
    return copy_model(model, folder, weights)
