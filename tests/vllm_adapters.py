"""Tiny random LoRA adapters in PEFT's format, written by hand, and models with them merged in."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_running import SHAPE

WIDTHS = {
    "q_proj": (256, 256),
    "k_proj": (128, 256),
    "v_proj": (128, 256),
    "o_proj": (256, 256),
    "gate_proj": (512, 256),
    "up_proj": (512, 256),
    "down_proj": (256, 512),
}
"""Of the test models' layers, (out, in)."""

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


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """A model folder with an adapter in its weights."""
    shutil.copytree(model, folder)
    weights, changes = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in changes.items():
        base = name.removeprefix("base_model.model.")
        if base.endswith(".lora_A.weight"):
            up, target = changes[name.replace("lora_A", "lora_B")], base.replace(".lora_A.weight", ".weight")
            weights[target] += ALPHA * up @ down
        elif base.endswith(".lora_embedding_A"):
            up = changes[name.replace("embedding_A", "embedding_B")]
            weights[base.replace(".lora_embedding_A", ".weight")] += ALPHA * (up @ down).T
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
