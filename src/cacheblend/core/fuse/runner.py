"""What a prefill needs from an engine: its layers, run one at a time on any subset of a prompt's rows."""

from collections.abc import Callable
from typing import Protocol

import torch

from cacheblend.core.kernels.attention import AttentionSpec

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]
"""(query [heads, n, head_dim], keys [kv_heads, n, head_dim], values, spec) -> [n, heads, head_dim].

An engine's layer calls it once, after RoPE, with q, k, v of the rows it was given, and continues with the result. Who
keeps them copies them: another call may write there."""


class _ProjectedError(Exception):
    """Leaves a layer as soon as its keys and values are known."""


def projected(
    run: Callable[[Callable[..., torch.Tensor]], object], kept: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer that `run` runs with the attention it is given. `kept` makes of each what is returned,
    while the layer still runs: behind it another call may write there."""

    def stop(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
        raise _ProjectedError(kept(keys), kept(values))

    try:
        run(stop)
    except _ProjectedError as left:
        keys, values = left.args
        return keys, values
    raise RuntimeError("a layer finished without attention; its model should have been refused")


class LayerRunner(Protocol):
    """Runs an engine's layers for one prompt. Holds the prompt's state (positions, angles) and no global state. `rows`
    are indices into the runner's rows, ascending int64 [n]; `hidden` is [n, width] in the model's dtype."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""

    def embed(self) -> torch.Tensor:
        """The first layer's input for all rows, [rows, width]."""

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh keys and values of these rows, [kv_heads, n, head_dim] each; attention and MLP are not computed."""

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The layer's output for these rows, [n, width]; calls `attend` once, if it has attention. `hidden` may be
        overwritten."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the final hidden states [n, width] of the last n rows: [n, vocab], or [vocab] of one row; empty
        where the engine computes them itself."""
