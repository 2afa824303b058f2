"""KV deviation: how far a row's loaded KV is from its fresh KV (paper section 4.2). Plain PyTorch: serves everywhere,
and is what a device's kernel is compared with."""

from collections.abc import Sequence
from typing import Literal

import torch

Measure = Literal["kv", "k", "v"]
PARTS: dict[Measure, tuple[int, ...]] = {"k": (0,), "v": (1,), "kv": (0, 1)}


def kv_deviation(
    fresh: Sequence[torch.Tensor],
    loaded: Sequence[torch.Tensor],
    measure: Measure = "kv",
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Squared L2 distance of each row, summed over all KV heads, [rows] fp32. `fresh`: keys and values just computed,
    each [kv_heads, rows, head_dim]. `loaded`: keys (re-positioned) and values from the store, [kv_heads, length,
    head_dim]. `positions`: [rows] int64, where the rows' loaded KV is; None: the loaded rows are these rows."""
    distance = torch.zeros(fresh[0].shape[1], dtype=torch.float32, device=fresh[0].device)
    for part in PARTS[measure]:
        stored = loaded[part] if positions is None else loaded[part][:, positions]
        distance += (fresh[part].float() - stored.float()).square_().sum(dim=(0, 2))
    return distance
