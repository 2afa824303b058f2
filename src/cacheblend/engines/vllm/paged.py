"""Rows of vLLM's paged KV cache: where they are written, and how they are read back.

How a block is laid out depends on backend, version and machine, and only writing is the backend's own business. So the
layout is learnt: known numbers are written through the backend into vLLM's null block, which belongs to no request, and
looked for in it. What is found is the place of every (key or value, head, row, dimension) in a block, in any layout
that keeps numbers as they are.
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
        block_size: tokens of a block.
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
        """Rows [kv_heads, n, head_dim] to their slots, [n]."""
        write_paged(self._attention, keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), slots)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Rows [heads, n, head_dim] over what is written, to [n, heads, head_dim].

        Args:
            query, keys, values: of the rows; keys and values are written already.
            metadata: see `compat.sequences_metadata`.
        """
        query, keys, values = (part.transpose(0, 1).contiguous() for part in (query, keys, values))
        return attend_paged(self._attention, query, keys, values, metadata)

    def read(self, block_ids: Sequence[int], stop: int) -> torch.Tensor:
        """A request's rows 0..stop - 1 as one record, [kv_heads, 2, stop, head_dim].

        Raises:
            ModelNotBlendableError: the backend keeps other numbers than it was given.
        """
        if self._places is None:
            self._places = self._learn()
        used = torch.tensor(block_ids[: -(-stop // self._block_size)], device=self._cache.device)
        blocks = self._cache.index_select(self._block_dim, used).movedim(self._block_dim, 0).flatten(1)
        rows = blocks[:, self._places].view(len(used), *self._shape)  # a block's [kv_heads, 2, block size, head_dim]
        heads, two, _, width = self._shape
        return rows.permute(1, 2, 0, 3, 4).reshape(heads, two, -1, width)[:, :, :stop].contiguous()

    @property
    def _cache(self) -> torch.Tensor:
        cache: torch.Tensor = self._attention.kv_cache
        return cache

    def _learn(self) -> torch.Tensor:
        """[numbers of a block] where each stands in the flattened block."""
        count = math.prod(self._shape)
        device, dtype = self._cache.device, self._cache.dtype
        self._block_dim, kept = self._find_block_dim()
        wanted = torch.arange(count, device=device).view(self._shape)
        found = torch.zeros(len(kept), dtype=torch.int64, device=device)
        unit = 1
        while unit < count:  # a digit at a time
            digits = self._written((wanted // unit % _DIGIT).to(dtype))[kept]
            found += digits.round().long().clamp(0, _DIGIT - 1) * unit
            unit *= _DIGIT
        places = torch.zeros(count, dtype=torch.int64, device=device)
        inside = found < count
        places[found[inside]] = kept[inside]
        check = torch.randn(self._shape).to(device, dtype)
        if not torch.equal(self._written(check)[places], check.flatten()):
            raise self._refusal("keeps other keys and values than it is given")
        return places

    def _find_block_dim(self) -> tuple[int, torch.Tensor]:
        """The dimension of the cache that counts blocks, and which numbers of a flattened block a write changes."""
        like = torch.zeros(self._shape, dtype=self._cache.dtype, device=self._cache.device)
        for dim in range(self._cache.dim()):
            self._block_dim = dim
            zeros = self._written(like)
            changed = ((zeros == 0) & (self._written(like + 1) == 1)).nonzero().flatten()
            if len(changed) == like.numel():
                return dim, changed
        raise self._refusal("has a KV cache of which no dimension counts blocks")

    def _written(self, record: torch.Tensor) -> torch.Tensor:
        """The null block, flattened, behind writing a record [kv_heads, 2, block size, head_dim] to it."""
        slots = torch.arange(self._block_size, device=self._cache.device) + NULL_BLOCK * self._block_size
        self.write(record[:, 0], record[:, 1], slots)
        return self._cache.select(self._block_dim, NULL_BLOCK).flatten()

    def _refusal(self, what: str) -> ModelNotBlendableError:
        name = type(self._attention.impl).__name__
        return ModelNotBlendableError(
            f"the attention backend {name} {what}, so a prefix that vLLM cached cannot be read back; "
            "turn prefix caching off (--no-enable-prefix-caching) to blend with it"
        )
