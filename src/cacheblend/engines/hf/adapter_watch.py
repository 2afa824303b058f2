"""Detects changes of a loaded model: adapters (LoRA and others), weights that were written to, and a lower precision of
float32 multiplications. An engine follows each change.
"""

import hashlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend.engines.adapters import adapted_layers, base_name, base_tensors, digest_of, plain_parts
from cacheblend.engines.hf.view import frozen_copy

_SAMPLED_DTYPES = frozenset([torch.float64, torch.float32, torch.bfloat16, torch.float16])
SAMPLED_TENSORS, SAMPLED_VALUES = 16, 4
"""Of so many weights so many values are compared at each look: PEFT's hot swap writes behind PyTorch's counter of
versions, and it writes to all layers."""


class Adapted(NamedTuple):
    """A frozen copy of the model with its active adapters, their digest, and a version unique to this change."""

    model: PreTrainedModel
    digest: str
    version: int


class AdapterWatch:
    """Watches the adapters of one model, transformers' or PEFT's wrapper of one, and keeps an engine in step with them.
    Thread-safe. It compares each tensor's address and version (0.1 ms with 300), of adapters also names and scales, and
    some values of some tensors, for writes that PyTorch does not count. Every change seen raises `version`."""

    def __init__(self, model: Any) -> None:
        self._model, self.version, self._followed, self._lock = model, 0, 0, threading.RLock()
        self._bases: dict[str, nn.Module] = {}  # every layer that was ever adapted, without its adapters
        self._base_changed = self._weights_changed = False
        self._slots = _slots(model)
        self._read()
        self._merged = self._merged_layers()

    def latest_version(self) -> int:
        """Looks; a different number than last time means other adapters."""
        with self._lock:
            self.look()
            return self.version

    def follow(self, renew: Callable[[Adapted], None]) -> None:
        """Looks; after a change calls `renew` with the model as it is now, and again if that fails."""
        with self._lock:
            if self.latest_version() != self._followed:
                adapted = self.adapted()
                renew(adapted)
                self._followed = adapted.version

    def adapted(self) -> Adapted:
        with self._lock:
            model = frozen_copy(self._model)
            while not self.describes(model):  # they were switched between the look and the copy
                self.look(anew=True)
                model = frozen_copy(self._model)
            # Of the copy: so what it computes is named by what it is, however often the model is switched.
            return Adapted(model, self.digest_of_copy(model), self.version)

    def look(self, *, anew: bool = False) -> bool:
        """Looks again; True after any change, even if the digest stays. `anew`: assume that something has changed."""
        marks, is_written = self._weight_marks, not torch.equal(self._weight_sample, _joined(self._weight_samples))
        if (
            not anew
            and not is_written
            and marks == _marks_of(_held(self._slots))
            and self._precision == precision_of(self._model)
            and self._states == _states(self._watched)
            and self._marks == self._current_marks()
            and torch.equal(self._sample, _joined(self._samples))
        ):
            return False
        adapted = set(self._layers)
        self._base_changed |= not torch.equal(self._base_sample, _joined(self._base_samples))
        self._read()
        was_merged, self._merged = self._merged, self._merged_layers()
        # A merge writes into the layer itself, and taking it back leaves its rounding there.
        if adapted - set(self._layers) or was_merged != self._merged:
            self._base_changed = True
        bases = {id(held) for base in self._bases.values() for held in (base._parameters, base._buffers)}
        pairs = zip(self._slots, marks, self._weight_marks, strict=True)
        written = [id(held) in bases for (held, _), before, now in pairs if before != now]
        self._base_changed |= any(written)
        self._weights_changed |= is_written or not all(written)
        self.version += 1
        return True

    def describes(self, model: nn.Module) -> bool:
        """Whether a copy of the model's modules has the adapters found by the last look."""
        layers = [layer for _, layer in adapted_layers(model)]
        tensors = _tensors_in_effect(layers)
        return _states(layers) == self._states and all(map(operator.is_, tensors, self._tensors))

    def _read(self) -> None:
        self._held = list((getattr(self._model, "peft_config", None) or {}).values())  # so that no id is used again
        self._layers = dict(adapted_layers(self._model))
        self._watched: list[Any] = list(self._layers.values())
        for name, layer in self._layers.items():
            self._bases.setdefault(name, getattr(layer, base_name(layer), layer))
        # Copies, since PEFT changes lists and scales in place.
        self._states = [tuple(map(copy, state)) for state in _states(self._watched)]
        tensors = _tensors_in_effect(self._watched)
        scales = [scale for *_, scaling in self._states if isinstance(scaling, Mapping) for scale in scaling.values()]
        self._tensors = [*tensors, *(scale for scale in scales if torch.is_tensor(scale))]
        bases = [t for base in self._bases.values() for t in base.parameters(recurse=False)]
        self._base_samples = _samples(bases)
        others = {id(tensor) for tensor in bases}
        held = _held(self._slots)
        self._weight_samples = _samples([t for t in held if t is not None and id(t) not in others])
        self._samples = [*_samples(tensors), *self._base_samples]
        self._marks, self._sample = self._current_marks(), _joined(self._samples)
        self._base_sample, self._weight_sample = _joined(self._base_samples), _joined(self._weight_samples)
        self._weight_marks, self._precision = _marks_of(held), precision_of(self._model)

    def _current_marks(self) -> tuple[Any, ...]:
        configs = getattr(self._model, "peft_config", None) or {}
        names = [(name, id(config)) for name, config in configs.items()]
        return names, _marks_of(self._tensors)

    def _merged_layers(self) -> dict[str, list[str]]:
        merged = {name: list(getattr(layer, "merged_adapters", ())) for name, layer in self._layers.items()}
        return {name: adapters for name, adapters in merged.items() if adapters}

    def digest_of_copy(self, model: nn.Module) -> str:
        """Hex digest of the active adapters (names, settings, weights), of changed weights, and of the precision; empty
        if the model is as it was opened. Of a copy of the model's modules, whichever it has been switched to since."""
        found = hashlib.sha256()
        described = False
        for name, layer in adapted_layers(model):
            for line in _description(layer):
                found.update(f"{name} {line}\n".encode())
                described = True
        if self._base_changed:
            for name, base in self._bases.items():
                for part, tensor in base.named_parameters(recurse=False):
                    found.update(f"{name} base {part} {digest_of(tensor)}\n".encode())
        if self._weights_changed:
            for name, weight in sorted(base_tensors(model).items()):
                found.update(f"weight {name} {digest_of(weight)}\n".encode())
        if self._precision:
            found.update(f"float32 {self._precision}\n".encode())
        is_other = described or self._base_changed or self._weights_changed or self._precision
        return found.hexdigest() if is_other else ""


def precision_of(model: nn.Module) -> str:
    """``tf32`` or ``bf16`` if the model's float32 multiplications have a lower precision
    (`torch.set_float32_matmul_precision`), else an empty string."""
    weight = next((each for each in model.parameters() if each.is_floating_point()), None)
    if weight is None or weight.dtype != torch.float32:
        return ""
    backend: Any = torch.backends.cuda if weight.device.type == "cuda" else torch.backends.mkldnn
    precision = str(backend.matmul.fp32_precision)
    return "" if precision in ("none", "ieee") else precision


def _in_effect(layer: Any) -> list[str]:
    merged = list(getattr(layer, "merged_adapters", ()))
    if merged:  # they stay in its weights, whichever are active
        return merged
    return [] if getattr(layer, "disable_adapters", False) else list(layer.active_adapters)


def _states(layers: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Which adapters each layer computes with, and how strongly."""
    # Attributes that every layer of PEFT's has cost a tenth of a microsecond each.
    return [
        (
            layer.active_adapters,
            getattr(layer, "disable_adapters", False),
            getattr(layer, "merged_adapters", ()),
            getattr(layer, "scaling", None),
        )
        for layer in layers
    ]


def _tensors_in_effect(layers: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for layer in layers for _, tensor in _weights(layer, _in_effect(layer))]


def _weights(layer: Any, adapters: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of some adapters of a layer: (container, adapter and name, tensor)."""
    for container in layer.adapter_layer_names:
        held: Any = getattr(layer, container, None)
        for adapter in adapters:
            if not hasattr(held, "keys") or adapter not in held:
                continue
            value = held[adapter]
            named = value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else {"": value}
            for name, tensor in named.items():
                if torch.is_tensor(tensor):
                    yield f"{container} {adapter} {name}", tensor


def _description(layer: Any) -> Iterator[str]:
    """Lines about the adapters in effect in a layer; none if none of them adapts it."""
    adapters = _in_effect(layer)
    weights = [f"{name} {digest_of(tensor)}" for name, tensor in _weights(layer, adapters)]
    if not weights:
        return
    yield f"{type(layer).__name__} merged={bool(getattr(layer, 'merged_adapters', ()))} {adapters}"
    yield from weights
    for setting in getattr(layer, "other_param_names", ("scaling",)):
        held = getattr(layer, setting, None)
        if isinstance(held, Mapping):
            yield from (f"{setting} {name} {_plain(held[name])!r}" for name in adapters if name in held)


def _plain(value: Any) -> Any:
    """A setting that can be compared and written: of other objects only their class."""
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


_Slot = tuple[Mapping[str, Any], str]


def _slots(model: nn.Module) -> list[_Slot]:
    """Where the model's own weights are: its modules' parameters and stored buffers, those of adapters left out."""
    layers: Iterator[tuple[str, Any]] = adapted_layers(model)
    containers = [getattr(layer, name, None) for _, layer in layers for name in layer.adapter_layer_names]
    inside = {id(part) for each in containers if isinstance(each, nn.Module) for part in each.modules()}
    return [
        (held, name)
        for module in model.modules()
        if id(module) not in inside
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]


def _held(slots: Sequence[_Slot]) -> list[torch.Tensor | None]:
    return [held.get(name) for held, name in slots]


def _marks_of(tensors: Sequence[Any]) -> list[Any]:
    """What differs once a tensor was replaced, or written to in its place."""
    try:
        return [(tensor.data_ptr(), tensor._version) for tensor in tensors]
    except (AttributeError, NotImplementedError, RuntimeError):  # gone, made in inference mode, or quantised
        return [
            None
            if each is None
            else (each.data_ptr() if _is_plain(each) else id(each), None if each.is_inference() else each._version)
            for each in tensors
        ]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has an address and values to look at; subclasses of tensors may not."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


def _samples(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    usable = [part.data for part in parts if _is_plain(part) and part.dtype in _SAMPLED_DTYPES and part.numel()]
    chosen = usable[:: -(-len(usable) // SAMPLED_TENSORS)] if usable else []
    flat = [tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()[:0] for tensor in chosen]
    return [values[:: max(1, len(values) // SAMPLED_VALUES)] for values in flat if len(values)]


def _joined(samples: list[torch.Tensor]) -> torch.Tensor:
    if not samples:
        return torch.empty(0)
    return torch.cat(samples).nan_to_num()  # what is no number equals nothing, and would be another one at each look
