"""Attention of scattered rows by tiles of keys, in plain PyTorch.

Adjacent rows form a group, the keys are cut into tiles, and an online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867) joins the tiles.
"""

import math

import torch

from cacheblend.core.kernels.attention_spec import AttentionSpec, first_key

_MIN_GROUP_ROWS = 32  # rows of a group: more rows score more hidden keys between scattered rows ...
_MAX_GROUP_ROWS = 128  # ... fewer rows need more operations, whose overhead dominates where they are small
_TILE_SCORES = 1 << 20  # scores of a tile, over all heads: 4 MB fp32 + 2 MB bf16, which stay in the L3 cache
_MIN_TILE_KEYS, _MAX_TILE_KEYS = 256, 4096
_END_STEP = 128  # tiles end at its multiples: oneDNN compiles a kernel for each shape (0.8 ms), so few shapes are used
_SHIFT_ABOVE = 4.0  # largest error of a guessed shift, as a logit: weights are rounded by at most 4 / 2 ** 9
_UNSEEN = -(2.0**100)  # the top score of a row that has seen no key; finite: inf - inf is NaN


def attend_tiles(
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
