"""A model whose calls compute their rows with one LoRA adapter, or with none (implements `layers.DecoderModel`).

Where vLLM was started without LoRA, that is the model itself. Knows numbers of adapters; does not know slots.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from cacheblend.engines.vllm.compat_lora import NO_ADAPTER, LoadedAdapters
from cacheblend.engines.vllm.compat_shim import AttentionAnswer
from cacheblend.engines.vllm.worker.layers import DecoderModel


class AdaptedModels:
    """One model with each of its adapters.

    Args:
        model: without any.
        loaded: its adapters; None: vLLM was started without LoRA.
        tile_rows: tokens that are embedded at once.
    """

    def __init__(self, model: DecoderModel, loaded: LoadedAdapters | None, tile_rows: int) -> None:
        self._model, self._loaded, self._tile_rows = model, loaded, tile_rows
        self._inside = [loaded.modules_of(layer.module) for layer in model.layers] if loaded else []
        self._beside = loaded.modules_beside([layer.module for layer in model.layers]) if loaded else []

    def of(self, adapter: int = NO_ADAPTER) -> DecoderModel:
        """The model with an adapter, which has to be in a slot when its rows are computed."""
        if self._loaded is None:
            return self._model
        return AdaptedModel(self._model, self._loaded, adapter, self._inside, self._beside, self._tile_rows)


class AdaptedModel:
    """See the module; made by `AdaptedModels`."""

    def __init__(
        self,
        model: DecoderModel,
        loaded: LoadedAdapters,
        adapter: int,
        inside: Sequence[Sequence[Any]],
        beside: Sequence[Any],
        tile_rows: int,
    ) -> None:
        self._model, self._loaded, self._adapter = model, loaded, adapter
        self._beside, self._tile_rows = beside, tile_rows
        self.layers = [partial(self._run, *each) for each in zip(model.layers, inside, strict=True)]
        self.specs = model.specs

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `DecoderModel.embed`; some rows at a time, as vLLM's LoRA layers take memory by rows."""
        parts = []
        for tile in torch.split(token_ids, self._tile_rows):
            with self._loaded.applied(self._adapter, len(tile), self._beside):
                parts.append(self._model.embed(tile))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def row_inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """See `DecoderModel.row_inputs`."""
        with self._loaded.applied(self._adapter, len(token_ids), self._beside):
            return self._model.row_inputs(token_ids, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderModel.logits`."""
        with self._loaded.applied(self._adapter, len(hidden), self._beside):
            return self._model.logits(hidden)

    def answering(self, layer: int, answer: AttentionAnswer) -> AbstractContextManager[None]:
        """See `DecoderModel.answering`."""
        return self._model.answering(layer, answer)

    def _run(self, layer: Callable[..., Any], modules: Sequence[Any], positions: torch.Tensor, *rest: Any) -> Any:
        with self._loaded.applied(self._adapter, positions.shape[-1], modules):
            return layer(positions, *rest)
