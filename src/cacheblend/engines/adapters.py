"""A model's weights without the adapters (LoRA and others) that its layers hold, and digests of tensors. An adapted
layer is told by its attributes, those of PEFT's layers: `active_adapters`, `disable_adapters`, `merged_adapters`, and
`adapter_layer_names`, which names its containers of weights, one entry an adapter. Knows modules; PEFT itself need not
be installed, and is not imported."""

import hashlib
import re
from collections.abc import Iterator

import torch
from torch import nn

from cacheblend.core.errors import InvalidInputError


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's layers that hold adapters, active or not, each with its name."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            yield name, module


def base_name(layer: nn.Module) -> str:
    """The attribute under which an adapted layer has the layer that it adapts."""
    return "original_module" if hasattr(layer, "original_module") else "base_layer"


def base_tensors(model: nn.Module, *, keep: bool = False) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers without those of adapters, by the names that they have without adapters.
    `keep`: the very objects that the model holds, not detached ones."""
    tensors = {name: value for name, value in model.state_dict(keep_vars=keep).items() if torch.is_tensor(value)}
    for layer, module in adapted_layers(model):
        inside = f"{layer}." if layer else ""
        base = f"{inside}{base_name(module)}."
        for name in [name for name in tensors if name.startswith(inside)]:
            value = tensors.pop(name)
            if name.startswith(base):
                tensors[inside + name.removeprefix(base)] = value
    return tensors


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, hex; of a quantised one (torchao's) of all that it consists of. Raises
    `InvalidInputError` for a class that does not say what it consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, settings = tensor.__tensor_flatten__()
        parts = [f"{name} {digest_of(getattr(tensor, name))}" for name in names]
        described = re.sub(r" at 0x[0-9a-f]+", "", repr(settings))  # where an object lies differs in each process
        return hashlib.sha256("\n".join([type(tensor).__name__, described, *parts]).encode()).hexdigest()
    try:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"the bytes of a {type(tensor).__name__} cannot be read ({error}), so that blocks of this model cannot be "
            "named by its weights; open it with BlendEngine(..., fingerprint='a name of these weights')"
        ) from error
    return hashlib.sha256(raw.tobytes()).hexdigest()


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that a tensor consists of: itself, or those inside a quantised one."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor
