"""Loads the KV of a model in which not every layer has attention: a loader's layers are those that have KV."""

from concurrent.futures import Future
from typing import Any

import torch

from cacheblend.core.load.layer_kv import LayerCache, LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import BlockSource, KVLayout
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.engines.hf.recurrent import LayerKinds


class SparseLoader(LayerLoader):
    """A loader whose layers are numbered as the model's. Layers without attention have KV of no heads.

    Args:
        kinds: of the model's layers.
        plan, source, layout, rotations: see `LayerLoader`; layout and rotations are those of the layers with attention.
        first_reused_layer: see `LayerLoader`; one of the model's layers.
        **options: see `LayerLoader`.
    """

    def __init__(
        self,
        kinds: LayerKinds,
        plan: BlendPlan,
        source: BlockSource,
        layout: KVLayout,
        rotations: Any,
        *,
        first_reused_layer: int = 0,
        **options: Any,
    ) -> None:
        self._numbers = {layer: number for number, layer in enumerate(kinds.kv_layers)}
        reused = sum(layer < first_reused_layer for layer in kinds.kv_layers)
        super().__init__(plan, source, layout, rotations, first_reused_layer=reused, **options)
        nothing = torch.zeros(0, len(plan), 0, dtype=layout.dtype, device=self._device)
        self._nothing = LayerKV(nothing, nothing)

    def layer(self, index: int) -> LayerCache:
        """See `LayerLoader`."""
        number = self._numbers.get(index)
        return self._nothing if number is None else super().layer(number)

    def awaited(self, index: int) -> "Future[Any] | None":
        """See `LayerLoader`. In front of a layer without attention the next one is read ahead."""
        number = self._numbers.get(index)
        if number is not None:
            return super().awaited(number)
        if (following := next((n for layer, n in self._numbers.items() if layer > index), None)) is not None:
            super().awaited(following)
        return None

    def release(self, index: int) -> None:
        """See `LayerLoader`."""
        if (number := self._numbers.get(index)) is not None:
            super().release(number)


def open_loader_of(kinds: LayerKinds, *arguments: Any, **options: Any) -> LayerLoader:
    """A loader for a model with such layers."""
    if len(kinds.kv_layers) == kinds.num_layers:
        return LayerLoader(*arguments, **options)
    return SparseLoader(kinds, *arguments, **options)
