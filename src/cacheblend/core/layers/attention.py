"""Attention of scattered rows, causal by true position.

Knows tensors and positions; knows no model, cache or engine, and keeps no state between calls. Two routes:

- tiles (on a CPU, and on any device with softcap or sinks): adjacent rows form a group, the keys are cut into tiles,
  and an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) joins the tiles.
- PyTorch's `scaled_dot_product_attention` (elsewhere): one boolean mask for each group of rows.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cacheblend.core.errors import InvalidInputError

_MIN_GROUP_ROWS = 32  # rows of a group: more rows score more hidden keys between scattered rows ...
_MAX_GROUP_ROWS = 128  # ... fewer rows need more operations, whose overhead dominates where they are small
_TILE_SCORES = 1 << 20  # scores of a tile, over all heads: 4 MB fp32 + 2 MB bf16, which stay in the L3 cache
_MIN_TILE_KEYS, _MAX_TILE_KEYS = 256, 4096
_END_STEP = 128  # tiles end at its multiples: oneDNN compiles a kernel for each shape (0.8 ms), so few shapes are used
_SHIFT_ABOVE = 4.0  # largest error of a guessed shift, as a logit: weights are rounded by at most 4 / 2 ** 9
_UNSEEN = -(2.0**100)  # the top score of a row that has seen no key; finite: inf - inf is NaN
_SDPA_GROUP_ROWS = 512  # not tuned: fewer rows mask fewer keys, more rows use the device better
_SDPA_MASK_ELEMENTS = 1 << 26  # a group's mask: 64 MB of booleans, and a bias of the query's dtype from it


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer requires of attention besides causality.

    Attributes:
        scaling: factor on the dot products.
        window: the row at position p sees keys p - window + 1 .. p; None: 0 .. p.
        softcap: logits become softcap * tanh(logits / softcap); None: unchanged.
        sinks: [heads] logit of each head that takes part in the softmax and has no value; None: no sinks.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of some rows of a prompt over its keys, each row up to its own position.

    Mutates nothing. Keys and values behind the last row's position are never read. Head h of the query uses KV head
    h // (heads // kv_heads).

    Args:
        query: [heads, rows, head_dim] floating point; may be a view.
        keys: [kv_heads, length, head_dim] in the query's dtype; key j has position j.
        values: [kv_heads, length, head_dim] in the query's dtype.
        positions: [rows] int64, strictly ascending, each below length.
        spec: of the layer.

    Returns:
        [rows, heads, head_dim] in the query's dtype. On a CPU this needs about 10 MB of scratch memory (up to 128 query
        heads) and a copy of the visible keys and values, whatever the number of rows.

    Raises:
        InvalidInputError: the shapes do not fit together, or a row's position is behind the last key.
    """
    _check_shapes(query, keys, values, positions)
    heads, rows, head_dim = query.shape
    if rows == 0:
        return query.new_empty(0, heads, head_dim)
    at = positions.tolist()
    if at[-1] >= keys.shape[1]:
        raise InvalidInputError(f"a row has position {at[-1]}, but there are {keys.shape[1]} keys")
    positions = positions.to(query.device)
    tiled = query.device.type == "cpu" or spec.softcap is not None or spec.sinks is not None
    route = _attend_tiles if tiled else _attend_sdpa
    return route(query, keys, values, positions, at, spec)


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
    seen = slice(_first_key(length - 1, spec.window), length)
    folded = query.view(1, kv_heads, heads // kv_heads, head_dim)  # the heads of a KV head as its rows
    mixed = F.scaled_dot_product_attention(folded, keys[None, :, seen], values[None, :, seen], scale=spec.scaling)
    return mixed.view(heads, head_dim)


def _check_shapes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
    fits = (
        query.dim() == keys.dim() == 3
        and keys.shape == values.shape
        and query.shape[2] == keys.shape[2]
        and positions.shape == query.shape[1:2]
    )
    if not fits:
        raise InvalidInputError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} and "
            f"positions {tuple(positions.shape)} do not fit together"
        )
    heads, kv_heads = query.shape[0], keys.shape[0]
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidInputError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")


def _attend_tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    at: list[int],
    spec: AttentionSpec,
) -> torch.Tensor:
    """The tiled route, see `_GroupSoftmax`; `at`: the positions, as a list."""
    heads, rows, head_dim = query.shape
    out = query.new_empty(rows, heads, head_dim)
    if query.dtype == torch.float16:  # sums of values may overflow fp16, and CPUs compute fp32 faster
        query, keys, values = query.float(), keys.float(), values.float()
    step = _group_rows(heads, at[-1] + 1)
    tiles = _KeyTiles(keys, values, at, heads * min(step, rows), spec.window)
    for first in range(0, rows, step):
        group = slice(first, min(first + step, rows))
        softmax = _GroupSoftmax(query[:, group], positions[group], at[group], tiles, spec)
        for begin, end in tiles.spans(at[group]):
            softmax.add(begin, end)
        out[group] = softmax.result()
    return out


def _group_rows(heads: int, length: int) -> int:
    """The largest power of two of rows whose scores over all heads and keys fit in a tile."""
    fitting = 1 << max(0, (_TILE_SCORES // (heads * length)).bit_length() - 1)
    return min(max(_MIN_GROUP_ROWS, fitting), _MAX_GROUP_ROWS)


def _first_key(position: int, window: int | None) -> int:
    """The first key that is visible to a row at this position."""
    return 0 if window is None else max(0, position - window + 1)


class _KeyTiles:
    """The keys visible to some row, cut at multiples of `width` and laid out for the products, with scratch memory.

    A tile's keys are transposed and have two additional rows, one of ones and one of zeros: the query's number for the
    ones is added to the score inside the product, in its fp32 accumulator. (Two rows, because bf16 products contract
    pairs.)
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: list[int], rows: int, window: int | None) -> None:
        """`rows`: rows of a group, over all heads."""
        self.kv_heads, _, head_dim = keys.shape
        self.length, self.window = at[-1] + 1, window
        fitting = 1 << max(0, (_TILE_SCORES // rows).bit_length() - 1)  # a power of two: few kernel shapes
        self.width = min(max(fitting, _MIN_TILE_KEYS), _MAX_TILE_KEYS)
        self._tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for begin in range(_first_key(at[0], window) // self.width * self.width, self.length, self.width):
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
        begin = _first_key(at[0], self.window) // _END_STEP * _END_STEP
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
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        at: list[int],
        tiles: _KeyTiles,
        spec: AttentionSpec,
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


def _attend_sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    at: list[int],
    spec: AttentionSpec,
) -> torch.Tensor:
    """PyTorch's own attention, without softcap and sinks; `at`: the positions, as a list.

    With a mask the query heads of a KV head are folded into rows: kernels with masks do not support grouped queries,
    and PyTorch would materialise all scores.
    """
    heads, rows, head_dim = query.shape
    kv_heads, length, scale = keys.shape[0], at[-1] + 1, spec.scaling
    if rows == length and (spec.window is None or spec.window >= length):  # ascending: these are all positions
        q, k, v = query[None], keys[None, :, :length], values[None, :, :length]
        grouped = heads != kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return mixed[0].transpose(0, 1)
    out = query.new_empty(rows, heads, head_dim)
    fold = heads // kv_heads
    step = max(1, min(_SDPA_GROUP_ROWS, _SDPA_MASK_ELEMENTS // (fold * length)))
    for first in range(0, rows, step):
        group = slice(first, min(first + step, rows))
        seen = slice(_first_key(at[first], spec.window), at[group.stop - 1] + 1)
        key_positions = torch.arange(seen.start, seen.stop, device=query.device)
        visible = key_positions <= positions[group, None]
        if spec.window is not None:
            visible &= key_positions > positions[group, None] - spec.window
        q = query[:, group].reshape(1, kv_heads, -1, head_dim)
        k, v, mask = keys[None, :, seen], values[None, :, seen], visible.repeat(fold, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out[group] = mixed.view(heads, -1, head_dim).transpose(0, 1)
    return out
