"""Norms of a view's layers in one call of PyTorch: on a GPU one kernel where transformers starts eight.

A pass of few rows waits for its launches, and a layer has two norms or four. A class of norms is taken only if it
computes, on noise, what PyTorch's `rms_norm` does, to the last step of the type; all others stay as they are.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_ROWS = 16
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # as models call what they add to the mean square


class _InOneCall:
    """The forward of a norm, in front of its own class's: whatever else is asked of the module is as it was."""

    weight: torch.Tensor
    one_call_eps: float

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        if args or kwargs or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.one_call_eps)


@torch.no_grad()
def run_norms_in_one_call(layers: Iterable[nn.Module]) -> int:
    """Has the norms of some layers, which are the caller's own copies, run in one call; returns how many."""
    classes: dict[tuple[type[nn.Module], float, torch.dtype], type[nn.Module] | None] = {}
    count = 0
    for layer in layers:
        for module in layer.modules():
            kind, weight = type(module), module._parameters.get("weight")
            eps = next(
                (getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, 0), float)), None
            )
            if not kind.__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or eps is None:
                continue
            key = kind, eps, weight.dtype
            if key not in classes:
                classes[key] = type(kind.__name__, (_InOneCall, kind), {}) if _agrees(module, weight, eps) else None
            if (wanted := classes[key]) is not None:
                module.__class__, module.one_call_eps = wanted, eps
                count += 1
    return count


def _agrees(module: nn.Module, weight: torch.Tensor, eps: float) -> bool:
    """Whether a norm computes what `rms_norm` does on numbers of usual size and on small ones, which `eps` is for."""
    noise = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    noise[::2] *= eps**0.5
    try:
        own, other = module(noise), F.rms_norm(noise, weight.shape, weight, eps)
    except Exception:  # it wants other arguments
        return False
    if not isinstance(own, torch.Tensor) or (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    most = 2 * torch.finfo(own.dtype).eps * own.abs().float() + 1e-6
    return bool(((own.float() - other.float()).abs() <= most).all())
