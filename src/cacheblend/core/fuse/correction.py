"""Corrects the keys of rows that are not recomputed by what the recomputed rows of their chunk show: the mean deviation
of these, or a share of it, is added (AgentKVShift corrects values and keys of edited histories in this way).

The rows of a chunk deviate alike, because all of them were computed without the text in front of the chunk now. No row
is computed for it (keys are projected once more where there is more than a tile), nothing is stored, and at r = 1 there
is nothing to correct. For the anchor ``text``: behind BOS a chunk's first rows, its sinks, deviate in their own way.
"""

from typing import NamedTuple

import torch

from cacheblend.core.load.layer_kv import LayerCache


class Correctable(NamedTuple):
    """Which rows tell of which; all on the rows' device."""

    places: torch.Tensor  # [k] int64, of the recomputed candidates among the active rows
    chosen: torch.Tensor  # [k] int64, their positions
    # [segments + 1, k] float32, of each of them in its chunk's mean, the last row 0; a product adds in the same order
    shares: torch.Tensor
    positions: torch.Tensor  # [m] int64, of the candidates that were dropped, ascending
    segments: torch.Tensor  # [tokens] int64, of all rows of the prompt, those of others than these the last


def correct_keys(kv: LayerCache, keys: torch.Tensor, rows: Correctable, weight: float) -> None:
    """Moves the dropped rows' keys in a layer, before the active rows are written.

    Args:
        keys: [kv_heads, n, head_dim], fresh, of all active rows.
        weight: of the mean deviation, 0..1.
    """
    known = kv.rows(rows.chosen).keys  # subtracted in fp32 without a copy
    mean = weight * (rows.shares @ (keys[:, rows.places].float() - known))
    kv.move_keys(rows.positions, mean, rows.segments)
