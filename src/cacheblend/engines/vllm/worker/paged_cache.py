"""Writes rows to vLLM's paged KV cache, and reads them back.

Rows are written by the backend, which also rounds them where the cache has eight bits. Where they lie is found out once
(`cache_layout`). Where those places are those of a tensor with strides, as in every layout but packed ones, kernels
read and write the blocks themselves (`Pages`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cacheblend.core.kernels.float8 import Float8
from cacheblend.engines.vllm.internals.interface import attend_paged, write_paged
from cacheblend.engines.vllm.internals.kv_cache import fp8_scales
from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK
from cacheblend.engines.vllm.worker.cache_layout import CacheLayout, LayoutFinder

NO_SLOT = -1
"""vLLM's slot of a row that must not be written."""


@dataclass(frozen=True)
class RequestBlocks:
    """The blocks of one request, on the cache's device; sent there once.

    Attributes:
        table: [n] int64 blocks, in the order of the prompt.
        slots: [rows] int64 of all rows, block * block size + place in the block; `NO_SLOT` in front of `first`.
        first: the rows in front of it lie in blocks that other requests may share, or a sliding window has passed them,
            and they are never written.
        block_size: of the cache, in tokens.
    """

    table: torch.Tensor
    slots: torch.Tensor
    first: int
    block_size: int

    @classmethod
    def of(
        cls, block_ids: Sequence[int], first: int, rows: int, block_size: int, device: torch.device | str = "cpu"
    ) -> "RequestBlocks":
        """The blocks of a prompt of so many rows, the first of which the cache holds already.

        Rows whose block is the null block have none: it belongs to no request.
        """
        table, positions = torch.tensor(block_ids, dtype=torch.int64), torch.arange(rows)
        slots = table[positions // block_size] * block_size + positions % block_size
        passed = (table == NULL_BLOCK).nonzero().flatten()
        first = max(first, min(rows, (int(passed[-1]) + 1) * block_size)) if len(passed) else first
        slots[:first] = NO_SLOT
        sent = torch.cat([table, slots]).to(device)
        return cls(sent[: len(table)], sent[len(table) :], first, block_size)


class Pages(NamedTuple):
    """A layer of the paged cache as two views of it, [blocks, block size, kv_heads, head_dim] each; of an FP8 cache in
    one of torch's float8 types."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedLayer:
    """One attention layer's part of the paged cache.

    Args:
        attention: vLLM's module.
        kv_heads, head_dim: of this rank.
        block_size: of the cache, in tokens.
        dtype: of the model; None: the cache's, which then is not FP8.
    """

    def __init__(
        self, attention: Any, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype | None = None
    ) -> None:
        self._attention, self._block_size, self._dtype = attention, block_size, dtype
        self._shape = (kv_heads, 2, block_size, head_dim)
        self._layout: CacheLayout | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether the cache keeps numbers in eight bits."""
        return fp8_scales(self._attention) is not None

    @property
    def float8(self) -> Float8 | None:
        """How the cache keeps numbers; None: unchanged.

        Raises:
            ModelNotBlendableError: see `pages`.
        """
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
        """Attention of rows [heads, n, head_dim] over the cached KV, as [n, heads, head_dim].

        Args:
            query, keys, values: of the rows; keys and values are in the cache already.
            metadata: see `interface.sequences_metadata`.
        """
        query, keys, values = (part.transpose(0, 1).contiguous() for part in (query, keys, values))
        return attend_paged(self._attention, query, keys, values, metadata)

    def read(self, table: torch.Tensor, stop: int) -> torch.Tensor:
        """A request's rows 0..stop - 1 as one record, [kv_heads, 2, stop, head_dim].

        Args:
            table: see `RequestBlocks`.
            stop: at most the rows that these blocks have.

        Raises:
            ModelNotBlendableError: the backend does not keep numbers unchanged.
        """
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
        """Views of the cache that kernels read and write; None: its numbers do not lie at strides.

        Raises:
            ModelNotBlendableError: the backend does not keep numbers unchanged, nor in a known type of eight bits.
        """
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
        """The layer's cache; of eight bits as uint8."""
        cache: torch.Tensor = self._attention.kv_cache
        return cache.view(torch.uint8) if self.is_fp8 else cache

    @property
    def _number_type(self) -> torch.dtype:
        return self._cache.dtype if self._dtype is None else self._dtype

    def _find_layout(self) -> CacheLayout:
        if self._layout is None:
            scales, name = fp8_scales(self._attention), type(self._attention.impl).__name__
            float8 = None if scales is None else Float8(torch.float8_e4m3fn, self._number_type, *scales)
            slots = torch.arange(self._block_size, device=self._cache.device) + NULL_BLOCK * self._block_size

            def write(record: torch.Tensor) -> None:
                self.write(record[:, 0], record[:, 1], slots)

            self._layout = LayoutFinder(self._cache, self._shape, write, float8, name).find()
        return self._layout


def _strided(at: torch.Tensor) -> tuple[int, int, int, int] | None:
    """(start, stride of heads, of rows, of dimensions) of the places [kv_heads, block size, head_dim]; None: they have
    no strides."""
    start = int(at[0, 0, 0])
    heads, rows, dims = (int(at.select(d, 1)[0, 0]) - start if at.shape[d] > 1 else 0 for d in range(3))
    grid = (torch.arange(size) * stride for size, stride in zip(at.shape, (heads, rows, dims), strict=True))
    one, two, three = grid
    expected = start + one[:, None, None] + two[:, None] + three
    return (start, heads, rows, dims) if torch.equal(expected, at) else None
