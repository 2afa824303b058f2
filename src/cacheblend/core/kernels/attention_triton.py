"""Attention of scattered rows as one Triton kernel; its slow counterpart is `attention.attend_rows`.

    grid         (tiles of rows, KV heads, splits of the keys)
    row tile     slots: the rows of a tile times the query heads of a KV head, so that a key is read once for all
    key tiles    up to the tile's last row; below its first row without a mask; with a window, from where the first
                 row's begins. None in between is skipped: what a branch surrounds is not loaded ahead
    softmax      online, in base 2 and fp32 (Dao 2023, arXiv 2307.08691)

Where rows are few, several programs share a tile's keys, and a second kernel joins their parts. Nothing on the host
depends on the positions: no call waits for the device. A kernel is compiled for each kind of layer, a few sizes of row
tiles, and results that are joined or not; numbers of rows, keys and splits compile nothing.
"""

import math
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.float8 import FLOAT8, as_bytes
from cacheblend.core.kernels.numbers_triton import IS_INTERPRETED, of_float8, rounded

_MAX_SPLITS = 32
_SPLIT_TILES = 4  # key tiles that a split has at least: fewer are not worth joining
LARGEST_SHARED = 227 << 10
"""Bytes of shared memory that a program can have on compute capability 9.0, the most there is."""
_SMALLEST_SHARED = 99 << 10  # on compute capability 8.6, 8.9 and 12.0
_BARRIERS = 1024  # bytes of a program's shared memory, on compute capability 10.0
_ROW_SLOTS = (16, 64, 128)
_ASKING_TILE = 64  # rows, and keys
_DENSE_TILES = (
    (64, 64, 3, 2),
    (128, 64, 3, 1),
    (128, 64, 2, 1),
    (64, 64, 3, 1),
    (64, 32, 3, 1),
    (64, 32, 2, 1),
    (16, 32, 2, 1),
    (16, 16, 2, 1),
)
"""(slots, keys, stages, programs that must fit at once), best first, as timed on an H200: two small tiles on one
processor are as fast as a large one, and faster where rows are few or a window ends. With 2 stages keys are loaded in
front of the products and not beside them."""
_PAGED_TILES = (
    (128, 64, 5, 1),
    (64, 64, 5, 1),
    (128, 64, 2, 1),
    (64, 32, 5, 1),
    (64, 32, 2, 1),
    (16, 32, 2, 1),
    (16, 16, 2, 1),
)  # as `_DENSE_TILES`; the block table is loaded ahead as well, and takes two of the stages
_UNSEEN = tl.constexpr(-(2.0**100))  # the top logit of a row that has seen no key; finite: inf - inf is NaN
_LOG2_E = tl.constexpr(math.log2(math.e))


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    spec: AttentionSpec,
    block_table: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    edges: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attention.attend_rows`, head_dim up to 256, pages of any strides; positions are not checked, and a row sees
    the keys that there are. `splits`: programs that share a tile's keys; None: as many as keep the device busy.
    `edges`: [rows] int64, the first key that each row's window shows; None: that of keys without gaps. `log_sums`:
    takes the logarithm to base 2 of each softmax's sum, [rows, heads] fp32."""
    heads, rows, head_dim = query.shape
    out = query.new_empty(rows, heads, head_dim)
    if rows == 0:
        return out
    positions = positions.to(query.device)
    query = _with_dense_heads(query)
    float8, keys, values = FLOAT8.get(keys.dtype, 0), as_bytes(keys), as_bytes(values)
    if block_table is None:
        page, (kv_heads, length) = 0, keys.shape[:2]
        keys, values = _with_dense_heads(keys), _with_dense_heads(values)
        strides = [stride for each in (keys, values) for stride in (0, each.stride(1), each.stride(0), 1)]
    else:  # of a cache no copy is made, however it lies
        page, kv_heads = keys.shape[1:3]
        length = len(block_table) * page
        strides = [stride for each in (keys, values) for stride in each.stride()]
    group = heads // kv_heads
    slots, tile_keys, warps, stages = tile_shape(
        group, rows, head_dim, page, query.element_size(), _shared_memory(query.device)
    )
    tiles = -(-rows // (slots // group))
    if splits is None:
        splits = splits_of(tiles * kv_heads, -(-length // tile_keys), _processors(query.device))
    splits = splits if log_sums is None else max(2, splits)  # sums are known where parts are joined
    mixed = out if splits == 1 else query.new_empty(splits, rows, heads, head_dim, dtype=torch.float32)
    sums = query.new_empty(2, splits, rows, heads, dtype=torch.float32) if splits > 1 else _unused(query.device)
    tops, totals = sums.unbind()
    dims = max(16, triton.next_power_of_2(head_dim))  # products contract 16 numbers at least
    with torch.cuda.device_of(query):  # Triton starts kernels on the current device
        _attend[tiles, kv_heads, splits](
            query, keys, values, positions, edges, spec.sinks, block_table, mixed, tops, totals,
            rows, length, heads, *_folded_cap(spec), *query.stride()[:2], *strides,
            group, head_dim, dims, slots, tile_keys, spec.window or 0, spec.softcap is not None, page, float8,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            _join[rows, heads](mixed, tops, totals, out, log_sums, rows, heads, head_dim, dims, splits)
    return out


def attend_asking(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention.attend_asking`, head_dim up to 256, without a weight in memory. Keys are read twice: the kernel of
    rows leaves each softmax's sum, and another computes weights from it and keeps their maximum."""
    heads, rows, head_dim = query.shape
    kv_heads, length, _ = keys.shape
    query, keys = _with_dense_heads(query), _with_dense_heads(keys)
    places, edges = torch.searchsorted(key_positions, positions), None  # each row's last and first key
    if spec.window is not None:
        edges = torch.searchsorted(key_positions, positions - (spec.window - 1))
    sums = query.new_empty(rows, heads, dtype=torch.float32)
    mixed = attend_rows(query, keys, values, places, spec, edges=edges, log_sums=sums)
    received = query.new_empty(kv_heads, length, dtype=torch.float32)
    with torch.cuda.device_of(query):  # Triton starts kernels on the current device
        _receive[-(-length // _ASKING_TILE), kv_heads](
            query, keys, places, edges, sums, received,
            length, heads, rows, *_folded_cap(spec), *query.stride()[:2], *keys.stride()[:2], heads // kv_heads,
            head_dim, max(16, triton.next_power_of_2(head_dim)), _ASKING_TILE, spec.softcap is not None,
            num_warps=4,
        )  # fmt: skip
    return mixed, received.amax(0)


def _with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with the numbers of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _folded_cap(spec: AttentionSpec) -> tuple[float, float]:
    """What `_logits` multiplies products with, and the cap; 0: none. Logits are to base 2."""
    if spec.softcap is None:
        return spec.scaling * _LOG2_E.value, 0.0
    return spec.scaling / spec.softcap, spec.softcap * _LOG2_E.value


@lru_cache(1024)  # asked for at each layer, with the same rows
def tile_shape(
    group: int, rows: int, head_dim: int, page: int = 0, itemsize: int = 2, shared: int = LARGEST_SHARED
) -> tuple[int, int, int, int]:
    """(slots of a row tile, keys of a key tile, warps, stages): the best tiles that fit into `shared` bytes. `group`:
    query heads of a KV head; `rows`: of the call; they choose between few sizes of row tiles, as each is compiled;
    `page`: tokens of a block of the paged cache, 0: dense buffers; `itemsize`: bytes of a query's number."""
    least = max(_ROW_SLOTS[0], triton.next_power_of_2(group))
    slots = tile_keys = stages = 0
    for slots, tile_keys, stages, programs in _PAGED_TILES if page else _DENSE_TILES:
        slots = max(slots, least)
        if programs * shared_bytes(slots, tile_keys, stages, head_dim, page, itemsize) <= shared:
            break
    slots = max(least, next((each for each in _ROW_SLOTS if each >= min(slots, group * rows)), slots))
    return slots, tile_keys, 8 if slots >= 128 else 4, stages


def shared_bytes(slots: int, tile_keys: int, stages: int, head_dim: int, page: int = 0, itemsize: int = 2) -> int:
    """Shared memory of such tiles: of queries, and of the keys and values that are read or on their way; at most."""
    row: int = max(16, triton.next_power_of_2(head_dim)) * itemsize
    buffers = max(2, (stages + 1) // 2) if page else stages
    table = (stages - 1) * tile_keys * 8 if page else 0
    return slots * row + buffers * 2 * tile_keys * row + table + _BARRIERS


def splits_of(programs: int, key_tiles: int, processors: int) -> int:
    """Programs for each row tile and KV head, so that all processors of the device have one; together they are less
    than two for each processor."""
    wanted = -(-processors // programs)
    return max(1, min(wanted, key_tiles // _SPLIT_TILES, _MAX_SPLITS))


@cache
def _unused(device: torch.device) -> torch.Tensor:
    """In the place of sums that nobody joins."""
    return torch.empty(2, 1, dtype=torch.float32, device=device)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return LARGEST_SHARED
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SMALLEST_SHARED))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(
    do_not_specialize=["rows", "length", "heads"],
    do_not_specialize_on_alignment=["positions", "edges", "sinks", "block_table", "tops", "totals"],
)
def _attend(
    query, keys, values, positions, edges, sinks, block_table, mixed, tops, totals,
    rows, length, heads, logit, cap, query_head, query_row,
    key_block, key_row, key_head, key_dim, value_block, value_row, value_head, value_dim,
    group: tl.constexpr, head_dim: tl.constexpr, dims: tl.constexpr, slots: tl.constexpr, tile_keys: tl.constexpr,
    window: tl.constexpr, is_capped: tl.constexpr, page: tl.constexpr, float8: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one KV head, one split. Strides are in numbers; `logit` is the factor on the products."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see most keys: they begin first
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, dim = tl.arange(0, slots), tl.arange(0, dims)
    row = tile * (slots // group) + slot // group
    head = kv_head * group + slot % group
    used = (slot < slots // group * group) & (row < rows)
    at = tl.load(positions + row, mask=used, other=-1).to(tl.int32)
    edge = at - window + 1
    if edges is not None:
        edge = tl.load(edges + row, mask=used, other=0).to(tl.int32)
    mask = used[:, None] & (dim < head_dim)[None, :]
    q = tl.load(query + (head * query_head + row * query_row)[:, None] + dim[None, :], mask=mask, other=0.0)

    top = tl.full((slots,), _UNSEEN, tl.float32)
    total = tl.zeros((slots,), tl.float32)
    if sinks is not None:
        if split == 0:  # like a first key with this logit and the value 0
            top = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * _LOG2_E
            total = tl.full((slots,), 1.0, tl.float32)
    acc = tl.zeros((slots, dims), tl.float32)

    keys += kv_head * key_head
    values += kv_head * value_head
    begin, whole, end = _span(at, used, length, split, tile_keys, window)
    for start in range(begin, whole, tile_keys):
        acc, top, total = _add_tile(
            acc, top, total, q, at, edge, keys, values, block_table, start, end, logit, cap, key_block, key_row,
            key_dim, value_block, value_row, value_dim, dim, head_dim, tile_keys, 0, is_capped, page, float8, False,
        )  # fmt: skip
    for start in range(whole, end, tile_keys):
        acc, top, total = _add_tile(
            acc, top, total, q, at, edge, keys, values, block_table, start, end, logit, cap, key_block, key_row,
            key_dim, value_block, value_row, value_dim, dim, head_dim, tile_keys, window, is_capped, page, float8, True,
        )  # fmt: skip

    place = (split * rows + row).to(tl.int64) * heads + head
    if tl.num_programs(2) == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    else:
        tl.store(tops + place, top, mask=used)
        tl.store(totals + place, total, mask=used)
    tl.store(mixed + place[:, None] * head_dim + dim[None, :], rounded(acc, mixed.dtype.element_ty), mask=mask)


@triton.jit
def _span(at, used, length, split, tile_keys: tl.constexpr, window: tl.constexpr):
    """(begin, whole, end) of a split's keys: below `whole` every row of the tile sees every key, behind it some do."""
    last = tl.max(at, 0)
    first = tl.min(tl.where(used, at, last), 0)
    begin = 0
    if window > 0:
        begin = tl.maximum(first - window + 1, 0) // tile_keys * tile_keys
    end = tl.minimum(last + 1, length)
    share = tl.cdiv(tl.cdiv(end - begin, tile_keys), tl.num_programs(2)) * tile_keys
    begin = begin + split * share
    end = tl.minimum(begin + share, end)
    whole = begin
    if window == 0:
        whole = tl.maximum(begin, tl.minimum(end, (first + 1) // tile_keys * tile_keys))
    return begin, whole, end


@triton.jit
def _add_tile(
    acc, top, total, q, at, edge, keys, values, block_table, start, end, logit, cap, key_block, key_row, key_dim,
    value_block, value_row, value_dim, dim, head_dim: tl.constexpr, tile_keys: tl.constexpr, window: tl.constexpr,
    is_capped: tl.constexpr, page: tl.constexpr, float8: tl.constexpr, is_masked: tl.constexpr,
):  # fmt: skip
    """The online softmax with the keys start .. start + tile_keys - 1, of which those from `end` on are hidden."""
    number = tl.arange(0, tile_keys)
    key = start + number
    if page > 0:
        block = tl.load(block_table + key // page, mask=key < end, other=0).to(tl.int64)
        key_at = block * key_block + key % page * key_row
        value_at = block * value_block + key % page * value_row
    else:
        keys += tl.cast(start, tl.int64) * key_row  # one address in 64 bits; as many as keys would take registers
        values += tl.cast(start, tl.int64) * value_row
        key_at, value_at = number * key_row, number * value_row
    mask = (dim < head_dim)[None, :]
    if is_masked:
        mask = mask & (key < end)[:, None]
    k = of_float8(tl.load(keys + key_at[:, None] + (dim * key_dim)[None, :], mask=mask, other=0), float8, q.dtype)
    scores = _logits(q, k, logit, cap, is_capped)
    if is_masked:
        hidden = (key[None, :] > at[:, None]) | (key >= end)[None, :]
        if window > 0:
            hidden = hidden | (key[None, :] < edge[:, None])
        scores = tl.where(hidden, float("-inf"), scores)
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    faded = tl.exp2(top - highest)
    v = tl.load(values + value_at[:, None] + (dim * value_dim)[None, :], mask=mask, other=0)
    v = of_float8(v, float8, q.dtype)
    acc = _product(rounded(weights, v.dtype), v, acc * faded[:, None])
    return acc, highest, total * faded + tl.sum(weights, 1)


@triton.jit
def _logits(q, k, logit, cap, is_capped: tl.constexpr):
    """Of queries [slots, dims] and keys [n, dims], `logit` being the factor on their products."""
    scores = _product(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32)) * logit
    if is_capped:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh
    return scores


@triton.jit
def _product(left, right, add):
    if IS_INTERPRETED:  # the interpreter multiplies the bits of bf16 numbers (Triton 3.9)
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, add, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "heads", "splits"], do_not_specialize_on_alignment=["tops", "totals"])
def _join(
    mixed, tops, totals, out, log_sums, rows, heads, head_dim: tl.constexpr, dims: tl.constexpr, splits
):  # fmt: skip
    """Joins the splits of one row and head: each weighs 2 ** (its top logit - the highest)."""
    dim = tl.arange(0, dims)
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    highest = tl.load(tops + place)
    for split in range(1, splits):
        highest = tl.maximum(highest, tl.load(tops + place + split * rows * heads))
    acc, total = tl.zeros((dims,), tl.float32), 0.0
    for split in range(splits):
        part = place + split * rows * heads
        weight = tl.exp2(tl.load(tops + part) - highest)
        total += weight * tl.load(totals + part)
        acc += weight * tl.load(mixed + part * head_dim + dim, mask=dim < head_dim, other=0.0)
    if log_sums is not None:
        tl.store(log_sums + place, highest + tl.log2(total))
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + place * head_dim + dim, rounded(acc, out.dtype.element_ty), mask=dim < head_dim)


@triton.jit(
    do_not_specialize=["length", "heads", "rows"],
    do_not_specialize_on_alignment=["places", "edges"],
)
def _receive(
    query, keys, places, edges, sums, received,
    length, heads, rows, logit, cap, query_head, query_row, key_head, key_row,
    group: tl.constexpr, head_dim: tl.constexpr, dims: tl.constexpr, tile: tl.constexpr,
    is_capped: tl.constexpr,
):  # fmt: skip
    """One tile of keys, which is loaded once, one KV head. Strides are in numbers."""
    kv_head = tl.program_id(1).to(tl.int64)
    key, dim = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, dims)
    keys += kv_head * key_head + key[:, None].to(tl.int64) * key_row + dim[None, :]
    k = tl.load(keys, mask=(key < length)[:, None] & (dim < head_dim)[None, :], other=0.0)
    most = tl.zeros((tile,), tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        generic = tl.zeros((tile,), tl.float32)
        for start in range(0, rows, tile):
            row = start + tl.arange(0, tile)
            mask = (row < rows)[:, None] & (dim < head_dim)[None, :]
            place = head * query_head + row.to(tl.int64) * query_row
            q = tl.load(query + place[:, None] + dim[None, :], mask=mask, other=0.0)
            last = tl.load(places + row, mask=row < rows, other=-1)
            hidden = key[None, :] > last[:, None]
            if edges is not None:
                hidden = hidden | (key[None, :] < tl.load(edges + row, mask=row < rows, other=0)[:, None])
            total = tl.load(sums + row * heads + head, mask=row < rows, other=0.0)
            scores = _logits(q, k, logit, cap, is_capped) - total[:, None]
            weights = tl.exp2(tl.where(hidden, float("-inf"), scores))
            if rows > 1:
                if start == 0:
                    generic = tl.sum(tl.where((row == 0)[:, None], weights, 0.0), 0)
            most = tl.maximum(most, tl.max(weights - generic[None, :], 0))
    tl.store(received + kv_head * length + key, most, mask=key < length)
