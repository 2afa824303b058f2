"""Layers with a recurrent state (state-space, linear attention, convolution) of transformers models.

    rows in front          rows of a call
    |................|-----------------|
                     ^                 ^
              states go in      states come out        a `StateTap` stands where such a layer expects a cache

What a layer keeps is what it hands to the tap; the survey checks that going on from it gives what the layer computes
in one piece. A prefill goes on from a snapshot of the states, and leaves new ones:

    prompt     | BOS | system   | chunk A | chunk B | question |
    KV held    | yes | yes      | yes     | yes     |          |
    snapshot   |     |          | yes     |         |          |
    resumed    |------- loaded ---------->| computed, every row in every layer up to the last recurrent one

Snapshots are looked for at the ends of the exact prefix's blocks, the deepest first. Below also: transformers' caches
of a whole prompt, from and to the form of the core's buffers.
"""

import inspect
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cacheblend.core.errors import BlockLostError, InvalidInputError, LoadTimeoutError
from cacheblend.core.failures import LOST_BLOCK, count_failure
from cacheblend.core.fuse.prefill import Recurrence
from cacheblend.core.fuse.runner import LayerRunner
from cacheblend.core.kernels import latent
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.names import STATE_IDS, BlockName, state_name
from cacheblend.core.plan.blocks import Block, BlockSource, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan, Source

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # what transformers calls it, the first from 5.24 on
SHORTEST = 16  # tokens in front of a snapshot at least: fewer are computed sooner than a state is read
STEP_ROWS = 16  # rows computed together that one row alone is taken to cost, where layers go row by row
_DIGEST_BYTES = 4

StateKey = tuple[str, int]  # which state of a layer: ``conv`` or ``recurrent``, and its number
LayerState = dict[StateKey, torch.Tensor]  # the states of one layer, [1, ...] each
States = dict[int, LayerState]  # the states of a model's recurrent layers behind some row, by the layer's index


def cache_argument(model: Any, cache: object) -> dict[str, Any]:
    """A cache as the keyword argument of a model's forward, by the name that it has there: the older one warns."""
    forward = getattr(model, "get_base_model", lambda: model)().forward  # PEFT's own takes anything
    known = inspect.signature(forward).parameters
    return {next((name for name in CACHE_ARGUMENTS if name in known), "past_key_values"): cache}


def copy_of(states: States) -> States:
    """A copy that the next rows of the original do not change."""
    return {layer: {key: part.clone() for key, part in state.items()} for layer, state in states.items()}


@dataclass
class StateTap:
    """Takes the place of transformers' cache in a layer's call: hands out the layer's states, and takes new ones.
    `state` is the layer's in front of the call's rows before the call, and behind them after it."""

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
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parts_of(state: LayerState) -> tuple[StatePart, ...]:
    """What a layer's state is made of, in the order in which it is stored."""
    return tuple(StatePart(key, tuple(part.shape), part.dtype) for key, part in sorted(state.items()))


@dataclass(frozen=True)
class LayerKinds:
    """Which of a model's layers keep keys and values, which keep a state, and what follows for blending."""

    num_layers: int
    kv_layers: tuple[int, ...]  # layers with attention, ascending
    states: Mapping[int, tuple[StatePart, ...]]  # what each recurrent layer keeps, by its index
    # recurrent layers that go on from a state row by row only: transformers' Mamba-1 ignores it in front of several
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
        return sum(part.nbytes for parts in self.states.values() for part in parts)


class SnapshotFormat:
    """Snapshots as blocks of a store: a record of bytes for each recurrent layer, behind the chain that they sum up.

        record   | digest of the parts | conv 0 | recurrent 0 | ... | padding |    uint8 [1, 2, 1, bytes / 2]

    The digest says which tensors lie in it, so that a state of another shape or dtype is not taken for this one.
    """

    def __init__(self, states: Mapping[int, tuple[StatePart, ...]]) -> None:
        self._states = states
        sizes = [_DIGEST_BYTES + sum(part.nbytes for part in parts) for parts in states.values()]
        self.layout = KVLayout(tuple(LayerShape(1, -(-size // 2)) for size in sizes), torch.uint8)

    def encode(self, chain: BlockName, states: States) -> Block:
        """The block of a snapshot at the end of the chain of this name."""
        records = []
        for number, (layer, parts) in enumerate(self._states.items()):
            state = states[layer]
            tensors = [state[part.key].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in parts]
            held = torch.cat([_digest(parts), *tensors])
            record = torch.zeros(self.layout.record_shape(number, 1), dtype=torch.uint8)
            record.view(-1)[: len(held)] = held
            records.append(record)
        return Block(state_name(chain), chain, STATE_IDS, records, self.layout)

    def decode(self, records: Sequence[torch.Tensor], device: torch.device) -> States | None:
        """The states, on the device; None if the records hold other tensors."""
        states: States = {}
        for (layer, parts), record in zip(self._states.items(), records, strict=True):
            data, at = record.reshape(-1), _DIGEST_BYTES
            if not torch.equal(data[:at].cpu(), _digest(parts)):
                return None
            states[layer] = {}
            for part in parts:
                # cloned: the store's memory is not written to, and may not be aligned for the dtype
                tensor = data[at : at + part.nbytes].clone().view(part.dtype).view(part.shape).to(device)
                states[layer][part.key] = tensor
                at += part.nbytes
        return states


def _digest(parts: Sequence[StatePart]) -> torch.Tensor:
    text = repr([(part.key, part.shape, str(part.dtype)) for part in parts])
    return torch.frombuffer(bytearray(zlib.crc32(text.encode()).to_bytes(_DIGEST_BYTES, "little")), dtype=torch.uint8)


class PromptStates(NamedTuple):
    """What the recurrent layers keep of a prompt: behind its last row, and snapshots behind the rows up to a position,
    by the name of the chain that ends there."""

    last: States
    snapshots: dict[BlockName, States]


class Resuming(Recurrence):
    """One prefill's states: those that the pass goes on from, empty at the prompt's start, and why held snapshots could
    not be used (`lost`). `token_bytes`: of a token's stored KV; `chunks`: stored chunks can be exact prefixes."""

    def __init__(
        self, kinds: LayerKinds, source: BlockSource, device: torch.device, token_bytes: int, *, chunks: bool
    ) -> None:
        self._kinds, self._source, self._device, self._token_bytes = kinds, source, device, token_bytes
        self._chunks = chunks
        self._format = SnapshotFormat(kinds.states)
        self._first, self._cuts = 0, dict[int, BlockName]()
        self.states: States = {}
        self.lost: list[str] = []
        self.saveable_share = kinds.saveable if kinds.states else None

    def first_to_drop(self, num_layers: int) -> int:
        return self._kinds.first_to_drop

    def last_to_mix(self, num_layers: int) -> int:
        return self._kinds.last_to_mix

    def begin(self, plan: BlendPlan) -> BlendPlan:
        """Finds the deepest snapshot that can be read; the plan goes on from there."""
        if not self._kinds.states:
            return plan
        self._first, self.states = self._deepest(plan)
        plan = plan.resumed_at(self._first, loads=len(self._kinds.blended_layers) > 0)
        # Snapshots are taken at the end of what is exact, and in front of it so that they do not take more bytes than
        # the KV between them. Where layers go on row by row only, at the prompt's end at most.
        ends, wanted, last = plan.exact_ends(chunks=self._chunks), dict[int, BlockName](), 0
        apart = max(SHORTEST, -(-self._kinds.state_bytes // max(1, self._token_bytes)))
        for stop, name in ends.items():
            if stop - last >= apart or (stop == max(ends) and stop >= SHORTEST):
                wanted[stop] = name
                last = stop
        behind = max(self._first, len(plan) - 1 if self._kinds.stepped else 0)
        self._cuts = {stop: name for stop, name in wanted.items() if stop > behind}
        return plan

    def cuts(self, plan: BlendPlan) -> Sequence[int]:
        return list(self._cuts)

    def kept(self, runner: LayerRunner) -> PromptStates:
        held: Any = runner  # an `HfLayerRunner`
        snapshots = {self._cuts[self._first + rows]: states for rows, states in held.snapshots.items()}
        return PromptStates(held.states, snapshots)

    def _deepest(self, plan: BlendPlan) -> tuple[int, States]:
        """Where the deepest snapshot of the exact prefix was taken, and its states; at position 0 there are none."""
        ends: dict[int, BlockName] = {}
        for span in plan.spans:
            if span.source is not Source.PREFIX or span.stop >= len(plan):
                break
            is_close = not self._kinds.stepped or (len(plan) - span.stop) * STEP_ROWS < len(plan)
            if span.is_whole and is_close:  # of a part of a block the state behind it is not known
                ends[span.stop] = state_name(span.name)
        entries = self._source.find(list(ends.values())) if ends else []
        held = [(stop, name) for (stop, name), entry in zip(ends.items(), entries, strict=True) if entry is not None
                and entry.layout == self._format.layout]  # fmt: skip
        for stop, name in reversed(held):
            [found] = self._source.read_layers([name], range(len(self._format.layout.layers)))
            if isinstance(found, LoadTimeoutError):
                break  # the budget has noted it
            if isinstance(found, BlockLostError):
                self.lost.append(f"the states at position {stop}: {found.reason}")
                count_failure(LOST_BLOCK)
            elif (states := self._format.decode(found, self._device)) is not None:
                return stop, states
        return 0, {}


def snapshot_blocks(kinds: LayerKinds, states: PromptStates) -> list[Block]:
    """The snapshots of a prompt as blocks for the store."""
    layout = SnapshotFormat(kinds.states)
    return [layout.encode(name, snapshot) for name, snapshot in states.snapshots.items()]


def rotary_dims(model: nn.Module) -> dict[int, int]:
    """Numbers of the rotated key part of each layer of a model that attends over latents, by the layer's index."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    return {int(module.layer_idx): int(module.qk_rope_head_dim) for module in found}


def whole_cache(model: Any, kinds: LayerKinds) -> DynamicCache:
    """An empty cache that keeps all tokens, also in layers with a sliding window."""
    if not kinds.has_other_layers:
        return DynamicCache()  # without a config it knows no windows
    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(each) is DynamicSlidingWindowLayer else each for each in cache.layers]
    return cache


def layers_with_states(model: Any) -> set[int]:
    """The layers for which transformers' own cache keeps a state, as far as its config tells. In half precision a state
    may be too small in a few rows of noise to be told from rounding."""
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # of a config that it does not understand: such a model runs with a cache of its own
        return set()
    return {index for index, layer in enumerate(layers) if hasattr(layer, "update_recurrent_state")}


def kv_of_cache(model: nn.Module, cache: DynamicCache, row: int = 0) -> list[LayerKV]:
    """The KV of one sequence in transformers' cache, in the form of the core's buffers; of layers with attention. Where
    a layer attends over latents, transformers has the latent for keys, and the rotated part for values."""
    dims = rotary_dims(model)
    kept = {
        index: (layer.keys[row], layer.values[row])
        for index, layer in enumerate(cache.layers)
        if getattr(layer, "keys", None) is not None
    }
    return [
        LayerKV(*(latent.halves(second, first) if index in dims else (first, second)))
        for index, (first, second) in kept.items()
    ]


def fill_cache(model: Any, kv: list[LayerKV], states: States | None = None) -> DynamicCache:
    """Moves a prompt's KV into a cache of transformers' model; empties `kv`, one entry per layer (of no heads where a
    layer has no attention), so that no layer is held twice. `states` of recurrent layers are copied."""
    cache, dims = DynamicCache(config=model.config), rotary_dims(model)
    for layer in range(len(kv)):
        first, second = kv.pop(0)
        if layer in dims:
            second, first = latent.parts(first, second, dims[layer])
        if first.shape[0]:
            cache.update(first[None], second[None], layer)
    for layer, state in (states or {}).items():
        for (kind, number), part in state.items():
            update = cache.update_conv_state if kind == "conv" else cache.update_recurrent_state
            update(part, layer, state_idx=number)
    return cache
