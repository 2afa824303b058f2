"""Layers compiled by torch.compile: one kernel where a layer launches several between its products.

    norm, projections, RoPE │ attention │ projection, residual, norm, MLP, residual
    ─────── compiled ───────┘   ours    └─────────────── compiled ────────────────

A pass of few rows waits for the launches of small kernels. Layers of one kind share what is compiled, for any number of
rows. They are compared with the plain ones first: a compiler that fails costs speed and never an answer.
"""

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from cacheblend.core.kernels.operations import attend_rows
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.view import ATTENTION, ModelView, attend_by_mask

logger = logging.getLogger("cacheblend.compile")

_TOKENS = 64
_TILES = (slice(0, 64), slice(0, 1), slice(63, 64), slice(3, 36), slice(14, 64))
"""Rows that the comparison computes: all, one alone, which is compiled by itself, and parts of a tensor."""

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # of the largest number


@torch.no_grad()
def compile_layers(view: ModelView, device: torch.device, backend: str = "inductor") -> str:
    """Has the view run compiled layers, once they agree with the plain ones; the user's model is not compiled.
    Returns why the plain layers stay, which a warning says too; "" if the compiled ones serve."""
    plain = list(view.layers)
    try:
        apart: Any = torch.compiler.disable  # torch has no types for it
        AttentionInterface.register(ATTENTION, apart(attend_by_mask))
        compiled = [torch.compile(layer, dynamic=True, backend=backend) for layer in plain]
        reason = _difference(view, plain, compiled, device)
    except Exception as error:  # of a compiler: anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason:
        logger.warning("layers are not compiled: %s", reason)
        view.run_as(plain)
    return reason


def _difference(
    view: ModelView, plain: list[nn.Module], compiled: list[Callable[..., object]], device: torch.device
) -> str:
    """What differs between the layers on noise, "" if nothing does; leaves the view with the compiled ones. Each tile
    is computed with two attentions, to all rows and to half of them: what is compiled must not remember the one that it
    has seen."""
    vocab = view.model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocab, (_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    runner, rows = HfLayerRunner(view, ids, torch.arange(_TOKENS)), torch.arange(_TOKENS, device=device)
    noise = runner.embed()
    for tile, layer, reach in product(_TILES, range(len(plain)), (1, 2)):
        found = []
        for layers in (plain, compiled):
            view.run_as(layers)
            hidden, index = noise.clone()[tile], rows[tile]
            keys, values = runner.project(layer, hidden, index)
            at = rows[: len(index)] // reach
            out = runner.run(layer, hidden, index, lambda q, k, v, spec: attend_rows(q, k, v, at, spec))  # noqa: B023
            found.append([part.float() for part in (keys, values, out)])
        for one, other in zip(*found, strict=True):
            error = float((one - other).abs().max() / one.abs().max().clamp_min(1e-6))
            if not error <= _TOLERANCE[noise.dtype]:
                count = tile.stop - tile.start
                return f"layer {layer} of {count} rows differs by {error:.2g}, more than {_TOLERANCE[noise.dtype]}"
    return ""
