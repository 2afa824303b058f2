"""Attention of scattered rows, causal by true position.

Plain PyTorch: serves everywhere, and is what a device's kernel is compared with. Keeps no state. Two routes:

- tiles of keys (with softcap or sinks; in 16 bits on a CPU), see `attention_tiles`.
- PyTorch's `scaled_dot_product_attention` (else): one mask for each group of rows.
"""

import torch
import torch.nn.functional as F

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels.attention_spec import AttentionSpec, check_shapes, first_key
from cacheblend.core.kernels.attention_tiles import attend_tiles
from cacheblend.core.kernels.float8 import FLOAT8, as_bytes

_SDPA_CPU_ROWS = 128  # fewer rows mask fewer keys, more rows need fewer calls
_SDPA_ROWS = 512  # on other devices
_SDPA_MASK_ELEMENTS = 1 << 26  # a group's mask, one for each query head of a KV head


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    spec: AttentionSpec,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of some rows of a prompt over its keys, each row up to its own position.

    Mutates nothing. Keys and values behind the last row's position are never read. Head h of the query uses KV head
    h // (heads // kv_heads).

    Args:
        query: [heads, rows, head_dim] floating point; may be a view.
        keys: [kv_heads, length, head_dim] in the query's dtype; key j has position j. With `block_table` a paged cache
            [blocks, block_size, kv_heads, head_dim], of which the visible rows are gathered. In one of `FLOAT8` they
            are read as they are: the caller multiplies scales with `spec.scaling` and the result.
        values: of the keys' shape and dtype.
        positions: [rows] int64, strictly ascending, each below length.
        spec: of the layer.
        block_table: [n] int32 or int64; key j is in block `block_table[j // block_size]`. None: dense buffers.

    Returns:
        [rows, heads, head_dim] in the query's dtype. On a CPU this needs, however many the rows, in 16 bits about 10 MB
        (up to 128 query heads) and a copy of the visible keys and values; in float32 640 bytes for each visible key.

    Raises:
        InvalidInputError: the shapes do not fit together, or a row's position is behind the last key.
    """
    check_shapes(query, keys, values, positions, is_paged=block_table is not None)
    heads, rows, head_dim = query.shape
    if rows == 0:
        return query.new_empty(0, heads, head_dim)
    at = positions.tolist()
    if block_table is not None:
        keys, values = (gather_rows(each, block_table, at[-1] + 1) for each in (keys, values))
    if keys.dtype in FLOAT8:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    if at[-1] >= keys.shape[1]:
        raise InvalidInputError(f"a row has position {at[-1]}, but there are {keys.shape[1]} keys")
    positions = positions.to(query.device)
    # PyTorch's own attention rounds the weights of 16-bit values, and is slower for them on CPUs.
    is_short_on_cpu = query.device.type == "cpu" and query.dtype.itemsize < 4
    tiled = is_short_on_cpu or spec.softcap is not None or spec.sinks is not None
    route = attend_tiles if tiled else _attend_sdpa
    return route(query, keys, values, positions, at, spec)


def gather_rows(pages: torch.Tensor, block_table: torch.Tensor, stop: int) -> torch.Tensor:
    """The first `stop` rows, or all that there are, of a paged cache [blocks, block_size, kv_heads, head_dim], as
    [kv_heads, rows, head_dim]."""
    used = block_table[: -(-stop // pages.shape[1])]
    return as_bytes(pages)[used].flatten(0, 1)[:stop].transpose(0, 1).contiguous().view(pages.dtype)


def attend_last(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attention of the last row of a sequence over all its keys, as in decoding.

    Args:
        query: [heads, head_dim].
        keys, values: [kv_heads, length, head_dim]; the last are the row's own.
        spec: of the layer.

    Returns:
        [heads, head_dim] in the query's dtype.
    """
    heads, head_dim = query.shape
    kv_heads, length, _ = keys.shape
    if spec.softcap is not None or spec.sinks is not None:
        positions = torch.tensor([length - 1], device=query.device)
        return attend_rows(query[:, None], keys, values, positions, spec)[0]
    seen = slice(first_key(length - 1, spec.window), length)
    folded = query.view(1, kv_heads, heads // kv_heads, head_dim)  # the heads of a KV head as its rows
    mixed = F.scaled_dot_product_attention(folded, keys[None, :, seen], values[None, :, seen], scale=spec.scaling)
    return mixed.reshape(heads, head_dim)  # its strides are the backend's choice


def _attend_sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    at: list[int],
    spec: AttentionSpec,
) -> torch.Tensor:
    """PyTorch's own attention, without softcap and sinks; `at`: the positions, as a list."""
    heads, rows, head_dim = query.shape
    kv_heads, length, scale = keys.shape[0], at[-1] + 1, spec.scaling
    if rows == length and (spec.window is None or spec.window >= length):  # ascending: these are all positions
        q, k, v = query[None], keys[None, :, :length], values[None, :, :length]
        grouped = heads != kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return mixed[0].transpose(0, 1)
    attend, most = (_sdpa_side_by_side, _SDPA_CPU_ROWS) if query.device.type == "cpu" else (_sdpa_folded, _SDPA_ROWS)
    out = query.new_empty(rows, heads, head_dim)
    step = max(1, min(most, _SDPA_MASK_ELEMENTS // (heads // kv_heads * length)))
    for first in range(0, rows, step):
        group = slice(first, min(first + step, rows))
        seen = slice(first_key(at[first], spec.window), at[group.stop - 1] + 1)
        key_positions = torch.arange(seen.start, seen.stop, device=query.device)
        hidden = key_positions > positions[group, None]
        if spec.window is not None:
            hidden |= key_positions <= positions[group, None] - spec.window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
        mixed = attend(query[:, group], keys[:, seen], values[:, seen], mask, scale)
        out[group] = mixed.reshape(heads, -1, head_dim).transpose(0, 1)
    return out


def _sdpa_side_by_side(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each query head by itself; those of a KV head see the same keys and values, of which no copy is made.

    query [heads, n, head_dim], keys and values [kv_heads, m, head_dim], mask [n, m], added to the logits.
    """
    kv_heads = keys.shape[0]
    q = query.reshape(kv_heads, -1, *query.shape[1:])
    k, v = (each[:, None].expand(-1, q.shape[1], -1, -1) for each in (keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _sdpa_folded(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `_sdpa_side_by_side`, the query heads of a KV head as its rows: a device's kernels with masks do not support
    grouped queries, and PyTorch would materialise all scores."""
    kv_heads = keys.shape[0]
    q, mask = query.reshape(1, kv_heads, -1, query.shape[2]), mask.repeat(query.shape[0] // kv_heads, 1)
    return F.scaled_dot_product_attention(q, keys[None], values[None], attn_mask=mask, scale=scale)
