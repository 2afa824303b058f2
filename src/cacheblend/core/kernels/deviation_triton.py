"""KV deviation as one Triton kernel; its slow counterpart is `deviation.kv_deviation`. A program has a few rows and
goes through all KV heads: loaded rows are read where they lie, and nothing is copied."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cacheblend.core.kernels.deviation import PARTS, Measure

_TILE_ROWS = 8


def kv_deviation(
    fresh: Sequence[torch.Tensor],
    loaded: Sequence[torch.Tensor],
    measure: Measure = "kv",
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `deviation.kv_deviation`; positions are not checked."""
    kv_heads, rows, head_dim = fresh[0].shape
    distance = torch.empty(rows, dtype=torch.float32, device=fresh[0].device)
    if rows == 0:
        return distance
    strides = [stride for each in (*fresh, *loaded) for stride in each.stride()]
    with torch.cuda.device_of(distance):  # Triton starts kernels on the current device
        _deviation[(-(-rows // _TILE_ROWS),)](
            *fresh, *loaded, positions, distance, *strides, rows, kv_heads,
            0 in PARTS[measure], 1 in PARTS[measure], head_dim, triton.next_power_of_2(head_dim), _TILE_ROWS,
            num_warps=4,
        )  # fmt: skip
    return distance


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def _deviation(
    fresh_keys, fresh_values, loaded_keys, loaded_values, positions, distance,
    fresh_key_head, fresh_key_row, fresh_key_dim, fresh_value_head, fresh_value_row, fresh_value_dim,
    loaded_key_head, loaded_key_row, loaded_key_dim, loaded_value_head, loaded_value_row, loaded_value_dim,
    rows, kv_heads, has_keys: tl.constexpr, has_values: tl.constexpr, head_dim: tl.constexpr, dims: tl.constexpr,
    tile_rows: tl.constexpr,
):  # fmt: skip
    """One tile of rows. Strides are in numbers."""
    row, dim = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows), tl.arange(0, dims)
    used = row < rows
    at = row
    if positions is not None:
        at = tl.load(positions + row, mask=used, other=0)
    mask = used[:, None] & (dim < head_dim)[None, :]
    total = tl.zeros((tile_rows, dims), tl.float32)
    for number in range(kv_heads):
        head = tl.cast(number, tl.int64)  # times a stride it is beyond 32 bits in long prompts
        if has_keys:
            one = (row * fresh_key_row + head * fresh_key_head)[:, None] + (dim * fresh_key_dim)[None, :]
            two = (at * loaded_key_row + head * loaded_key_head)[:, None] + (dim * loaded_key_dim)[None, :]
            total += _squares(fresh_keys + one, loaded_keys + two, mask)
        if has_values:
            one = (row * fresh_value_row + head * fresh_value_head)[:, None] + (dim * fresh_value_dim)[None, :]
            two = (at * loaded_value_row + head * loaded_value_head)[:, None] + (dim * loaded_value_dim)[None, :]
            total += _squares(fresh_values + one, loaded_values + two, mask)
    tl.store(distance + row, tl.sum(total, 1), mask=used)


@triton.jit
def _squares(fresh, loaded, mask):
    apart = tl.load(fresh, mask=mask, other=0.0).to(tl.float32) - tl.load(loaded, mask=mask, other=0.0).to(tl.float32)
    return apart * apart
