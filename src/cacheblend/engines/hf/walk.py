"""Walks a transformers model's own layers on any subset of a prompt's rows (fills `core.walk.LayerWalk`)."""

from dataclasses import replace
from typing import Any

import torch

from cacheblend.core.attention import AttentionSpec
from cacheblend.core.walk import Attend
from cacheblend.engines.hf.view import LayerMask, ModelView


class _ProjectedError(Exception):
    """Leaves a layer as soon as its keys and values are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


def _stop_at_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    raise _ProjectedError(keys, values)


class HfWalk:
    """One prompt's walk. Row i has `token_ids[i]` and stands at `positions[i]`.

    Args:
        view: of the model.
        token_ids: [rows] int64 on the model's device.
        positions: [rows] int64, ascending.
    """

    def __init__(self, view: ModelView, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        self._view, self._token_ids, self._positions = view, token_ids, positions
        self._first_hidden: torch.Tensor | None
        self._first_hidden, self._calls = view.open(token_ids, positions)
        self._layers_give_tuples = False

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._view.layers)

    @property
    def calls(self) -> list[Any]:
        """How the model's forward would call each layer."""
        return list(self._calls)

    def embed(self) -> torch.Tensor:
        """[rows, width]; the caller may write to it. Handed out once, so that nobody else holds it."""
        hidden, self._first_hidden = self._first_hidden, None
        if hidden is None:
            raise RuntimeError("a walk's embedding is handed out once; open another walk")
        return hidden[0]

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, head_dim]: norm and projections only."""
        try:
            self.run(layer, hidden, rows, _stop_at_attention)
        except _ProjectedError as projected:
            return projected.keys, projected.values
        raise RuntimeError(f"layer {layer} finished without attention; the survey should have refused this model")

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output [n, width]."""
        call = self._calls[layer]
        args = [self._of_rows(value, rows, attend) for value in call.args]
        kwargs = {name: self._of_rows(value, rows, attend) for name, value in call.kwargs.items()}
        out = self._view.layers[layer](hidden[None], *args, **kwargs)
        self._layers_give_tuples = isinstance(out, tuple)
        output: torch.Tensor = out[0] if self._layers_give_tuples else out
        return output[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[vocab] of the last row, given its final hidden state [1, width]."""
        output = (hidden[None],) if self._layers_give_tuples else hidden[None]
        return self._view.close(output, self._token_ids[-1:], self._positions[-1:])

    def _of_rows(self, value: Any, rows: torch.Tensor, attend: Attend) -> Any:
        """The part of a layer's argument that belongs to these rows: tensors [1, rows, ...] are indexed."""
        if isinstance(value, LayerMask):
            return replace(value, attend=attend)
        if isinstance(value, tuple):
            return tuple(self._of_rows(part, rows, attend) for part in value)
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, len(self._token_ids)):
            return value if len(rows) == value.shape[1] else value.index_select(1, rows)
        return value
