"""What the fusor needs of an engine: its own layers, walked one at a time on any subset of a prompt's rows."""

from collections.abc import Callable
from typing import Protocol

import torch

from cacheblend.core.layers.attention import AttentionSpec

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]
"""(query [heads, n, head_dim], keys [kv_heads, n, head_dim], values, spec) -> [n, heads, head_dim].

An engine's layer calls it once with q, k, v of the rows it was given, behind RoPE, and goes on with the answer."""


class LayerRunner(Protocol):
    """Runs an engine's layers for one prompt. Holds what belongs to the prompt (positions, angles), nothing global.

    `rows` are indices into the runner's rows, ascending int64 [n]; `hidden` is [n, width] in the model's dtype.
    """

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    def embed(self) -> torch.Tensor:
        """The first layer's input for all rows, [rows, width]."""
        ...

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh keys and values of these rows, [kv_heads, n, head_dim] each; nothing behind them is computed."""
        ...

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output for these rows, [n, width]; calls `attend` once."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of one row's final hidden state [1, width]: [vocab]; empty where the engine computes them itself."""
        ...
