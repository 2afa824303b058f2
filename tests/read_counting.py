"""Counts the calls of a pass that make the host wait for the device, without a device.

A tensor counts as the device's if it was made with a device argument, sent to one, or computed from such a tensor;
tensors that the host makes for itself are free to be read.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "__array__", "equal")
SIZES = ("nonzero", "unique", "masked_select", "argwhere", "unique_consecutive")
READS_DATA = frozenset(READS) | frozenset(SIZES)


class CountReads(TorchFunctionMode):
    """Inside, `calls` gets the name of every such call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(call, "__name__", str(call))
        inputs = _tensors((args, kwargs))
        on_device = any(getattr(each, "is_on_device", False) for each in inputs)
        if on_device and (name in READS_DATA or (name in ("__getitem__", "__setitem__") and _is_masked(args[1]))):
            self.calls.append(name)
        result = call(*args, **kwargs)
        if on_device or kwargs.get("device") is not None or (name == "to" and _names_device(args[1:])):
            for each in _tensors(result):
                each.is_on_device = True
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for part in value.values() for each in _tensors(part)]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


def _is_masked(index: Any) -> bool:
    return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(index))


def _names_device(args: Any) -> bool:
    return any(isinstance(each, str | torch.device) for each in args)
