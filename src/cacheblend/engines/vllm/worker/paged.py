"""Writes rows to vLLM's paged KV cache, and reads them back.

The layout of a block depends on backend, version and machine, and backends offer a way to write rows but none to read
them. So the layout is detected: known numbers are written through the backend to vLLM's null block, which belongs to no
request, and searched for in it. That gives the place of every (key or value, head, row, dimension) in a block, in any
layout that keeps numbers unchanged. Where the places are those of a tensor with strides, as in every layout but packed
ones, kernels read and write the blocks themselves (`Pages`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.compat import attend_paged, write_paged

NULL_BLOCK = 0
NO_SLOT = -1
"""vLLM's slot of a row that must not be written."""

_DIGIT = 128  # bf16 holds whole numbers up to 256


@dataclass(frozen=True)
class RequestBlocks:
    """The blocks of one request, on the cache's device; sent there once.

    Attributes:
        table: [n] int64 blocks, in the order of the prompt.
        slots: [rows] int64 of all rows, block * block size + place in the block; `NO_SLOT` in front of `first`.
        first: the rows in front of it lie in blocks that other requests may share, and are never written.
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
        """The blocks of a prompt of so many rows, the first of which the cache holds already."""
        table, positions = torch.tensor(block_ids, dtype=torch.int64), torch.arange(rows)
        slots = table[positions // block_size] * block_size + positions % block_size
        slots[:first] = NO_SLOT
        sent = torch.cat([table, slots]).to(device)
        return cls(sent[: len(table)], sent[len(table) :], first, block_size)


class Pages(NamedTuple):
    """A layer of the paged cache as two views of it, [blocks, block size, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedLayer:
    """One attention layer's part of the paged cache.

    Args:
        attention: vLLM's module.
        kv_heads, head_dim: of this rank.
        block_size: of the cache, in tokens.
    """

    def __init__(self, attention: Any, kv_heads: int, head_dim: int, block_size: int) -> None:
        self._attention, self._block_size = attention, block_size
        self._shape = (kv_heads, 2, block_size, head_dim)
        self._places: torch.Tensor | None = None
        self._block_dim = 0

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes rows [kv_heads, n, head_dim] to their slots, [n]; those of `NO_SLOT` nowhere."""
        write_paged(self._attention, keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), slots)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Attention of rows [heads, n, head_dim] over the cached KV, as [n, heads, head_dim].

        Args:
            query, keys, values: of the rows; keys and values are in the cache already.
            metadata: see `compat.sequences_metadata`.
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
        places = self._find_places()
        used = table[: -(-stop // self._block_size)]
        blocks = self._cache.index_select(self._block_dim, used).movedim(self._block_dim, 0).flatten(1)
        # At most `HELD_COPIES` of the rows at a time (`workspace`).
        rows = blocks[:, places].view(len(used), *self._shape)  # a block's [kv_heads, 2, block size, head_dim]
        heads, two, _, width = self._shape
        return rows.permute(1, 2, 0, 3, 4).reshape(heads, two, -1, width)[:, :, :stop].contiguous()

    def pages(self) -> Pages | None:
        """Views of the cache that kernels read and write; None: its numbers do not lie at strides.

        Raises:
            ModelNotBlendableError: the backend does not keep numbers unchanged.
        """
        places, cache = self._find_places(), self._cache
        block = cache.select(self._block_dim, NULL_BLOCK)
        at = torch.zeros_like(places)  # numbers of the storage, from the beginning of the null block
        rest = places
        for size, stride in zip(reversed(block.shape), reversed(block.stride()), strict=True):
            at, rest = at + rest % size * stride, rest // size
        parts = [_strided(part) for part in at.cpu().view(self._shape).unbind(1)]
        if None in parts:
            return None
        blocks, (heads, _, size, width) = cache.shape[self._block_dim], self._shape
        views = []
        for start, head, row, dim in (part for part in parts if part is not None):
            strides = (cache.stride(self._block_dim), row, head, dim)
            views.append(cache.as_strided((blocks, size, heads, width), strides, block.storage_offset() + start))
        return Pages(*views)

    @property
    def _cache(self) -> torch.Tensor:
        cache: torch.Tensor = self._attention.kv_cache
        return cache

    def _find_places(self) -> torch.Tensor:
        if self._places is None:
            self._places = self._detect_layout()
        return self._places

    def _detect_layout(self) -> torch.Tensor:
        """The place in the flattened block of each number of a record [kv_heads, 2, block size, head_dim]."""
        count = math.prod(self._shape)
        device, dtype = self._cache.device, self._cache.dtype
        self._block_dim, kept = self._find_block_dim()
        wanted = torch.arange(count, device=device).view(self._shape)
        found = torch.zeros(len(kept), dtype=torch.int64, device=device)
        unit = 1
        while unit < count:  # one digit of each place at a time
            digits = self._written((wanted // unit % _DIGIT).to(dtype))[kept]
            found += digits.round().long().clamp(0, _DIGIT - 1) * unit
            unit *= _DIGIT
        places = torch.zeros(count, dtype=torch.int64, device=device)
        inside = found < count
        places[found[inside]] = kept[inside]
        check = torch.randn(self._shape).to(device, dtype)
        if not torch.equal(self._written(check)[places], check.flatten()):
            raise self._refusal("changes keys and values when it caches them")
        return places

    def _find_block_dim(self) -> tuple[int, torch.Tensor]:
        """The cache's block dimension, and the places in a flattened block that a write changes."""
        like = torch.zeros(self._shape, dtype=self._cache.dtype, device=self._cache.device)
        for dim in range(self._cache.dim()):
            self._block_dim = dim
            zeros = self._written(like)
            changed = ((zeros == 0) & (self._written(like + 1) == 1)).nonzero().flatten()
            if len(changed) == like.numel():
                return dim, changed
        raise self._refusal("has a KV cache without a block dimension")

    def _written(self, record: torch.Tensor) -> torch.Tensor:
        """The null block, flattened, after a record [kv_heads, 2, block size, head_dim] was written to it."""
        slots = torch.arange(self._block_size, device=self._cache.device) + NULL_BLOCK * self._block_size
        self.write(record[:, 0], record[:, 1], slots)
        return self._cache.select(self._block_dim, NULL_BLOCK).flatten()

    def _refusal(self, what: str) -> ModelNotBlendableError:
        name = type(self._attention.impl).__name__
        return ModelNotBlendableError(
            f"the attention backend {name} {what}, so a prefix that vLLM cached cannot be read back; "
            "turn prefix caching off (--no-enable-prefix-caching) to blend with it"
        )


def _strided(at: torch.Tensor) -> tuple[int, int, int, int] | None:
    """(start, stride of heads, of rows, of dimensions) of the places [kv_heads, block size, head_dim]; None: they have
    no strides."""
    start = int(at[0, 0, 0])
    heads, rows, dims = (int(at.select(d, 1)[0, 0]) - start if at.shape[d] > 1 else 0 for d in range(3))
    grid = (torch.arange(size) * stride for size, stride in zip(at.shape, (heads, rows, dims), strict=True))
    one, two, three = grid
    expected = start + one[:, None, None] + two[:, None] + three
    return (start, heads, rows, dims) if torch.equal(expected, at) else None
