"""Attention weights of a few rows as a tensor, for the question's pass and inspection; `attention` never keeps them."""

import torch

from cacheblend.core.kernels.attention_spec import AttentionSpec


def attention_weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """The weight that each row gives to each key, on any device.

    Args:
        query: [heads, rows, head_dim] floating point.
        keys: [kv_heads, n, head_dim]; head h of the query uses KV head h // (heads // kv_heads).
        positions: [rows] int64; each row's own key must be among the keys, so that every row sees a key.
        key_positions: [n] int64, ascending.
        spec: of the layer, with `sinks` of these heads.

    Returns:
        [heads, rows, n] fp32, 0 where a row does not see the key. Rows sum to 1, or to less with sinks.
    """
    heads, rows, head_dim = query.shape
    folded = query.float().reshape(keys.shape[0], -1, head_dim)
    scores = torch.bmm(folded, keys.float().transpose(1, 2)).mul_(spec.scaling).view(heads, rows, -1)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    hidden = key_positions > positions[:, None]
    if spec.window is not None:
        hidden |= key_positions <= positions[:, None] - spec.window
    scores += torch.where(hidden, -torch.inf, 0.0)
    if spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks.to(scores)[:, None, None].expand(heads, rows, 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
