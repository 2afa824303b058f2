"""LoRA without PEFT: a layer with the attributes of PEFT's, and the calls that put it into a model and switch it."""

from typing import Any

import torch
from torch import nn


class FakeLora(nn.Module):
    """y = base(x) + scaling * B(A(x)) of each active adapter, unless they are disabled or merged."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "scaling")

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.r: dict[str, int] = {}
        self.active_adapters: list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        if not self.disable_adapters and not self.merged_adapters:
            for name in self.active_adapters:
                out = out + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return out

    def delta(self, name: str) -> torch.Tensor:
        """What merging adds to the base layer's weight."""
        product: torch.Tensor = self.lora_B[name].weight.data @ self.lora_A[name].weight.data
        return self.scaling[name] * product


def layers(model: Any) -> list[FakeLora]:
    return [module for module in model.modules() if isinstance(module, FakeLora)]


QKV = ("q_proj", "k_proj", "v_proj")
LATENT = ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def add_adapter(model: Any, name: str, seed: int, rank: int = 4) -> None:
    """Adds an adapter of random weights, and activates it: to the projections of each layer that make queries, keys and
    values, or latents where it has latent attention."""
    attention = model.model.layers[0].self_attn
    projections = LATENT if hasattr(attention, "kv_b_proj") else QKV
    drawn = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        for projection in projections:
            lora = getattr(layer.self_attn, projection)
            if not isinstance(lora, FakeLora):
                lora = FakeLora(lora)
                setattr(layer.self_attn, projection, lora)
            base = lora.base_layer
            down, up = (nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False))
            for part in (down, up):
                part.weight.data = torch.randn(part.weight.shape, generator=drawn) * 0.2
            lora.lora_A[name], lora.lora_B[name] = down.eval(), up.eval()
            lora.scaling[name], lora.r[name] = 2.0, rank
    model.peft_config = {**(getattr(model, "peft_config", None) or {}), name: object()}
    set_adapter(model, name)


def set_adapter(model: Any, *names: str) -> None:
    for lora in layers(model):
        lora.active_adapters = list(names)


def disable(model: Any, disabled: bool = True) -> None:
    for lora in layers(model):
        lora.disable_adapters = disabled


def merge(model: Any) -> None:
    """Into the base weights, behind PyTorch's counter of versions, as PEFT does it."""
    for lora in layers(model):
        for name in lora.active_adapters:
            lora.base_layer.weight.data += lora.delta(name)
            lora.merged_adapters.append(name)


def unmerge(model: Any) -> None:
    for lora in layers(model):
        while lora.merged_adapters:
            lora.base_layer.weight.data -= lora.delta(lora.merged_adapters.pop())


def unload(model: Any) -> None:
    """Puts the base layers back."""
    for layer in model.model.layers:
        for projection in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, projection, getattr(layer.self_attn, projection).base_layer)
    del model.peft_config
