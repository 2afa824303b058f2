"""Checkpoints of quantised weights, made by hand from a plain one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def int8(weight: torch.Tensor) -> Tensors:
    """[out, in] with a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def gptq(weight: torch.Tensor) -> Tensors:
    """Four bits, symmetric: [in / 8, out], scales of `GROUP` inputs each."""
    numbers, scales = _four_bits(weight)
    zeros = _packed(torch.full((len(scales), weight.shape[0]), 7), 1, range(8))  # this format keeps one less
    index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {"qweight": _packed(numbers, 0, range(8)), "qzeros": zeros, "scales": scales, "g_idx": index}


def awq(weight: torch.Tensor) -> Tensors:
    """Four bits: [in, out / 8], scales of `GROUP` inputs each."""
    numbers, scales = _four_bits(weight)
    zeros = _packed(torch.full((len(scales), weight.shape[0]), 8), 1, AWQ_ORDER)
    return {"qweight": _packed(numbers, 1, AWQ_ORDER), "qzeros": zeros, "scales": scales}


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 0..15 [in, out] and scales [in / GROUP, out]."""
    grouped = weight.t().reshape(-1, GROUP, weight.shape[0])
    scales = grouped.abs().amax(1, keepdim=True) / 7
    numbers = (grouped / scales).round().add(8).clamp(0, 15).long()
    return numbers.flatten(0, 1), scales.squeeze(1).to(torch.bfloat16)


def _packed(numbers: torch.Tensor, dim: int, order: Any) -> torch.Tensor:
    """Eight numbers of four bits in an int32, along a dimension."""
    parts = numbers.unflatten(dim, (-1, 8))
    packed = sum(parts.select(dim + 1, at) << (4 * place) for place, at in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.int64).sub((packed >= 1 << 31).long() << 32).to(torch.int32).contiguous()


INT8_ARGS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
SCHEMES: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "int8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": INT8_ARGS,
                    "input_activations": {**INT8_ARGS, "dynamic": True, "strategy": "token"},
                }
            },
        },
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def quantised(model: Path, folder: Path, scheme: str, layers: int) -> Path:
    """A copy of a model folder with its first layers only, whose projections are quantised."""
    compress, described = SCHEMES[scheme]
    shutil.copytree(model, folder)
    kept: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if ".layers." in name and int(name.split(".")[2]) >= layers:
            continue
        if name.endswith("_proj.weight"):
            kept |= {f"{name.removesuffix('weight')}{part}": value for part, value in compress(weight).items()}
        else:
            kept[name] = weight
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": layers, "quantization_config": described})
    )
    return folder
