"""Placing as one Triton kernel a layer; its slow counterpart is `kv_placement.place`.

    grid         (tiles of at most `_TILE_ROWS` rows of a piece, KV heads)
    a program    loads its rows of keys and values as they are stored, decompresses, rounds, rotates and writes them;
                 the two halves of rotated pairs are loaded apart, each 16 bytes at a time

Records lie wherever they were read to: a table has their addresses. Nothing waits for the device.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from cacheblend.core.kernels.float8 import FLOAT8, Float8, as_bytes
from cacheblend.core.kernels.kv_placement import Located, Placement
from cacheblend.core.kernels.numbers_triton import of_e4m3, rounded, to_float8
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.kernels.upload import upload
from cacheblend.core.plan.codec import GROUP

_TILE_ROWS = 32
_ALIGNED = tl.constexpr(16)  # bytes that a load takes at once
_GROUP = tl.constexpr(GROUP)
_RAW, _INT8, _FP8, _INT4 = (tl.constexpr(kind) for kind in range(4))
_KINDS = {"raw": 0, "int8": 1, "fp8": 2, "int4": 3}
_next_power_of_2 = cache(triton.next_power_of_2)  # which takes a tenth of a layer's time on the host
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def place(
    records: Sequence[torch.Tensor],
    placement: Placement,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: KeyRotation | None = None,
    block_table: torch.Tensor | None = None,
    float8: Float8 | None = None,
) -> None:
    """As `kv_placement.place`; head_dim is a multiple of 4, so that scales lie at even addresses."""
    device, head_dim = keys.device, keys.shape[-1]
    tiles = placement.tiles(_TILE_ROWS, device)
    if not len(tiles):
        return
    if isinstance(records, Located):
        addresses = records.table
    else:
        held = [each.contiguous() for each in records]  # heads of a longer record may not lie so
        held = [each if each.data_ptr() % _ALIGNED.value == 0 else each.clone() for each in held]
        addresses = upload(np.array([record.data_ptr() for record in held], dtype=np.int64), device)
    turns = None if rotation is None else placement.turns(rotation, device)
    pairs, is_half = (0, False) if rotation is None else (len(rotation.inv_freq), rotation.pairing == "half")
    dtype, scales = (keys.dtype, (1.0, 1.0)) if float8 is None else (float8.dtype, float8.scales)
    keys, values = as_bytes(keys), as_bytes(values)
    if block_table is None:
        page, kv_heads = 0, keys.shape[0]
        strides = [stride for each in (keys, values) for stride in (0, each.stride(1), each.stride(0), each.stride(2))]
    else:
        page, kv_heads = keys.shape[1:3]
        strides = [stride for each in (keys, values) for stride in each.stride()]
    with torch.cuda.device_of(keys):  # Triton starts kernels on the current device
        _place[len(tiles), kv_heads](
            addresses, tiles, turns, 0 if turns is None else turns.stride(0), keys, values, block_table, *strides,
            *scales, _DTYPES[dtype], 0 if float8 is None else FLOAT8[float8.kind],
            _KINDS[placement.codec], head_dim, _TILE_ROWS, page, pairs, is_half,
            *map(_next_power_of_2, (head_dim, pairs, head_dim - 2 * pairs)), num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["sines"],
    do_not_specialize_on_alignment=["addresses"],  # a layer's part of a table begins anywhere
)
def _place(
    addresses, tiles, turns, sines, keys, values, block_table,
    key_block, key_row, key_head, key_dim, value_block, value_row, value_head, value_dim,
    key_scale, value_scale, dtype: tl.constexpr, float8: tl.constexpr,
    kind: tl.constexpr, head_dim: tl.constexpr, tile_rows: tl.constexpr, page: tl.constexpr, half: tl.constexpr,
    is_half: tl.constexpr, dims: tl.constexpr, pairs: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    """One tile and one KV head. Strides are in numbers; `half` is the number of pairs of dimensions that are rotated.
    `dims`, `pairs` and `rest` are powers of 2 that all dimensions, the pairs and the others fit in. Numbers have the
    type `dtype` until they are stored (`to_float8`)."""
    tile = tiles + tl.program_id(0) * 6
    head = tl.program_id(1).to(tl.int64)
    tokens, first, start, rows = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    address = tl.load(addresses + tl.load(tile))
    row = tl.arange(0, tile_rows)
    used, token, at = row < rows, first + row, start + row
    if page > 0:
        block = tl.load(block_table + at // page, mask=used, other=0).to(tl.int64)
        key_at, value_at = block * key_block + at % page * key_row, block * value_block + at % page * value_row
    else:
        key_at, value_at = at * key_row, at * value_row
    to_keys = keys + (key_at + head * key_head)[:, None]
    to_values = values + (value_at + head * value_head)[:, None]

    dim = tl.arange(0, dims)
    mask = used[:, None] & (dim < head_dim)[None, :]
    value = _numbers(address, head, 1, tokens, token, dim, mask, dtype, kind, head_dim)
    tl.store(to_values + (dim * value_dim)[None, :], to_float8(value, value_scale, float8), mask=mask)
    _place_keys(
        to_keys, key_dim, address, tl.load(tile + 5), turns, sines, head, tokens, token, used, key_scale,
        dtype, float8, kind, head_dim, half, is_half, dims, pairs, rest,
    )  # fmt: skip


@triton.jit
def _place_keys(
    to_keys, key_dim, address, turn, turns, sines, head, tokens, token, used, key_scale,
    dtype: tl.constexpr, float8: tl.constexpr, kind: tl.constexpr, head_dim: tl.constexpr, half: tl.constexpr,
    is_half: tl.constexpr, dims: tl.constexpr, pairs: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    """Keys of a tile, moved by `turn`: pairs of dimensions in two blocks or side by side, then those that stay."""
    if half > 0:
        pair = tl.arange(0, pairs)
        angle = turns + tl.maximum(turn, 0) * half + pair
        cosine = tl.load(angle, mask=pair < half, other=1.0)[None, :]
        sine = tl.load(angle + sines, mask=pair < half, other=0.0)[None, :]
        if is_half:
            mask = used[:, None] & (pair < half)[None, :]
            one = _numbers(address, head, 0, tokens, token, pair, mask, dtype, kind, head_dim)
            two = _numbers(address, head, 0, tokens, token, pair + half, mask, dtype, kind, head_dim)
            one, two = _turned(one, two, cosine, sine, turn)
            one, two = to_float8(one, key_scale, float8), to_float8(two, key_scale, float8)
            tl.store(to_keys + (pair * key_dim)[None, :], one, mask=mask)
            tl.store(to_keys + ((pair + half) * key_dim)[None, :], two, mask=mask)
        else:
            dim = tl.arange(0, 2 * pairs)
            mask = used[:, None] & (dim < 2 * half)[None, :]
            both = _numbers(address, head, 0, tokens, token, dim, mask, dtype, kind, head_dim)
            one, two = tl.split(tl.reshape(both, (both.shape[0], pairs, 2)))
            one, two = _turned(one, two, cosine, sine, turn)
            both = to_float8(tl.reshape(tl.join(one, two), both.shape), key_scale, float8)
            tl.store(to_keys + (dim * key_dim)[None, :], both, mask=mask)
    if 2 * half < head_dim:
        dim = 2 * half + tl.arange(0, rest)
        mask = used[:, None] & (dim < head_dim)[None, :]
        key = _numbers(address, head, 0, tokens, token, dim, mask, dtype, kind, head_dim)
        tl.store(to_keys + (dim * key_dim)[None, :], to_float8(key, key_scale, float8), mask=mask)


@triton.jit
def _turned(one, two, cosine, sine, turn):
    """A pair of dimensions, rotated in fp32; unchanged to the bit where `turn` is -1."""
    x, y = one.to(tl.float32), two.to(tl.float32)
    turned_one, turned_two = x * cosine - y * sine, y * cosine + x * sine
    turned_one, turned_two = rounded(turned_one, one.dtype), rounded(turned_two, two.dtype)
    return tl.where(turn < 0, one, turned_one), tl.where(turn < 0, two, turned_two)


@triton.jit
def _numbers(
    address, head, part: tl.constexpr, tokens, token, dim, mask, dtype: tl.constexpr,
    kind: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
    """Keys (part 0) or values of some tokens, [tokens, dim] in the buffers' type."""
    if kind == _RAW:
        record = tl.multiple_of(address.to(tl.pointer_type(dtype)), _ALIGNED)
        at = ((head * 2 + part) * tokens + token)[:, None] * head_dim + dim[None, :]
        return tl.load(record + at, mask=mask, other=0.0)
    record = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), _ALIGNED)
    if kind == _INT4:
        return rounded(_of_four_bits(record, head, part, tokens, token, dim, mask, head_dim), dtype)
    record += head * (2 * tokens * (head_dim + 2))
    byte = tl.load(record + (part * tokens + token)[:, None] * head_dim + dim[None, :], mask=mask, other=0)
    scales = (record + 2 * tokens * head_dim).to(tl.pointer_type(tl.float16))
    scale = tl.load(scales + part * tokens + token[:, None], mask=mask, other=0.0).to(tl.float32)
    number = byte.to(tl.int8, bitcast=True).to(tl.float32) if kind == _INT8 else of_e4m3(byte)
    return rounded(number * scale, dtype)


@triton.jit
def _of_four_bits(record, head, part: tl.constexpr, tokens, token, dim, mask, head_dim: tl.constexpr):
    """See `codec._FourBits` for a head's bytes: keys, values, scales of keys, scales of values."""
    groups = tl.cdiv(tokens, _GROUP)
    key_bytes, value_bytes = tl.cdiv(tokens, 2) * head_dim, tokens * (head_dim // 2)
    head_bytes = key_bytes + value_bytes + 4 * groups * head_dim + 4 * tokens
    base = record + head * head_bytes
    scales = (base + key_bytes + value_bytes).to(tl.pointer_type(tl.float16))
    if part == 0:
        at = (token // 2)[:, None] * head_dim + dim[None, :]
        shift = (token % 2)[:, None] * 4
        lowest, step = (token // _GROUP)[:, None] * head_dim + dim[None, :], groups * head_dim
    else:
        base += key_bytes
        scales += 2 * groups * head_dim
        at = token[:, None] * (head_dim // 2) + (dim // 2)[None, :]
        shift = (dim % 2)[None, :] * 4
        lowest, step = token[:, None], tokens
    byte = tl.load(base + at, mask=mask, other=0).to(tl.int32)
    low = tl.load(scales + lowest, mask=mask, other=0.0).to(tl.float32)
    width = tl.load(scales + step + lowest, mask=mask, other=0.0).to(tl.float32)
    return ((byte >> shift.to(tl.int32)) & 15).to(tl.float32) * width + low
