"""Runs vLLM's own decoder layers on any subset of a prompt's rows (fills `core.layers.runner.LayerRunner`)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from cacheblend.core.fuse.batching import LayerRows
from cacheblend.core.layers.runner import Attend

if TYPE_CHECKING:
    from cacheblend.engines.vllm.model import BlendModel


class _ProjectedError(Exception):
    """Leaves a layer as soon as its keys and values are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class VllmLayerRunner:
    """One prompt's runner. Row i has `token_ids[i]` and stands at `positions[i]`.

    vLLM's layers hand on two tensors, what the last one added and the sum of all before it; a row's hidden state here
    is both beside each other, [n, 2 * width].

    Args:
        model: whose layers.
        token_ids, positions: [rows] int64 on the model's device.
    """

    def __init__(self, model: "BlendModel", token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        self.model, self.token_ids, self.positions = model, token_ids, positions

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.model.layers)

    def embed(self) -> torch.Tensor:
        """[rows, 2 * width]; of the sum there is nothing yet."""
        added = self.model.embed(self.token_ids)
        return torch.cat([added, torch.zeros_like(added)], dim=1)

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, head_dim]: norm and projections only."""

        def stop(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            raise _ProjectedError(_heads_first(keys), _heads_first(values))

        try:
            self._run(layer, hidden, rows, stop)
        except _ProjectedError as projected:
            return projected.keys, projected.values
        raise RuntimeError(f"layer {layer} finished without attention")

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output [n, 2 * width]."""
        spec = self.model.specs[layer]

        def answer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return attend(_heads_first(query), _heads_first(keys), _heads_first(values), spec)

        return self._run(layer, hidden, rows, answer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Nothing: vLLM computes the prompt's last token itself."""
        return hidden.new_empty(0)

    def _run(
        self,
        layer: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        # Copies: vLLM's kernels may write to what they are given.
        added, total = (part.clone(memory_format=torch.contiguous_format) for part in hidden.chunk(2, dim=1))
        with self.model.answering(layer, answer):
            out = self.model.layers[layer](self.positions[rows], added, total if layer else None)
        return torch.cat(out, dim=1)


def join(calls: Sequence[LayerRows]) -> VllmLayerRunner:
    """A runner over the rows of several prompts; see `core.fuse.batching`."""
    runners = [(cast(VllmLayerRunner, call.runner), call.rows) for call in calls]
    token_ids = torch.cat([runner.token_ids[rows] for runner, rows in runners])
    positions = torch.cat([runner.positions[rows] for runner, rows in runners])
    return VllmLayerRunner(runners[0][0].model, token_ids, positions)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[n, heads, head_dim] to [heads, n, head_dim], a view."""
    return rows.transpose(0, 1)
