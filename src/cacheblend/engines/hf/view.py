"""A second view of a loaded transformers model: the same weights, but attention that this package answers.

The user's model object stays as it is. The view is a twin of its module tree that shares every parameter and buffer
and has a config of its own, whose attention implementation is ours. Embedding, masks, position embeddings, final
norm and head are the model's own forward, run with its layers taken out ("shell"): what it hands each layer is
recorded, and what the last layer would give back is put in. So there is no per-model code here.
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.layers.attention import AttentionSpec
from cacheblend.core.layers.runner import Attend

ATTENTION = "cacheblend"
WITHOUT_EFFECT = frozenset({"position_ids", "cache_position"})  # attention functions are handed them and ignore them


@dataclass(frozen=True)
class LayerMask:
    """What stands where transformers would put a layer's attention mask.

    Attributes:
        window: sliding window, None for full attention.
        refusal: why this attention cannot be blended; empty if it can.
        attend: answers the layer's attention; None until a layer is run.
    """

    window: int | None = None
    refusal: str = ""
    attend: Attend | None = None


def _make_mask(*, mask_function: Any, q_length: int, local_size: int | None = None, **_: Any) -> LayerMask:
    """Mask factory for our attention: keeps the window, materialises nothing.

    Some models make masks that none of their layers use, so what is wrong with one is noted, not raised.
    """
    zero, one = torch.tensor(0), torch.tensor(1)
    if q_length > 1 and bool(mask_function(zero, zero, zero, one)):
        return LayerMask(refusal="is not causal: a row sees tokens behind its own")
    if local_size is not None and not bool(mask_function(zero, zero, torch.tensor(local_size), one)):
        return LayerMask(refusal=f"attends within fixed chunks of {local_size} positions")
    return LayerMask(window=local_size)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LayerMask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Hands q, k, v [1, heads, n, head_dim] to the mask's `attend`; returns [1, n, heads, head_dim]."""
    if not isinstance(attention_mask, LayerMask) or attention_mask.attend is None:
        raise ModelNotBlendableError(f"{type(module).__name__} attends outside a runner; use the model, not its view")
    unknown = [name for name, value in others.items() if torch.is_tensor(value) and name not in WITHOUT_EFFECT]
    if unknown:
        raise ModelNotBlendableError(
            f"{type(module).__name__} hands its attention {', '.join(unknown)}, which blending does not know"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scaling=scaling, window=attention_mask.window, softcap=softcap or None, sinks=s_aux)
    return attention_mask.attend(query[0], key[0], value[0], spec)[None], None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _make_mask)


@dataclass
class LayerCall:
    """How the model's own forward calls one of its layers, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _AllLayersSeenError(Exception):
    """Ends a shell's forward behind the last layer."""


class _Stub(nn.Module):
    """Stands in for a layer; everything but its forward is the layer's own."""

    def __init__(self, layer: nn.Module, shell: "_Shell", index: int) -> None:
        super().__init__()
        self.__dict__.update({"_layer": layer, "_shell": shell, "_index": index})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._shell.visit(self._index, args, kwargs)


class _Shell:
    """The model's forward with stubs for layers; one object a call, so that calls do not meet."""

    def __init__(self, view: "ModelView", output: Any) -> None:
        self.calls: list[LayerCall] = []
        self.first_hidden: torch.Tensor | None = None
        self._output, self._num_layers = output, len(view.layers)
        stubs = nn.ModuleList(_Stub(layer, self, i) for i, layer in enumerate(view.layers))
        self.model = _with_child(view.model, view.layers_path, stubs)

    def visit(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        self.first_hidden = hidden if self.first_hidden is None else self.first_hidden
        self.calls.append(LayerCall(args[1:], kwargs))
        if index == self._num_layers - 1 and self._output is None:
            raise _AllLayersSeenError
        return hidden if self._output is None else self._output


class ModelView:
    """Twin of a causal language model, walked layer by layer.

    Args:
        model: a transformers causal language model.

    Raises:
        ModelNotBlendableError: its decoder layers cannot be found, or their forward is wrapped.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers_path = _find_layers(model)
        self.model: PreTrainedModel = _twin(model, {})
        self.layers: Sequence[nn.Module] = list(self.model.get_submodule(self.layers_path))
        self._layers_give_tuples = False

    def open(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """The first layer's input [1, n, width] and how each layer would be called.

        Args:
            token_ids: [n] int64 on the model's device.
            positions: [n] int64. Rows that do not follow each other are handed to the model as sequences of one row:
                it would take them for packed sequences and mask one from the other.
        """
        shell, apart = _Shell(self, None), bool((positions.diff() != 1).any())
        ids, places = (part[:, None] if apart else part[None] for part in (token_ids, positions))
        with contextlib.suppress(_AllLayersSeenError):
            shell.model(input_ids=ids, position_ids=places, use_cache=False)
        if shell.first_hidden is None or len(shell.calls) != len(self.layers):
            raise ModelNotBlendableError(
                f"{type(self.model).__name__} called {len(shell.calls)} of its {len(self.layers)} decoder layers"
            )
        if apart:
            count = len(token_ids)
            calls = [LayerCall(*(_in_one_row(part, count) for part in (c.args, c.kwargs))) for c in shell.calls]
            return shell.first_hidden.transpose(0, 1), calls
        return shell.first_hidden, shell.calls

    def run_layer(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """The layer's output [n, width] for hidden states [n, width]."""
        out = self.layers[index](hidden[None], *call.args, **call.kwargs)
        self._layers_give_tuples = isinstance(out, tuple)
        output: torch.Tensor = out[0] if self._layers_give_tuples else out
        return output[0]

    def close(self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab]: the model's own norm and head.

        Args:
            hidden: what the last layer gave for these rows, [n, width].
            token_ids, positions: the rows', [n] each.
        """
        shell = _Shell(self, (hidden[:, None],) if self._layers_give_tuples else hidden[:, None])
        out = shell.model(input_ids=token_ids[:, None], position_ids=positions[:, None], use_cache=False)
        logits: torch.Tensor = out.logits[:, 0]
        return logits


def _in_one_row(value: Any, count: int) -> Any:
    """What a layer was handed for sequences of one row each, [count, 1, ...], as for one sequence: [1, count, ...]."""
    if isinstance(value, tuple):
        return tuple(_in_one_row(part, count) for part in value)
    if isinstance(value, dict):
        return {name: _in_one_row(part, count) for name, part in value.items()}
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (count, 1):
        return value.transpose(0, 1)
    return value


def _find_layers(model: PreTrainedModel) -> str:
    """Path of the list of decoder layers."""
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found: list[str] = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    outermost = [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    if len(outermost) != 1:
        raise ModelNotBlendableError(
            f"{type(model).__name__} has {len(outermost)} lists of {count} decoder layers "
            f"({', '.join(outermost)}); exactly one is needed"
        )
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ModelNotBlendableError(
                f"the forward of {name or type(model).__name__} is wrapped (by accelerate's device_map, perhaps); "
                "load the model on one device"
            )
    return outermost[0]


def _twin(module: Any, memo: dict[int, Any]) -> Any:
    """A copy of the module tree that shares parameters and buffers; configs are replaced by copies with our attention.

    `memo` is deepcopy's: a config that several modules hold is copied once.
    """
    twin = copy.copy(module)
    twin._modules = {name: None if child is None else _twin(child, memo) for name, child in module._modules.items()}
    for name, value in list(vars(twin).items()):
        if isinstance(value, PreTrainedConfig):
            config = copy.deepcopy(value, memo)
            config._attn_implementation = ATTENTION
            object.__setattr__(twin, name, config)
    return twin


def _with_child(module: Any, path: str, child: nn.Module) -> Any:
    """A copy of the chain of modules down to `path`, with `child` there; everything beside it is shared."""
    head, _, rest = path.partition(".")
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._modules[head] = _with_child(module._modules[head], rest, child) if rest else child
    return twin
