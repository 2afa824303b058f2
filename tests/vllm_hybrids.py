"""Tiny models whose layers attend to a window or to all rows, in vLLM's hybrid KV cache manager."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, MinistralConfig, PretrainedConfig

from vllm_running import SHAPE

PATTERNS = {
    "gpt-oss": ["sliding_attention", "full_attention"],  # vLLM's takes every other layer, whatever is configured
}
DEFAULT_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
LAYERS = 6


def default_layers(family: str) -> list[str]:
    """Types of its six layers; the period is the number of groups of KV cache."""
    pattern = PATTERNS.get(family, DEFAULT_PATTERN)
    return pattern * (LAYERS // len(pattern))


def group_count(family: str) -> int:
    """Groups of KV cache that vLLM makes of the default layers."""
    return len(PATTERNS.get(family, DEFAULT_PATTERN))


def config_of(family: str, window: int, layers: Sequence[str] | None = None) -> PretrainedConfig:
    """A tiny configuration of a family, with this window and these types of layers."""
    types = [*(layers or default_layers(family))]
    shape: dict[str, Any] = SHAPE | {"max_position_embeddings": 8192, "num_hidden_layers": len(types)}
    shape |= {"layer_types": types, "sliding_window": window}
    if family == "gemma3":
        return Gemma3TextConfig(**shape, query_pre_attn_scalar=32)
    if family == "gpt-oss":
        return GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2)
    return MinistralConfig(**shape)


def make_hybrid(
    folder: Path, family: str, window: int, layers: Sequence[str] | None = None, scale: float = 1.8
) -> Path:
    """A random model of it, whose tokens depend on far context; see `vllm_running.make_models`."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family, window, layers), dtype=torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() >= 2:
            deviation = 0.5 if "embed" in label or "lm_head" in label else weight.shape[-1] ** -0.5
            deviation *= 1.8 if "q_proj" in label or "k_proj" in label else 1
            torch.nn.init.normal_(weight, 0, deviation)
    model.save_pretrained(folder)
    if family == "ministral":  # vLLM's class of the older name reads the types of layers too
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MistralForCausalLM"]}))
    return folder
