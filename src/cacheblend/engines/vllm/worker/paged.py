"""Writes rows to vLLM's paged KV cache, and reads them back.

The layout of a block depends on backend, version and machine, and backends offer a way to write rows but none to read
them. So the layout is detected: known numbers are written through the backend to vLLM's null block, which belongs to no
request, and searched for in it. That gives the place of every (key or value, head, row, dimension) in a block, in any
layout that keeps numbers unchanged.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.compat import attend_paged, write_paged

NULL_BLOCK = 0
_DIGIT = 128  # bf16 holds whole numbers up to 256


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

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """[stop - start] int64 slots of a request's positions."""
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        positions = torch.arange(start, stop)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        return slots.to(self._cache.device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes rows [kv_heads, n, head_dim] to their slots, [n]."""
        write_paged(self._attention, keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), slots)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Attention of rows [heads, n, head_dim] over the cached KV, as [n, heads, head_dim].

        Args:
            query, keys, values: of the rows; keys and values are in the cache already.
            metadata: see `compat.sequences_metadata`.
        """
        query, keys, values = (part.transpose(0, 1).contiguous() for part in (query, keys, values))
        return attend_paged(self._attention, query, keys, values, metadata)

    def read(self, block_ids: Sequence[int], stop: int) -> torch.Tensor:
        """A request's rows 0..stop - 1 as one record, [kv_heads, 2, stop, head_dim].

        Raises:
            ModelNotBlendableError: the backend does not keep numbers unchanged.
        """
        if self._places is None:
            self._places = self._detect_layout()
        used = torch.tensor(block_ids[: -(-stop // self._block_size)], device=self._cache.device)
        blocks = self._cache.index_select(self._block_dim, used).movedim(self._block_dim, 0).flatten(1)
        rows = blocks[:, self._places].view(len(used), *self._shape)  # a block's [kv_heads, 2, block size, head_dim]
        heads, two, _, width = self._shape
        return rows.permute(1, 2, 0, 3, 4).reshape(heads, two, -1, width)[:, :, :stop].contiguous()

    @property
    def _cache(self) -> torch.Tensor:
        cache: torch.Tensor = self._attention.kv_cache
        return cache

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
