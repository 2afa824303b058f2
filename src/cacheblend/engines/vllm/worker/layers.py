"""Runs vLLM's own decoder layers on any subset of a prompt's rows (implements `core.fuse.runner.LayerRunner`)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from cacheblend.core.fuse.batching import LayerRows
from cacheblend.core.fuse.runner import Attend, projected
from cacheblend.core.kernels.float8 import Float8
from cacheblend.engines.vllm.internals.attention_shim import NO_ADAPTER, AttentionAnswer


class VllmLayerRunner:
    """The layer runner of one prompt: row i is the token `token_ids[i]` at `positions[i]`. Many of vLLM's layers pass
    on two tensors, a layer's output and the residual sum of all before it, since a kernel adds them and normalises in
    one go. The hidden state here is their sum, half as large, which every layer takes as the first one does: without a
    residual. In bf16 the norm then reads the rounded sum. See `calls.HiddenForm`. Ids and positions are [rows] int64 on
    the model's device; `adapter` is of all rows, in a slot when they are computed. `model`: a `BlendModel`."""

    def __init__(self, model: Any, token_ids: torch.Tensor, positions: torch.Tensor, adapter: int = NO_ADAPTER) -> None:
        self.model, self.token_ids, self.positions, self.adapter = model, token_ids, positions, adapter
        self._row_inputs: Sequence[tuple[torch.Tensor, ...]] | None = None

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def embed(self) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed(self.token_ids, self.adapter)
        return embedded

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, head_dim], by the layer's norm and projections; `hidden` stays as it is."""
        return projected(partial(self._run, layer, hidden, rows), _heads_first)

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output [n, width], written over `hidden` where vLLM's kernels work in place."""
        spec = self.model.specs[layer]

        def answer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return attend(_heads_first(query), _heads_first(keys), _heads_first(values), spec)

        return self._run(layer, hidden, rows, answer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Empty: vLLM computes the prompt's last token itself."""
        return hidden.new_empty(0)

    def _run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, answer: AttentionAnswer) -> torch.Tensor:
        if self._row_inputs is None:
            self._row_inputs = self.model.row_inputs(self.token_ids, self.positions, self.adapter)
        inputs = [each[rows] for each in self._row_inputs[layer]]
        with self.model.answering(layer, answer, self.adapter, len(rows)):
            out: torch.Tensor = self.model.layers[layer](self.positions[rows], hidden, inputs)
        return out


class CheckRunner(VllmLayerRunner):
    """The layers for a comparison of answers: with logits, over keys and values as vLLM's cache keeps them; `float8`:
    how each layer's cache keeps numbers; None: unchanged."""

    def __init__(
        self,
        model: Any,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        adapter: int,
        float8: Sequence[Float8 | None],
    ) -> None:
        super().__init__(model, token_ids, positions, adapter)
        self._float8 = float8

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kept(layer, *super().project(layer, hidden, rows))

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        return super().run(layer, hidden, rows, lambda q, k, v, spec: attend(q, *self._kept(layer, k, v), spec))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.logits(hidden, self.adapter)
        return found

    def _kept(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's own operation writes them and its attention reads them: GPUs round to the nearest, the CPU build
        towards 0."""
        float8 = self._float8[layer]
        if float8 is None:
            return keys, values
        kept = float8.encode((keys, values))
        if keys.device.type == "cpu":
            for numbers, part, scale in zip(kept, (keys, values), float8.scales, strict=True):
                beyond = numbers.float().abs() > (part.float() / scale).abs()
                numbers.view(torch.uint8).sub_(beyond.to(torch.uint8))
        kept_keys, kept_values = float8.decode(kept)
        return kept_keys, kept_values


def join(calls: Sequence[LayerRows]) -> VllmLayerRunner:
    """A runner over the rows of several prompts; see `core.fuse.batching`."""
    runners = [(cast(VllmLayerRunner, call.runner), call.rows) for call in calls]
    token_ids = torch.cat([runner.token_ids[rows] for runner, rows in runners])
    positions = torch.cat([runner.positions[rows] for runner, rows in runners])
    return VllmLayerRunner(runners[0][0].model, token_ids, positions, runners[0][0].adapter)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1)
