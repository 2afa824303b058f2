"""Runs a transformers model's own layers on any subset of a prompt's rows: implements the core's `LayerRunner`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from cacheblend.core.fuse.batching import LayerRows
from cacheblend.core.fuse.runner import Attend, projected
from cacheblend.core.kernels.upload import upload
from cacheblend.engines.hf.recurrent import LayerState, States, copy_of
from cacheblend.engines.hf.view import LayerCall, LayerMask, ModelView

_KEPT_ROWS = 16  # tiles of rows whose arguments are kept for the next layers


@dataclass(frozen=True)
class OfRows:
    """A layer argument with one part per row, [1, rows, ...]."""

    part: torch.Tensor


class HfLayerRunner:
    """Runs the layers for one prompt. Row i has the token `token_ids[i]` at `positions[i]`, [rows] int64 each, on the
    model's device (positions may be elsewhere, which costs time). `calls` has each layer's arguments, as the model's
    own forward passes them. `states` are of recurrent layers in front of the first row; the runner goes on from them
    and changes them. Behind so many rows as `cuts` has they are copied (`snapshots`); tiles end there."""

    def __init__(
        self,
        view: ModelView,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        states: States | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        self.view, self._token_ids, self._positions = view, token_ids, upload(positions, token_ids.device)
        self.states: States = {} if states is None else states
        self.snapshots: dict[int, States] = {cut: {} for cut in cuts}
        self._done: dict[int, int] = {}  # rows that each recurrent layer has computed
        self._parts: dict[int, tuple[torch.Tensor, dict[int, OfRows]]] = {}
        self._first_hidden: torch.Tensor | None
        self._first_hidden, self.calls = view.open(token_ids, self._positions)

    @property
    def num_layers(self) -> int:
        return len(self.view.layers)

    def embed(self) -> torch.Tensor:
        """The embedded rows, [rows, width]. Callable once: the caller owns the tensor and may write to it."""
        hidden, self._first_hidden = self._first_hidden, None
        if hidden is None:
            raise RuntimeError("embed() may be called once per runner; open another runner")
        return hidden[0]

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, head_dim]; computes only the layer's norm and projections."""
        return projected(partial(self.run_from, {}, layer, hidden, rows), torch.clone)

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output [n, width]. Of a recurrent layer the rows follow those of the call before."""
        if layer not in self.view.recurrent:
            return self.run_from({}, layer, hidden, rows, attend)
        state = self.states.setdefault(layer, {})
        out = self.run_from(state, layer, hidden, rows, attend)
        self._done[layer] = self._done.get(layer, 0) + len(rows)
        if (snapshot := self.snapshots.get(self._done[layer])) is not None:
            snapshot[layer] = copy_of({layer: state})[layer]
        return out

    def run_from(
        self, state: LayerState, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The layer's output [n, width], going on from this state, if it is recurrent, and changing it."""
        if layer in self.view.stepped and state and len(rows) > 1:
            each = zip(torch.split(hidden, 1), torch.split(rows, 1), strict=True)
            return torch.cat([self.run_from(state, layer, part, row, attend) for part, row in each])
        kept = state if layer in self.view.recurrent else None
        if len(rows) == len(self._token_ids):  # all of them, as in decoding, where each microsecond is spent per layer
            call = self.calls[layer]
            kwargs = {name: _answered(value, attend) for name, value in call.kwargs.items()}
            return self.view.run_layer(layer, hidden, LayerCall(_answered(call.args, attend), kwargs), kept)
        return self.view.run_layer(layer, hidden, side_by_side([self.arguments(layer, rows)], attend), kept)

    def arguments(self, layer: int, rows: torch.Tensor) -> LayerCall:
        """The layer's arguments for these rows, without the hidden states; per-row arguments are `OfRows`."""
        call = self.calls[layer]
        return LayerCall(self._of_rows(call.args, rows), {k: self._of_rows(v, rows) for k, v in call.kwargs.items()})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last n rows, [n, vocab], given their final hidden states [n, width]; [vocab] of one row."""
        n = len(hidden)
        logits = self.view.close(hidden, self._token_ids[-n:], self._positions[-n:])
        return logits[0] if n == 1 else logits

    def _of_rows(self, value: Any, rows: torch.Tensor) -> Any:
        """The part of a layer's argument for these rows: tensors [1, rows, ...] are indexed, others kept. Layers share
        arguments, and run the same rows again and again: parts are kept for some tiles of rows."""
        if isinstance(value, tuple):
            return tuple(self._of_rows(part, rows) for part in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, len(self._token_ids)):
            return value
        if len(rows) == value.shape[1]:
            return OfRows(value)
        if id(rows) not in self._parts:
            if len(self._parts) == _KEPT_ROWS:
                self._parts.clear()
            self._parts[id(rows)] = rows, {}  # which is kept, so that no other has its number
        parts = self._parts[id(rows)][1]
        if id(value) not in parts:
            parts[id(value)] = OfRows(value.index_select(1, rows))
        return parts[id(value)]


def side_by_side(calls: Sequence[LayerCall], attend: Attend) -> LayerCall:
    """Joins the arguments (`HfLayerRunner.arguments`) of several prompts' rows, in order, into one call of a layer."""
    names = calls[0].kwargs
    return LayerCall(
        _merged([call.args for call in calls], attend),
        {name: _merged([call.kwargs[name] for call in calls], attend) for name in names},
    )


def _answered(value: Any, attend: Attend) -> Any:
    """An argument with this attention in its mask. No inner function, which would be a cycle and keep a KV cache."""
    if isinstance(value, LayerMask):
        return replace(value, attend=attend)
    return tuple(_answered(part, attend) for part in value) if type(value) is tuple else value


def _merged(values: Sequence[Any], attend: Attend) -> Any:
    first = values[0]
    if isinstance(first, OfRows):
        return first.part if len(values) == 1 else torch.cat([value.part for value in values], dim=1)
    if isinstance(first, LayerMask):
        return replace(first, attend=attend)
    if isinstance(first, tuple):
        return tuple(_merged(parts, attend) for parts in zip(*values, strict=True))
    return first


@dataclass(frozen=True)
class JoinedRows:
    """Rows of several prompts that run the same layer (implements `core.fuse.batching.RunsLayer`)."""

    calls: Sequence[LayerRows]

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output [n, width]; `rows` numbers the rows of all calls, in order."""
        runners = [cast(HfLayerRunner, call.runner) for call in self.calls]
        if layer in runners[0].view.recurrent:  # a state goes from row to row: no rows of others may lie between
            return torch.cat([call.run() for call in self.calls])
        arguments = [runner.arguments(layer, call.rows) for runner, call in zip(runners, self.calls, strict=True)]
        return runners[0].view.run_layer(layer, hidden, side_by_side(arguments, attend))
