"""What a worker's prefills load from: nothing for a capture, and with several ranks only layers that all of them have.

Knows the loader and the ranks. Does not know jobs or vLLM's paged cache.
"""

from collections.abc import Sequence

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import BlockEntry
from cacheblend.core.plan.plan import RESIDENT
from cacheblend.engines.vllm import compat


class EmptySource:
    """A `BlockSource` that holds no block: everything planned with it is computed."""

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """None for each name."""
        return [None] * len(names)

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """An error for each name."""
        return [BlockLostError([name], "nothing is held here") for name in names]


class AgreedLoader(LayerLoader):
    """A loader that gives a layer on all ranks or on none: a rank that continued alone would wait for the others."""

    def layer(self, index: int) -> LayerKV:
        """See `LayerLoader.layer`; where one rank lost a block, every rank loses all of them."""
        known, lost, kv = index in self._given, "", None
        try:
            kv = super().layer(index)
        except Exception as error:  # of any kind: the other ranks must learn of it
            lost = f"{type(error).__name__}: {error}"
        if known and kv is not None:
            return kv
        flag = torch.tensor([float(bool(lost))], device=self._device)
        if float(compat.over_ranks(flag, "max")) or kv is None:
            names = list({span.name for span in self._plan.spans if span.name != RESIDENT})
            raise BlockLostError(names, lost or f"layer {index}: another rank lost a block")
        return kv
