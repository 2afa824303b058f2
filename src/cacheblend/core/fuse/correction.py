"""Corrects the keys of rows that are not recomputed by what the recomputed rows of their chunk show: the mean deviation
of these, or a share of it, is added (AgentKVShift corrects values and keys of edited histories in this way).

The rows of a chunk deviate alike, because all of them were computed without the text that stands in front of the chunk
now. No row is computed for it (the active rows' keys are projected once more where they are more than a tile), what is
stored stays as it is, and with all rows recomputed nothing is left to correct. Meant for the anchor ``text``: behind
BOS the first rows of a chunk are off in another way than the others, since they were its sinks (docs/log.md,
2026-11-27).
"""

from typing import NamedTuple

import torch

from cacheblend.core.load.layer_kv import LayerCache

ROWS_AT_ONCE = 4096  # bounds the memory of a long prompt


class Correctable(NamedTuple):
    """Which rows tell of which, all int64 on the rows' device; segments are numbers from 0 to below `segments`."""

    places: torch.Tensor  # [k] of the recomputed candidates among the active rows, ascending
    of: torch.Tensor  # [k] their segments
    positions: torch.Tensor  # [m] of the candidates that were dropped, ascending
    to: torch.Tensor  # [m] their segments
    segments: int


def correct_keys(kv: LayerCache, positions: torch.Tensor, keys: torch.Tensor, rows: Correctable, weight: float) -> None:
    """Moves the dropped rows' keys in a layer, before the active rows are written.

    Args:
        positions: [n] int64, of all active rows.
        keys: [kv_heads, n, head_dim], their fresh keys.
        weight: of the mean deviation, 0..1.
    """
    known = kv.rows(positions[rows.places]).keys
    off = keys[:, rows.places].float() - known.float()
    mean = off.new_zeros((len(off), rows.segments, off.shape[2])).index_add_(1, rows.of, off)
    counts = off.new_zeros(rows.segments).index_add_(0, rows.of, torch.ones_like(rows.of, dtype=off.dtype))
    mean *= (weight / counts.clamp(min=1))[:, None]
    for start in range(0, len(rows.positions), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        dropped = kv.rows(rows.positions[part])
        moved = dropped.keys.float() + mean[:, rows.to[part]]
        kv.write(rows.positions[part], moved.to(dropped.keys.dtype), dropped.values)
