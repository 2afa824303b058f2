"""vLLM's paged KV cache: where the rows of a request lie in it, and how rows are written and read.

    prompt               | held by vLLM  | chunk A | text | chunk B | question |
    group of all rows    | 7 | 2 | 9 | 4 | 1 | 11  | 5 | 12 | 6   | 13       |    written from the held rows on
    group with a window  | 0 | 0 | 0 | 0 | 0 | 0   | 0 | 0  | 8   | 3        |    written from the first block on
      held for it        | 0 | 0 | 0 | 5 |                                         what rows right behind them see

Rows that are recomputed may see rows that the window of the prompt's last token has passed: a layer of such a group is
computed in buffers of the prompt's length, one layer at a time, and what the last token still sees is copied to vLLM's
blocks.

The layout of a block depends on backend, version and machine, and backends offer a way to write rows but none to read
them. So known numbers are written through the backend to vLLM's null block, which belongs to no request, and searched
for in it. That gives the place of every (key or value, head, row, dimension) in a block, in any layout that keeps
numbers unchanged, or rounds them to eight bits: which of the two types is also found out, since some backends know one
only, whatever it is called.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.attention import first_key
from cacheblend.core.kernels.float8 import FLOAT8, Float8
from cacheblend.core.kernels.upload import upload
from cacheblend.engines.vllm.internals.interface import attend_paged, write_paged
from cacheblend.engines.vllm.internals.kv_cache import fp8_scales
from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK
from cacheblend.engines.vllm.jobs import BlendJob

NO_SLOT = -1  # vLLM's slot of a row that must not be written
_DIGIT = 128  # bf16 holds whole numbers up to 256
_FLOAT8_DIGIT = 8  # both types of eight bits hold them
_ABOVE = 65 / 64
"""Factor on whole numbers that are written to eight bits: whether a backend rounds to the nearest or cuts bits off (on
CPUs), they arrive as whole numbers, also after a scale that is rounded itself."""


@dataclass(frozen=True)
class CacheLayout:
    """How a layer's cache is laid out."""

    block_dim: int  # the cache's dimension of blocks
    places: torch.Tensor  # [n] int64, of each number of a record [kv_heads, 2, block size, head_dim] in a flat block
    kind: torch.dtype | None  # of a number in eight bits, one of `FLOAT8`; None: they are kept unchanged


@dataclass(frozen=True)
class RequestBlocks:
    """The blocks of one request in one group, on the cache's device; sent there once."""

    table: torch.Tensor  # [n] int64 blocks, in the order of the prompt
    # [rows] int64 of all rows, block * block size + place in the block; `NO_SLOT` in front of `first`
    slots: torch.Tensor
    # the rows in front of it lie in blocks that other requests may share, or a sliding window has passed them, and they
    # are never written
    first: int
    block_size: int

    @classmethod
    def of(
        cls, block_ids: Sequence[int], first: int, rows: int, block_size: int, device: torch.device | str = "cpu"
    ) -> "RequestBlocks":
        """The blocks of a prompt of so many rows, the first of which the cache holds already. Rows whose block is the
        null block have none: it belongs to no request."""
        table, positions = torch.tensor(block_ids, dtype=torch.int64), torch.arange(rows)
        slots = table[positions // block_size] * block_size + positions % block_size
        passed = (table == NULL_BLOCK).nonzero().flatten()
        first = max(first, min(rows, (int(passed[-1]) + 1) * block_size)) if len(passed) else first
        slots[:first] = NO_SLOT
        sent = upload(torch.cat([table, slots]), torch.device(device))
        return cls(sent[: len(table)], sent[len(table) :], first, block_size)


class Pages(NamedTuple):
    """A layer of the paged cache as two views of it, [blocks, block size, kv_heads, head_dim] each, which kernels read
    and write; of an FP8 cache in one of torch's float8 types."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedLayer:
    """One attention layer's part of the paged cache; `dtype`: of the model; None: the cache's, which is not FP8."""

    def __init__(
        self, attention: Any, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype | None = None
    ) -> None:
        self._attention, self._block_size, self._dtype = attention, block_size, dtype
        self._shape = (kv_heads, 2, block_size, head_dim)
        self._layout: CacheLayout | None = None

    @property
    def is_fp8(self) -> bool:
        return fp8_scales(self._attention) is not None

    @property
    def float8(self) -> Float8 | None:
        """How the cache keeps numbers; None: unchanged. Raises ModelNotBlendableError: see `pages`."""
        scales = fp8_scales(self._attention)
        if scales is None:
            return None
        kind = self._find_layout().kind
        assert kind is not None
        return Float8(kind, self._number_type, *scales)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes rows [kv_heads, n, head_dim] to their slots, [n]; those of `NO_SLOT` nowhere."""
        write_paged(self._attention, keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), slots)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Attention of rows [heads, n, head_dim] over the cached KV, as [n, heads, head_dim]."""
        query, keys, values = (part.transpose(0, 1).contiguous() for part in (query, keys, values))
        return attend_paged(self._attention, query, keys, values, metadata)

    def read(self, table: torch.Tensor, stop: int) -> torch.Tensor:
        """A request's rows 0..stop - 1 as one record, [kv_heads, 2, stop, head_dim]. Raises ModelNotBlendableError: the
        backend does not keep numbers unchanged."""
        layout = self._find_layout()
        used = table[: -(-stop // self._block_size)]
        blocks = self._cache.index_select(layout.block_dim, used).movedim(layout.block_dim, 0).flatten(1)
        # At most `HELD_COPIES` of the rows at a time (`workspace`).
        rows = blocks[:, layout.places].view(len(used), *self._shape)  # a block's [kv_heads, 2, block size, head_dim]
        heads, two, _, width = self._shape
        record = rows.permute(1, 2, 0, 3, 4).reshape(heads, two, -1, width)[:, :, :stop].contiguous()
        float8 = self.float8
        return record if float8 is None else torch.stack(float8.decode(record.view(float8.kind).unbind(1)), dim=1)

    def pages(self) -> Pages | None:
        """Views of the cache; None: its numbers do not lie at strides, as in packed layouts. Raises
        ModelNotBlendableError: the backend does not keep numbers unchanged, nor in a known type of eight bits."""
        layout, cache = self._find_layout(), self._cache
        block = cache.select(layout.block_dim, NULL_BLOCK)
        at = torch.zeros_like(layout.places)  # numbers of the storage, from the beginning of the null block
        rest = layout.places
        for size, stride in zip(reversed(block.shape), reversed(block.stride()), strict=True):
            at, rest = at + rest % size * stride, rest // size
        parts = [_strided(part) for part in at.cpu().view(self._shape).unbind(1)]
        if None in parts:
            return None
        blocks, (heads, _, size, width) = cache.shape[layout.block_dim], self._shape
        views = []
        for start, head, row, dim in (part for part in parts if part is not None):
            strides = (cache.stride(layout.block_dim), row, head, dim)
            views.append(cache.as_strided((blocks, size, heads, width), strides, block.storage_offset() + start))
        return Pages(*(view if layout.kind is None else view.view(layout.kind) for view in views))

    @property
    def _cache(self) -> torch.Tensor:
        cache: torch.Tensor = self._attention.kv_cache
        return cache.view(torch.uint8) if self.is_fp8 else cache

    @property
    def _number_type(self) -> torch.dtype:
        return self._dtype if self._dtype is not None and self.is_fp8 else self._cache.dtype

    def _find_layout(self) -> CacheLayout:
        if self._layout is None:
            count, device = math.prod(self._shape), self._cache.device
            block_dim, kept, kind = self._find_block_dim()
            wanted = torch.arange(count, device=device).view(self._shape)
            found = torch.zeros(len(kept), dtype=torch.int64, device=device)
            unit, digit = 1, _DIGIT if kind is None else _FLOAT8_DIGIT
            while unit < count:  # one digit of each place at a time
                digits = self._probe(wanted // unit % digit, block_dim, kind)[kept]
                found += digits.round().long().clamp(0, digit - 1) * unit
                unit *= digit
            places = torch.zeros(count, dtype=torch.int64, device=device)
            inside = found < count
            places[found[inside]] = kept[inside]
            check = torch.randn(self._shape) if kind is None else torch.randint(-7, 8, self._shape).float()
            check = check.to(device, self._number_type)
            if not torch.equal(self._probe(check, block_dim, kind)[places], check.flatten().float()):
                raise self._refusal("changes keys and values when it caches them")
            self._layout = CacheLayout(block_dim, places, kind)
        return self._layout

    def _find_block_dim(self) -> tuple[int, torch.Tensor, torch.dtype | None]:
        """The cache's block dimension, the places in a flattened block that a write changes, and the numbers' kind."""
        zeros = torch.zeros(self._shape, device=self._cache.device)
        for dim in range(self._cache.dim()):
            for kind in FLOAT8 if self.is_fp8 else (None,):
                before = self._probe(zeros, dim, kind)
                changed = ((before == 0) & (self._probe(zeros + 1, dim, kind) == 1)).nonzero().flatten()
                if len(changed) == zeros.numel():
                    return dim, changed, kind
        raise self._refusal(
            "keeps eight bits of no known type" if self.is_fp8 else "has a KV cache without a block dimension"
        )

    def _probe(self, record: torch.Tensor, block_dim: int, kind: torch.dtype | None) -> torch.Tensor:
        scales = fp8_scales(self._attention)
        if scales is not None:
            record = record * (_ABOVE * torch.tensor(scales, device=record.device)[:, None, None])
        record = record.to(self._number_type)
        slots = torch.arange(self._block_size, device=record.device) + NULL_BLOCK * self._block_size
        self.write(record[:, 0], record[:, 1], slots)
        block = self._cache.select(block_dim, NULL_BLOCK).flatten()
        return (block if kind is None else block.view(kind)).float()

    def _refusal(self, what: str) -> ModelNotBlendableError:
        way_out = "so blending cannot read it; start vLLM with --kv-cache-dtype bfloat16"
        if not self.is_fp8:
            way_out = (
                "so a prefix that vLLM cached cannot be read back; turn prefix caching off "
                "(--no-enable-prefix-caching) to blend with it"
            )
        return ModelNotBlendableError(f"the attention backend {type(self._attention.impl).__name__} {what}, {way_out}")


@dataclass(frozen=True)
class LayerGroups:
    """The model's groups of KV cache."""

    of_layer: Sequence[int]
    windows: Sequence[int | None] = (None,)  # of each group: the rows that a row attends to at most, itself included


@dataclass(frozen=True)
class GroupRows:
    """A request's rows in one group."""

    blocks: RequestBlocks
    is_whole: bool  # all of its rows have blocks of its own, or held ones that can be read
    held: torch.Tensor  # [n] int64 blocks of the held rows from `first_held` on, which is a block's first row
    first_held: int  # no row behind the held ones sees one in front of it

    def read(self, layer: PagedLayer, stop: int) -> torch.Tensor:
        """The held rows 0..stop - 1 as one record, [kv_heads, 2, stop, head_dim]; zeros in front of `first_held`."""
        record = layer.read(self.held, stop - self.first_held)
        return torch.nn.functional.pad(record, (0, 0, self.first_held, 0))


class RequestRows:
    """Where the rows of one request lie, in each group of layers. `is_held`: vLLM holds leading rows, and all of them
    that later rows see can be read; `is_whole`: see `GroupRows`, in all groups."""

    def __init__(self, job: BlendJob, groups: LayerGroups, block_size: int, device: torch.device) -> None:
        first, self._of_layer = job.local_tokens, groups.of_layer
        starts = [first_key(first, window) // block_size for window in groups.windows]
        tables = zip(starts, job.held_ids or job.block_ids, strict=True)
        held = [table[start : -(-first // block_size)] for start, table in tables]
        self.is_held = first > 0 and not any(NULL_BLOCK in table for table in held)
        self.groups: list[GroupRows] = []
        for table, own, start in zip(held, job.block_ids, starts, strict=True):
            blocks = RequestBlocks.of(own, first, len(job.plan), block_size, device)
            is_whole = self.is_held == (first > 0) and NULL_BLOCK not in own
            self.groups.append(
                GroupRows(blocks, is_whole, upload(torch.tensor(table, dtype=torch.int64), device), start * block_size)
            )
        self.is_whole = all(rows.is_whole for rows in self.groups)

    def of(self, layer: int) -> GroupRows:
        return self.groups[self._of_layer[layer]]


def _strided(at: torch.Tensor) -> tuple[int, int, int, int] | None:
    """(start, stride of heads, of rows, of dimensions) of the places [kv_heads, block size, head_dim]; None: they have
    no strides."""
    start = int(at[0, 0, 0])
    heads, rows, dims = (int(at.select(d, 1)[0, 0]) - start if at.shape[d] > 1 else 0 for d in range(3))
    grid = (torch.arange(size) * stride for size, stride in zip(at.shape, (heads, rows, dims), strict=True))
    one, two, three = grid
    expected = start + one[:, None, None] + two[:, None] + three
    return (start, heads, rows, dims) if torch.equal(expected, at) else None
