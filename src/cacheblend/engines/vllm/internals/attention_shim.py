"""What stands in for vLLM's attention modules while layers are run on some rows of a prompt."""

from collections.abc import Callable
from typing import Any

import torch

from cacheblend.core.errors import ModelNotBlendableError

AttentionAnswer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query, keys, values), [n, heads, head_dim] each, to the attention's output [n, heads, head_dim]."""


NO_ADAPTER = 0
"""What vLLM calls the LoRA adapter of rows without one; adapters count from 1."""


class AttentionShim:
    """Replaces an attention module in vLLM's look-up, and passes its queries, keys and values to `answer`."""

    def __init__(self, real: Any) -> None:
        self.real, self.kv_cache, self.layer_name = real, real.kv_cache, real.layer_name
        self.impl = self
        self.answer: AttentionAnswer | None = None

    def do_kv_cache_update(self, *_: Any) -> None:
        """Does nothing: the blended prefill writes fresh KV itself."""

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        """Attention of [n, heads, head_dim] each; writes to `output` as vLLM's implementations do."""
        answer, output = self.opened(query, options["output"])
        return output.copy_(answer(query, key, value).view_as(output))

    def opened(self, query: torch.Tensor, output: torch.Tensor) -> tuple[AttentionAnswer, torch.Tensor]:
        """What answers, and where the answer goes. Raises ModelNotBlendableError: queries come in another type than the
        answer has."""
        if self.answer is None:
            raise RuntimeError(f"{self.layer_name} was called outside of a layer runner")
        if query.dtype != output.dtype:
            raise ModelNotBlendableError(
                f"{self.layer_name} quantises its queries to {query.dtype}; start vLLM with --kv-cache-dtype bfloat16"
            )
        return self.answer, output
