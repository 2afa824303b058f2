"""KV deviation: how far a row's loaded KV is from its fresh KV (paper section 4.2)."""

import torch

from cacheblend.core.select.selectors import Measure


def kv_deviation(
    fresh: tuple[torch.Tensor, torch.Tensor],
    loaded: tuple[torch.Tensor, torch.Tensor],
    measure: Measure = "kv",
) -> torch.Tensor:
    """Squared L2 distance of each row, summed over all KV heads.

    Args:
        fresh: keys and values just computed, each [kv_heads, rows, head_dim].
        loaded: keys (re-positioned) and values from the store, of the same shapes.
        measure: over keys, values, or both.

    Returns:
        [rows] fp32.
    """
    pairs = {"k": (0,), "v": (1,), "kv": (0, 1)}[measure]
    distance = torch.zeros(fresh[0].shape[1], dtype=torch.float32, device=fresh[0].device)
    for i in pairs:
        distance += (fresh[i].float() - loaded[i].float()).square_().sum(dim=(0, 2))
    return distance
