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
    shares: torch.Tensor  # [segments, k] float32, of each of them in its chunk's mean; a product adds in the same order
    positions: torch.Tensor  # [m] int64, of the candidates that were dropped, ascending
    segments: torch.Tensor  # [m] int64, theirs


def correct_keys(kv: LayerCache, positions: torch.Tensor, keys: torch.Tensor, rows: Correctable, weight: float) -> None:
    """Moves the dropped rows' keys in a layer, before the active rows are written.

    Args:
        positions: [n] int64, of all active rows.
        keys: [kv_heads, n, head_dim], their fresh keys.
        weight: of the mean deviation, 0..1.
    """
    known = kv.rows(positions[rows.places]).keys
    mean = weight * (rows.shares @ (keys[:, rows.places].float() - known.float()))
    kv.move_keys(rows.positions, mean, rows.segments)
