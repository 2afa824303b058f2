"""Layers with a recurrent state (state-space, linear attention, convolution) of transformers models.

    rows in front          rows of a call
    |................|-----------------|
                     ^                 ^
              states go in      states come out        a `StateTap` stands where such a layer expects a cache

Nothing here is per model: what a layer keeps is what it hands to the tap, and the survey checks that going on from it
gives what the layer computes in one piece.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import STATE_IDS, BlockName, state_name
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape

CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""What transformers' layers call the cache that they are given."""

_DIGEST_BYTES = 4

StateKey = tuple[str, int]
"""Which state of a layer: ``conv`` or ``recurrent``, and its number."""

LayerState = dict[StateKey, torch.Tensor]
"""The states of one layer, [1, ...] each."""

States = dict[int, LayerState]
"""The states of a model's recurrent layers behind some row, by the layer's index."""


def copy_of(states: States) -> States:
    """A copy that the next rows of the original do not change."""
    return {layer: {key: part.clone() for key, part in state.items()} for layer, state in states.items()}


@dataclass
class StateTap:
    """Takes the place of transformers' cache in a layer's call: hands out the layer's states, and takes new ones.

    Attributes:
        state: of the layer, in front of the call's rows before the call, and behind them after it.
    """

    state: LayerState

    def get_conv_state(self, layer_idx: int | None = None, state_idx: int = 0, **_: Any) -> torch.Tensor | None:
        """[1, channels, kernel size]: the inputs of the last rows; None in front of the first row."""
        return self.state.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int | None = None, state_idx: int = 0, **_: Any) -> torch.Tensor | None:
        """The state, [1, ...]; None in front of the first row."""
        return self.state.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Takes the inputs of the call's rows, [1, channels, n]; returns them behind those of the rows in front."""
        known, size = self.state.get(("conv", state_idx)), conv_kernel_size or conv_states.shape[-1]
        if known is None:
            whole = torch.nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            whole, size = torch.cat([known, conv_states], dim=-1), known.shape[-1]
        self.state[("conv", state_idx)] = whole[..., -size:].clone()
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int | None = None, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Takes the state behind the call's rows."""
        self.state[("recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether there are rows in front."""
        return any(number == state_idx for _, number in self.state)

    def is_recording_past(self, *_: Any) -> bool:
        """No: states are not rolled back."""
        return False

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of attention beside the state, as they are: the attention has those of the rows in front."""
        return keys, values


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's state: which one, its shape [1, ...], and its dtype."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parts_of(state: LayerState) -> tuple[StatePart, ...]:
    """What a layer's state is made of, in the order in which it is stored."""
    return tuple(StatePart(key, tuple(part.shape), part.dtype) for key, part in sorted(state.items()))


@dataclass(frozen=True)
class LayerKinds:
    """Which of a model's layers keep keys and values, which keep a state, and what follows for blending.

    Attributes:
        num_layers: of the model.
        kv_layers: layers with attention, ascending.
        states: what each recurrent layer keeps, by its index.
        stepped: recurrent layers that go on from a state one row at a time only (transformers' Mamba-1 ignores it in
            front of several rows).
    """

    num_layers: int
    kv_layers: tuple[int, ...]
    states: Mapping[int, tuple[StatePart, ...]]
    stepped: frozenset[int] = frozenset()

    @property
    def has_other_layers(self) -> bool:
        """Some layer is not attention alone."""
        return bool(self.states) or len(self.kv_layers) < self.num_layers

    def check_none(self, what: str) -> None:
        """Raises `InvalidInputError` if there are recurrent layers, which `what` does not take into account."""
        if self.states:
            raise InvalidInputError(
                f"{what} does not take into account that layer {min(self.states)} of this model keeps a state of the "
                "rows in front: leave it out for models with recurrent layers"
            )

    @property
    def first_to_drop(self) -> int:
        """The first layer in front of which no row is needed by a later state: the one behind the last recurrent."""
        return max(self.states, default=-1) + 1

    @property
    def last_to_mix(self) -> int:
        """The last layer with attention or a state."""
        return max((*self.kv_layers, *self.states), default=self.num_layers - 1)

    @property
    def blended_layers(self) -> range:
        """Layers in which rows can be left out: from the first that may drop rows to the last that mixes them, of which
        only keys and values are needed anyway."""
        first = next((layer for layer in self.kv_layers if layer >= self.first_to_drop), self.last_to_mix)
        return range(first, self.last_to_mix)

    @property
    def saveable(self) -> float:
        """Share of a prefill's row-layers that blending can leave out behind the exact prefix, at a ratio of 0."""
        return len(self.blended_layers) / self.num_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(part.nbytes for parts in self.states.values() for part in parts)


class SnapshotFormat:
    """Snapshots as blocks of a store: a record of bytes for each recurrent layer, behind the chain that they sum up.

        record   | digest of the parts | conv 0 | recurrent 0 | ... | padding |    uint8 [1, 2, 1, bytes / 2]

    The digest says which tensors lie in it, so that a state of another shape or dtype is not taken for this one.

    Args:
        states: see `LayerKinds`.
    """

    def __init__(self, states: Mapping[int, tuple[StatePart, ...]]) -> None:
        self._states = states
        sizes = [_DIGEST_BYTES + sum(part.nbytes for part in parts) for parts in states.values()]
        self.layout = KVLayout(tuple(LayerShape(1, -(-size // 2)) for size in sizes), torch.uint8)

    def encode(self, chain: BlockName, states: States) -> Block:
        """The block of a snapshot at the end of the chain of this name."""
        records = [self._record(number, states[layer]) for number, layer in enumerate(self._states)]
        return Block(state_name(chain), chain, STATE_IDS, records, self.layout)

    def _record(self, number: int, state: LayerState) -> torch.Tensor:
        parts = list(self._states.values())[number]
        tensors = [state[part.key].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in parts]
        whole = torch.zeros(self.layout.record_shape(number, 1), dtype=torch.uint8)
        held = torch.cat([_digest(parts), *tensors])
        whole.view(-1)[: len(held)] = held
        return whole

    def decode(self, records: Sequence[torch.Tensor], device: torch.device) -> States | None:
        """The states, on the device; None if the records hold other tensors."""
        states: States = {}
        for (layer, parts), record in zip(self._states.items(), records, strict=True):
            data = record.reshape(-1)
            if not torch.equal(data[:_DIGEST_BYTES].cpu(), _digest(parts)):
                return None
            states[layer] = dict(_split(data[_DIGEST_BYTES:], parts, device))
        return states


def _split(data: torch.Tensor, parts: Sequence[StatePart], device: torch.device) -> Iterator[tuple[StateKey, Any]]:
    at = 0
    for part in parts:
        # cloned: the store's memory is not written to, and may not be aligned for the dtype
        yield part.key, data[at : at + part.nbytes].clone().view(part.dtype).view(part.shape).to(device)
        at += part.nbytes


def _digest(parts: Sequence[StatePart]) -> torch.Tensor:
    text = repr([(part.key, part.shape, str(part.dtype)) for part in parts])
    return torch.frombuffer(bytearray(zlib.crc32(text.encode()).to_bytes(_DIGEST_BYTES, "little")), dtype=torch.uint8)
