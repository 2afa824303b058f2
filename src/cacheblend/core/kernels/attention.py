"""Attention of scattered rows, causal by true position.

Plain PyTorch: serves everywhere, and is what a device's kernel is compared with. Keeps no state. Two routes:

- tiles of keys (with softcap or sinks; in 16 bits on a CPU, but for bf16 with AMX): adjacent rows form a group, the
  keys are cut into tiles, and an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) joins the tiles.
- PyTorch's `scaled_dot_product_attention` (else): one mask for each group of rows.
"""

import math
import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels.float8 import FLOAT8, as_bytes

_SDPA_CPU_ROWS = 128  # fewer rows mask fewer keys, more rows need fewer calls
_SDPA_ROWS = 512  # on other devices
_SDPA_MASK_ELEMENTS = 1 << 26  # a group's mask, one for each query head of a KV head
_MIN_GROUP_ROWS = 32  # rows of a group: more rows score more hidden keys between scattered rows ...
_MAX_GROUP_ROWS = 128  # ... fewer rows need more operations, whose overhead dominates where they are small
_TILE_SCORES = 1 << 20  # scores of a tile, over all heads: 4 MB fp32 + 2 MB bf16, which stay in the L3 cache
_MIN_TILE_KEYS, _MAX_TILE_KEYS = 256, 4096
_END_STEP = 128  # tiles end at its multiples: oneDNN compiles a kernel for each shape (0.8 ms), so few shapes are used
_SHIFT_ABOVE = 4.0  # largest error of a guessed shift, as a logit: weights are rounded by at most 4 / 2 ** 9
_MAX_WEIGHTS = 1 << 24  # attention weights at a time, 64 MB in fp32: KV heads are processed in groups
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MAX_FLASH_DIM = 256
_NAMING = threading.Lock()  # backends are a setting of the process, which is set back
_UNSEEN = -(2.0**100)  # the top score of a row that has seen no key; finite: inf - inf is NaN


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer requires of attention besides causality."""

    scaling: float  # factor on the dot products
    window: int | None = None  # the row at position p sees keys p - window + 1 .. p; None: 0 .. p.
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap); None: unchanged
    # [heads] logit of each head that takes part in the softmax and has no value; None: no sinks
    sinks: torch.Tensor | None = None
    # keys and values are the halves of one vector, twice as wide, that queries are as wide as, and that is both key and
    # value (`latent`); so attention gives vectors of that width
    is_latent: bool = False


@dataclass(frozen=True)
class HeadShape:
    """A layer's heads, as far as kernels are compiled for them."""

    heads: int  # of the query; a multiple of `kv_heads`
    kv_heads: int
    head_dim: int  # numbers of a head, as attention sees it
    # window, is_latent and the others: see `AttentionSpec`; of a latent, what is placed is half as wide
    window: int | None = None
    is_latent: bool = False
    is_capped: bool = False
    has_sinks: bool = False

    @property
    def placed_dim(self) -> int:  # of a key, and of a value, as they are stored and placed
        return self.head_dim // 2 if self.is_latent else self.head_dim


def check_shapes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, *, is_paged: bool = False
) -> None:
    """Raises `InvalidInputError` if these do not fit together; for the shapes see `attention.attend_rows`."""
    fits = (
        query.dim() == 3
        and keys.dim() == 3 + is_paged
        and keys.shape == values.shape
        and query.shape[2] == keys.shape[-1]
        and positions.shape == query.shape[1:2]
    )
    if not fits:
        raise InvalidInputError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} and "
            f"positions {tuple(positions.shape)} do not fit together"
        )
    heads, kv_heads = query.shape[0], keys.shape[2 if is_paged else 0]
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidInputError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")


def first_key(position: int, window: int | None) -> int:
    """The first key that is visible to a row at this position."""
    return 0 if window is None else max(0, position - window + 1)


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
        [rows, heads, head_dim] in the query's dtype. On a CPU this needs, however many the rows, in tiles about 10 MB
        (up to 128 query heads) and a copy of the visible keys and values; else 384 to 640 bytes for each visible key.

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
    is_short_on_cpu = query.device.type == "cpu" and query.dtype.itemsize < 4
    is_slow = is_short_on_cpu and not _has_fast_sdpa(query)
    is_tiled = is_slow or spec.softcap is not None or spec.sinks is not None
    route = attend_tiles if is_tiled else _attend_sdpa
    return route(query, keys, values, positions, at, spec)


def gather_rows(pages: torch.Tensor, block_table: torch.Tensor, stop: int) -> torch.Tensor:
    """The first `stop` rows, or all that there are, of a paged cache [blocks, block_size, kv_heads, head_dim], as
    [kv_heads, rows, head_dim]."""
    used = block_table[: -(-stop // pages.shape[1])]
    return as_bytes(pages)[used].flatten(0, 1)[:stop].transpose(0, 1).contiguous().view(pages.dtype)


def attend_last(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attention of the last row of a sequence, [heads, head_dim], over all its keys [kv_heads, length, head_dim], the
    last its own, as in decoding: [heads, head_dim] in the query's dtype."""
    heads, head_dim = query.shape
    kv_heads, length, _ = keys.shape
    if spec.softcap is not None or spec.sinks is not None:
        positions = torch.tensor([length - 1], device=query.device)
        return attend_rows(query[:, None], keys, values, positions, spec)[0]
    seen = slice(first_key(length - 1, spec.window), length)
    folded = query.view(1, kv_heads, heads // kv_heads, head_dim)  # the heads of a KV head as its rows
    mixed = _sdpa(folded, keys[None, :, seen], values[None, :, seen], scale=spec.scaling)
    return mixed.reshape(heads, head_dim)  # its strides are the backend's choice


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """PyTorch's attention. On CUDA its backends are named: cuDNN's, which it may prefer, plans each shape anew."""
    if query.device.type != "cuda":
        return F.scaled_dot_product_attention(query, keys, values, **options)
    with _NAMING, sdpa_kernel(_BACKENDS):
        return F.scaled_dot_product_attention(query, keys, values, **options)


def _has_fast_sdpa(query: torch.Tensor) -> bool:
    """Whether PyTorch's own attention of 16 bits on a CPU is faster than tiles: of bf16 and many rows, with AMX."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)  # private: where PyTorch has it no more, False
    return query.shape[1] >= _SDPA_CPU_ROWS and query.dtype == torch.bfloat16 and bool(has_amx())


def _takes_groups(query: torch.Tensor) -> bool:
    """Whether PyTorch's attention takes grouped queries as they are: of CUDA's backends flash attention alone does, and
    else every score would be materialised."""
    is_short, device = query.dtype.itemsize < 4, query.device
    return device.type == "cpu" or (is_short and query.shape[-1] <= _MAX_FLASH_DIM and _has_flash(device))


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    at: list[int],
    spec: AttentionSpec,
) -> torch.Tensor:
    """PyTorch's own attention, without softcap and sinks."""
    heads, rows, head_dim = query.shape
    kv_heads, length, scale = keys.shape[0], at[-1] + 1, spec.scaling
    is_grouped, is_whole = heads != kv_heads, rows == length and (spec.window is None or spec.window >= length)
    if is_whole and (not is_grouped or _takes_groups(query)):  # ascending: these are all positions
        q, k, v = query[None], keys[None, :, :length], values[None, :, :length]
        mixed = _sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
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
    """Each query head by itself; those of a KV head see the same keys and values, of which no copy is made."""
    kv_heads = keys.shape[0]
    q = query.reshape(kv_heads, -1, *query.shape[1:])
    k, v = (each[:, None].expand(-1, q.shape[1], -1, -1) for each in (keys, values))
    return _sdpa(q, k, v, attn_mask=mask, scale=scale)


def _sdpa_folded(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `_sdpa_side_by_side`, the query heads of a KV head as its rows: a device's kernels with masks do not support
    grouped queries, and PyTorch would materialise all scores."""
    kv_heads = keys.shape[0]
    q, mask = query.reshape(1, kv_heads, -1, query.shape[2]), mask.repeat(query.shape[0] // kv_heads, 1)
    return _sdpa(q, keys[None], values[None], attn_mask=mask, scale=scale)


def attention_weights(
    query: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """The weight that each row gives to each key, on any device, for those who look at weights.

    As `attend_rows`, but for the keys [kv_heads, n, head_dim] at `key_positions` [n] int64, ascending, among which each
    row's own must be, and with `sinks` of these heads. Returns [heads, rows, n] fp32, 0 where a row does not see the
    key. Rows sum to 1, or to less with sinks.
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


def attend_asking(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows that ask (`core.fuse.question`), the first of several generic, and what each key receives:
    [rows, heads, head_dim] in the query's dtype; [n] fp32, the maximum over heads and rows of (the row's weight - the
    generic row's), at least 0; of one row its weight. `query`: [heads, rows, head_dim] at `positions` [rows] int64;
    `keys`, `values`: [kv_heads, n, head_dim] at `key_positions` [n] int64; both ascending."""
    received = torch.zeros(keys.shape[1], dtype=torch.float32, device=query.device)
    outputs = []
    for heads, kv_heads in _parts(query, keys.shape[1], len(keys)):
        part = replace(spec, sinks=None if spec.sinks is None else spec.sinks[heads])
        weights = attention_weights(query[heads], keys[kv_heads], positions, key_positions, part)
        more = weights if len(positions) == 1 else weights[:, 1:] - weights[:, :1]
        received = torch.maximum(received, more.amax((0, 1)))
        folded = weights.view(len(keys[kv_heads]), -1, keys.shape[1])
        outputs.append(torch.bmm(folded, values[kv_heads].float()).view(*weights.shape[:2], -1))
    return torch.cat(outputs).transpose(0, 1).to(query.dtype).contiguous(), received


def _parts(query: torch.Tensor, seen: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """Slices of query heads and of the KV heads that they use, with at most about `_MAX_WEIGHTS` weights each."""
    fold, of_a_head = len(query) // kv_heads, max(1, query.shape[1] * seen)
    if kv_heads == 1:  # as of latents, which all heads share
        at_once = max(1, _MAX_WEIGHTS // of_a_head)
        return [(slice(start, start + at_once), slice(0, 1)) for start in range(0, fold, at_once)]
    step = max(1, _MAX_WEIGHTS // (fold * of_a_head))
    starts = range(0, kv_heads, step)
    return [(slice(s * fold, min(s + step, kv_heads) * fold), slice(s, min(s + step, kv_heads))) for s in starts]


# ---- by tiles of keys ----------------------------------------------------------------------------------------


def attend_tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    at: list[int],
    spec: AttentionSpec,
) -> torch.Tensor:
    """The tiled route, see `_GroupSoftmax`."""
    heads, rows, head_dim = query.shape
    out = query.new_empty(rows, heads, head_dim)
    if query.dtype == torch.float16:  # sums of values may overflow fp16, and CPUs compute fp32 faster
        query, keys, values = query.float(), keys.float(), values.float()
    fitting = 1 << max(0, (_TILE_SCORES // (heads * (at[-1] + 1))).bit_length() - 1)  # rows whose scores fit in a tile
    step = min(max(_MIN_GROUP_ROWS, fitting), _MAX_GROUP_ROWS)
    tiles = _KeyTiles(keys, values, at, heads * min(step, rows), spec.window)
    for first in range(0, rows, step):
        group = slice(first, min(first + step, rows))
        softmax = _GroupSoftmax(query[:, group], positions[group], at[group], tiles, spec)
        for begin, end in tiles.spans(at[group]):
            softmax.add(begin, end)
        out[group] = softmax.result()
    return out


class _KeyTiles:
    """The keys visible to some row, cut at multiples of `width` and laid out for the products, with scratch memory.

    A tile's keys are transposed and have two additional rows, one of ones and one of zeros: the query's number for the
    ones is added to the score inside the product, in its fp32 accumulator. (Two rows, because bf16 products contract
    pairs.)
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: list[int], rows: int, window: int | None) -> None:
        self.kv_heads, _, head_dim = keys.shape
        self.length, self.window = at[-1] + 1, window
        fitting = 1 << max(0, (_TILE_SCORES // rows).bit_length() - 1)  # of a group's rows over all heads; few shapes
        self.width = min(max(fitting, _MIN_TILE_KEYS), _MAX_TILE_KEYS)
        self._tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for begin in range(first_key(at[0], window) // self.width * self.width, self.length, self.width):
            part = slice(begin, min(begin + self.width, self.length))
            tile = keys.new_zeros(self.kv_heads, head_dim + 2, part.stop - begin)
            tile[:, :head_dim] = keys[:, part].transpose(1, 2)
            tile[:, head_dim] = 1
            self._tiles[begin] = tile, values[:, part].contiguous()
        size = rows * min(self.width, self.length)
        self._scores = keys.new_empty(size, dtype=torch.float32)
        self._rounded = self._scores if keys.dtype == torch.float32 else keys.new_empty(size)

    def spans(self, at: list[int]) -> list[tuple[int, int]]:
        """[begin, end) of every tile with keys that are visible to rows at these positions."""
        begin = first_key(at[0], self.window) // _END_STEP * _END_STEP
        end = min(-(-(at[-1] + 1) // _END_STEP) * _END_STEP, self.length)
        starts = range(begin // self.width * self.width, end, self.width)
        return [(max(start, begin), min(start + self.width, end)) for start in starts]

    def tile(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A span's keys [kv_heads, head_dim + 2, end - begin], values [kv_heads, end - begin, head_dim]."""
        start = begin // self.width * self.width
        keys, values = self._tiles[start]
        return keys[:, :, begin - start : end - start], values[:, begin - start : end - start]

    def scratch(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[kv_heads, rows, width] in fp32 and in the keys' dtype (the same tensor for fp32), valid for one span."""
        shape = (self.kv_heads, rows, width)
        size = self.kv_heads * rows * width
        return self._scores[:size].view(shape), self._rounded[:size].view(shape)


class _GroupSoftmax:
    """The online softmax of a group of rows; the query heads of a KV head are folded into rows.

    ```
    score = q . k (with softcap: the capped logit); score * unit is a base-2 logit
    top   = largest score so far;  total = sum of w;  mixed = sum of w v;  w = 2 ** (unit * (score - top))
    ```
    """

    def __init__(
        self, query: torch.Tensor, positions: torch.Tensor, at: list[int], tiles: _KeyTiles, spec: AttentionSpec
    ) -> None:
        self.heads, self.rows, self.head_dim = query.shape
        self.positions, self.at, self.tiles, self.spec = positions[:, None], at, tiles, spec
        logit = spec.scaling if spec.softcap is None else 1.0
        self.unit = logit * math.log2(math.e)
        self.fresh = True  # no keys added yet
        self.shifts = spec.softcap is None and query.dtype != torch.float32
        self.shift_above = _SHIFT_ABOVE / logit
        folded = (tiles.kv_heads, self.heads // tiles.kv_heads * self.rows)
        self.query = query.new_zeros(*folded, self.head_dim + 2)
        self.query[..., : self.head_dim] = query.reshape(*folded, self.head_dim)
        self.mixed = query.new_zeros(*folded, self.head_dim, dtype=torch.float32)
        self.shift = query.new_zeros(*folded, 1, dtype=torch.float32)
        self.total = torch.zeros_like(self.shift)
        self.top = torch.full_like(self.shift, _UNSEEN)
        if spec.sinks is not None:  # like a first key with this logit and the value 0
            sinks = spec.sinks.to(self.top) / logit
            self.top = sinks[:, None].expand(self.heads, self.rows).reshape(self.top.shape)
            self.total = torch.ones_like(self.top)

    def add(self, begin: int, end: int) -> None:
        """Adds the keys begin .. end - 1.

        bf16 products are rounded to 8 bits, too coarse where scores are large. So a guess of the row's top score is
        subtracted inside the product's fp32 accumulator: scores near the top, which have weight, are then near zero
        and precise. Where the guess was wrong, the product is repeated with the true top score.
        """
        scores, rounded = self.tiles.scratch(self.query.shape[1], end - begin)
        keys, values = self.tiles.tile(begin, end)
        if self.shifts and self.fresh:  # a guess from a few keys, which may be hidden: any shift is correct
            self._shift_by(torch.bmm(self.query, keys[:, :, :_END_STEP]).amax(-1, keepdim=True))
        top = self._score(keys, begin, end, scores, rounded)
        if self.shifts:
            off = torch.where(top > _UNSEEN, top - self.shift, 0.0)  # no visible key yet (a window): keep the guess
            if off.abs().amax() > self.shift_above:
                self._shift_by(self.shift + off)
                top = self._score(keys, begin, end, scores, rounded)

        # Passes over the scores take the time: one scales and subtracts; 2 ** x takes a quarter as long as e ** x.
        torch.add((self.shift - top) * self.unit, scores, alpha=self.unit, out=scores).exp2_()
        faded = torch.exp2((self.top - top) * self.unit)
        self.total = self.total * faded + scores.sum(-1, keepdim=True)
        if rounded is not scores:
            rounded.copy_(scores)
        self.mixed.mul_(faded).add_(torch.bmm(rounded, values))
        self.top, self.fresh = top, False

    def result(self) -> torch.Tensor:
        """[rows, heads, head_dim] fp32."""
        return (self.mixed / self.total).view(self.heads, self.rows, self.head_dim).transpose(0, 1)

    def _shift_by(self, top: torch.Tensor) -> None:
        shift = top.to(self.query.dtype)
        self.query[..., self.head_dim : self.head_dim + 1] = -shift
        self.shift = shift.float()

    def _score(
        self, keys: torch.Tensor, begin: int, end: int, scores: torch.Tensor, rounded: torch.Tensor
    ) -> torch.Tensor:
        """Fills `scores` with scores minus `shift`, -inf where hidden; returns the top score so far."""
        torch.bmm(self.query, keys, out=rounded)
        if rounded is not scores:
            scores.copy_(rounded)
        if self.spec.softcap is not None:
            scores.mul_(self.spec.scaling / self.spec.softcap).tanh_().mul_(self.spec.softcap)
        by_head = scores.view(self.heads, self.rows, end - begin)
        first, last, window = self.at[0], self.at[-1], self.spec.window
        # Added, because `masked_fill_` takes 50 times as long on a CPU.
        if first + 1 < end:  # keys behind the first row
            cut = max(begin, first + 1)
            hidden = torch.arange(cut, end, device=keys.device) > self.positions
            by_head[..., cut - begin :].add_(torch.where(hidden, -torch.inf, 0.0))
        if window is not None and begin <= last - window:  # keys in front of the last row's window
            cut = min(end, last - window + 1)
            hidden = torch.arange(begin, cut, device=keys.device) <= self.positions - window
            by_head[..., : cut - begin].add_(torch.where(hidden, -torch.inf, 0.0))
        return torch.maximum(self.top, scores.amax(-1, keepdim=True) + self.shift)
