"""What a worker's prefills load from: with several ranks only layers that all of them have.

Knows the loader and the ranks. Does not know jobs or vLLM's paged cache.
"""

from typing import Any

from cacheblend.core.errors import BlockLostError
from cacheblend.core.load.layer_kv import LayerCache
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.plan import RESIDENT
from cacheblend.engines.vllm.worker.ranks import FINE, LOST, Ranks


class AgreedLoader(LayerLoader):
    """A loader that gives a layer on all ranks or on none: a rank that continued alone would wait for the others.

    Args:
        ranks: that must agree.
        args, options: see `LayerLoader`.
    """

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks

    def layer(self, index: int) -> LayerCache:
        """See `LayerLoader.layer`; where one rank lost a block, every rank loses all of them.

        Raises:
            RankFailedError: another rank failed.
        """
        if index in self._given:
            return super().layer(index)
        kv, reason = None, "another rank lost a block"
        try:
            kv = super().layer(index)
        except BlockLostError as error:
            reason = error.reason
        if self._ranks.agree(LOST if kv is None else FINE, f"layer {index} is loaded") == LOST or kv is None:
            names = list({span.name for span in self._plan.spans if span.name != RESIDENT})
            raise BlockLostError(names, reason)
        return kv
