"""The slow, obvious oracle of `cacheblend.core.kernels.attention`: every row, every key, fp32, one full mask."""

import torch

from cacheblend.core.kernels.attention import AttentionSpec


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[heads, rows, head_dim] over [kv_heads, length, head_dim] -> [rows, heads, head_dim], all fp32."""
    heads, rows, _ = query.shape
    length = int(positions[-1]) + 1  # what stands behind the last row is garbage
    repeats = heads // keys.shape[0]
    keys = keys[:, :length].float().repeat_interleave(repeats, 0)
    values = values[:, :length].float().repeat_interleave(repeats, 0)

    scores = query.float() @ keys.transpose(1, 2) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)

    key_positions = torch.arange(length, device=query.device)
    visible = key_positions[None, :] <= positions[:, None]
    if spec.window is not None:
        visible &= key_positions[None, :] > positions[:, None] - spec.window
    scores = scores.masked_fill(~visible, float("-inf"))

    if spec.sinks is not None:
        sinks = spec.sinks.float()[:, None, None].expand(heads, rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return (weights @ values).transpose(0, 1)
