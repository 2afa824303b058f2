"""KV deviation: how far a row's loaded KV is from its fresh KV (paper section 4.2)."""

from typing import Literal

import torch


def kv_deviation(
    fresh: tuple[torch.Tensor, torch.Tensor],
    loaded: tuple[torch.Tensor, torch.Tensor],
    measure: Literal["kv", "k", "v"] = "kv",
) -> torch.Tensor:
    """Squared L2 distance a row, over all KV heads.

    Args:
        fresh: keys and values just computed, each [kv_heads, rows, head_dim].
        loaded: keys (re-positioned) and values from the store, of the same shapes.
        measure: over both, the keys or the values.

    Returns:
        [rows] fp32.
    """
    pairs = {"k": (0,), "v": (1,), "kv": (0, 1)}[measure]
    distance = torch.zeros(fresh[0].shape[1], dtype=torch.float32, device=fresh[0].device)
    for i in pairs:
        distance += (fresh[i].float() - loaded[i].float()).square_().sum(dim=(0, 2))
    return distance
