"""A second view of a loaded transformers model, which is not changed: a copy of its module tree that shares every
parameter and buffer and has its own config, in which our attention implementation is set.

Embedding, masks, position embeddings, final norm and head are computed by the model's own forward, run with stubs in
place of its layers (the "shell"): they record the arguments of each layer, and return the last layer's output where
logits are needed. So no code here is per model.
"""

import contextlib
import copy
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.engines.hf.latent import LatentTap, attend_absorbed, latent_attention
from cacheblend.engines.hf.recurrent import CACHE_ARGUMENTS, LayerState, StateTap
from cacheblend.engines.hf.thread_count import ThreadCount

ATTENTION = "cacheblend"
_SHARED = re.compile(r"_modules|_parameters|_buffers|.*_hooks.*")  # by a module and its copies, but for the children
WITHOUT_EFFECT = frozenset({"position_ids", "cache_position"})  # attention functions receive these and ignore them


@dataclass(frozen=True)
class LayerMask:
    """Takes the place of a layer's attention mask in transformers. `window` is in tokens, None for full attention;
    `refusal` says why it cannot be blended. Until a layer is run there is nothing that computes its attention
    (`attend`), or notes what latent attention caches (`tap`)."""

    window: int | None = None
    refusal: str = ""
    attend: Attend | None = None
    tap: LatentTap | None = None


def _make_mask(*, mask_function: Any, q_length: int, local_size: int | None = None, **_: Any) -> LayerMask:
    """Mask factory for our attention: keeps only the window, creates no mask tensor. Some models create masks that none
    of their layers use; so an unsupported mask is noted in it, not raised here."""
    zero, one = torch.tensor(0), torch.tensor(1)
    if q_length > 1 and bool(mask_function(zero, zero, zero, one)):
        return LayerMask(refusal="is not causal: a row attends to tokens that follow it")
    if local_size is not None and not bool(mask_function(zero, zero, torch.tensor(local_size), one)):
        return LayerMask(refusal=f"attends within fixed chunks of {local_size} positions")
    return LayerMask(window=local_size)


def attend_by_mask(
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
    """Passes q, k, v [1, heads, n, head_dim] to the mask's `attend`; returns [1, n, heads, head_dim]."""
    if not isinstance(attention_mask, LayerMask) or attention_mask.attend is None:
        raise ModelNotBlendableError(
            f"{type(module).__name__} was called outside a layer runner; call the model, not its view"
        )
    unknown = [name for name, value in others.items() if torch.is_tensor(value) and name not in WITHOUT_EFFECT]
    if unknown:
        raise ModelNotBlendableError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which blending does not support"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scaling=scaling, window=attention_mask.window, softcap=softcap or None, sinks=s_aux)
    if attention_mask.tap is not None:
        return attend_absorbed(module, query[0], attention_mask.tap, attention_mask.attend, spec)[None], None
    return attention_mask.attend(query[0], key[0], value[0], spec)[None], None


AttentionInterface.register(ATTENTION, attend_by_mask)
AttentionMaskInterface.register(ATTENTION, _make_mask)


@dataclass
class LayerCall:
    """Arguments that the model's own forward passes to one of its layers, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _AllLayersSeenError(Exception):
    """Ends a shell's forward after the last layer."""


@dataclass
class _Shell:
    """What the stubs have seen in one forward of the model, and what they give for it, if that is known."""

    num_layers: int
    output: Any = None
    calls: list[LayerCall] = field(default_factory=list)
    first_hidden: torch.Tensor | None = None


class _Stub(nn.Module):
    """Replaces a layer in shells; all attributes except `forward` are the layer's own. Made once for all shells, which
    takes longer than a shell's whole forward; so that of the calling thread is asked."""

    def __init__(self, layer: nn.Module, index: int, running: threading.local) -> None:
        super().__init__()
        self.__dict__.update({"_layer": layer, "_index": index, "_running": running})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shell: _Shell = self._running.shell
        if shell.output is not None:
            return shell.output
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        shell.first_hidden = hidden if shell.first_hidden is None else shell.first_hidden
        shell.calls.append(LayerCall(args[1:], kwargs))
        if self._index == shell.num_layers - 1:
            raise _AllLayersSeenError
        return hidden


class _Stubs(nn.ModuleList):
    """Of all layers; models take a slice of them in each forward, which would be a new list."""

    def __getitem__(self, index: Any) -> Any:
        return self if index == slice(None, len(self)) else super().__getitem__(index)


class ModelView:
    """A view of a causal language model whose layers can be run one at a time. Raises `ModelNotBlendableError` if its
    decoder layers cannot be found, or their forward is wrapped."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers_path = _find_layers(model)
        self.model: PreTrainedModel = _twin(model, {}, ATTENTION)
        self.layers: Sequence[nn.Module] = list(self.model.get_submodule(self.layers_path))
        if model.device.type == "cuda":
            run_norms_in_one_call(self.layers)
        self._running = threading.local()  # has the shell of the forward that a thread runs
        self._stubs = _Stubs(_Stub(layer, i, self._running) for i, layer in enumerate(self.layers))
        self.latent: Sequence[Any] = [latent_attention(layer) for layer in self.layers]  # None: per head
        self._called: Sequence[Callable[..., Any]] = self.layers
        self._layers_give_tuples = False
        self.threads = ThreadCount(is_following=model.device.type == "cpu")
        # Layers that keep a state, set by the survey; those of `stepped` go on from it one row at a time only.
        self.recurrent = self.stepped = frozenset[int]()

    def run_as(self, layers: Sequence[Callable[..., Any]]) -> None:
        """Has `run_layer` call these, which compute what the layers compute."""
        self._called = layers

    def open(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """Embeds the rows: the first layer's input [1, n, width], and the arguments of each layer. `token_ids` and
        `positions`, in any order, are [n] int64 on the model's device."""
        shell = _Shell(len(self.layers))
        with contextlib.suppress(_AllLayersSeenError):
            self._run(shell, token_ids[None], positions[None])
        if shell.first_hidden is None or len(shell.calls) != len(self.layers):
            raise ModelNotBlendableError(
                f"{type(self.model).__name__} called {len(shell.calls)} of its {len(self.layers)} decoder layers"
            )
        return shell.first_hidden, shell.calls

    def run_layer(
        self, index: int, hidden: torch.Tensor, call: LayerCall, state: LayerState | None = None
    ) -> torch.Tensor:
        """The layer's output [n, width] for hidden states [n, width] and arguments for these rows. `state`: of a
        recurrent layer in front of the rows, which then have no gaps; it becomes that behind them. None: none."""
        if self.latent[index] is not None:  # a tap in the cache's place, which the attention knows too
            noted = LatentTap()
            kwargs = {n: noted if n in CACHE_ARGUMENTS else _with_tap(v, noted) for n, v in call.kwargs.items()}
            call = LayerCall(tuple(_with_tap(value, noted) for value in call.args), kwargs)
        elif state is not None:
            tap = StateTap(state)
            call = LayerCall(call.args, {n: tap if n in CACHE_ARGUMENTS else v for n, v in call.kwargs.items()})
        with self.threads.layer():
            out = self._called[index](hidden[None], *call.args, **call.kwargs)
        self._layers_give_tuples = isinstance(out, tuple)
        output: torch.Tensor = out[0] if self._layers_give_tuples else out
        return output[0]

    def close(self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] by the model's own norm and head. `hidden`: the last layer's output for the rows, [n,
        width]; `token_ids` and `positions` are theirs, [n] each."""
        shell = _Shell(len(self.layers), (hidden[:, None],) if self._layers_give_tuples else hidden[:, None])
        with self.threads.layer():
            logits: torch.Tensor = self._run(shell, token_ids[:, None], positions[:, None]).logits[:, 0]
        return logits

    def _run(self, shell: _Shell, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The model's output for ids and positions, [sequences, rows] each, with the shell's instead of the layers'. By
        the mask no row is padding. Without one, transformers looks in the positions for packed sequences: rows at
        positions that are not consecutive would be masked from each other, and the host would wait."""
        everything = torch.ones(token_ids.shape, dtype=torch.bool, device=token_ids.device)
        # Its own: what forwards note, no other call sees.
        model = _with_child(self.model, self.layers_path, self._stubs)
        self._running.shell = shell
        try:
            return model(input_ids=token_ids, attention_mask=everything, position_ids=positions, use_cache=False)
        finally:
            self._running.shell = None  # it keeps the rows


def _with_tap(value: Any, tap: LatentTap) -> Any:
    return replace(value, tap=tap) if isinstance(value, LayerMask) else value


def _find_layers(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found: list[str] = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    outermost = [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    if len(outermost) > 1:  # an image encoder may have as many layers
        decoder = model.get_decoder()
        inside = {name for name, module in model.named_modules() if module is decoder}
        outermost = [name for name in outermost if any(name.startswith(f"{each}.") for each in inside)]
    if len(outermost) != 1:
        raise ModelNotBlendableError(
            f"{type(model).__name__} has {len(outermost)} lists of {count} decoder layers "
            f"({', '.join(outermost)}); exactly one is needed"
        )
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ModelNotBlendableError(
                f"the forward of {name or type(model).__name__} is wrapped (perhaps by accelerate's device_map); "
                "load the model on one device"
            )
    return outermost[0]


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that keeps its mode and its active adapters, whatever the model is switched to; weights are shared."""
    frozen: PreTrainedModel = _twin(model, {}, None)
    return frozen


def _twin(module: Any, memo: dict[int, Any], attention: str | None) -> Any:
    """Copies the module tree; parameters and buffers are shared. With `attention`, configs are replaced by copies with
    that attention; `memo` is the one of `copy.deepcopy`: a config that several modules hold is copied once."""
    twin = copy.copy(module)
    twin._modules = {
        name: None if child is None else _twin(child, memo, attention) for name, child in module._modules.items()
    }
    is_adapted = hasattr(module, "adapter_layer_names")
    for name, value in list(vars(twin).items()):
        if isinstance(value, PreTrainedConfig) and attention is not None:
            config = copy.deepcopy(value, memo)
            config._attn_implementation = attention
            object.__setattr__(twin, name, config)
        elif is_adapted and isinstance(value, list | dict) and not _SHARED.fullmatch(name):  # changed in their place
            object.__setattr__(twin, name, copy.copy(value))
    return twin


def _with_child(module: Any, path: str, child: nn.Module) -> Any:
    """Copies the modules on the way down to `path` and puts `child` there; all other modules are shared."""
    head, _, rest = path.partition(".")
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._modules[head] = _with_child(module._modules[head], rest, child) if rest else child
    return twin


_ROWS = 16
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # as models call what they add to the mean square


class _InOneCall:
    """The forward of a norm, in front of its own class's: whatever else is asked of the module is as it was."""

    weight: torch.Tensor
    one_call_eps: float

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.one_call_eps)


@torch.no_grad()
def run_norms_in_one_call(layers: Iterable[nn.Module]) -> int:
    """Has the norms of some layers, which are the caller's own copies, run in one call; returns how many. On a GPU that
    is one kernel where transformers starts eight, and a pass of few rows waits for its launches. A norm is taken only
    if it computes, on noise, what PyTorch's `rms_norm` does, to the last step of the type."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    count = 0
    for module in (module for layer in layers for module in layer.modules()):
        kind, weight = type(module), module._parameters.get("weight")
        known = [getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, 0), float)]
        eps = next(iter(known), None)
        if not kind.__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or eps is None:
            continue
        if _agrees(module, weight, eps):
            kinds[kind] = kinds.get(kind) or type(kind.__name__, (_InOneCall, kind), {})
            module.__class__, module.one_call_eps = kinds[kind], eps
            count += 1
    return count


def _agrees(module: nn.Module, weight: torch.Tensor, eps: float) -> bool:
    """Whether a norm computes as `rms_norm`, of any weight, on usual numbers and on small ones, which `eps` is for."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(_ROWS, len(weight), generator=draw).to(weight)
    noise[::2] *= eps**0.5
    drawn = torch.randn(len(weight), generator=draw).to(weight)
    probe = copy.copy(module)  # its containers are the module's own, and those of a model that others may run
    probe._parameters = {**module._parameters, "weight": nn.Parameter(drawn, requires_grad=False)}
    try:
        own, other = probe(noise), F.rms_norm(noise, drawn.shape, drawn, eps)
    except Exception:  # it wants other arguments
        return False
    if not isinstance(own, torch.Tensor) or (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    most = 2 * torch.finfo(own.dtype).eps * own.abs().float() + 1e-6
    return bool(((own.float() - other.float()).abs() <= most).all())
