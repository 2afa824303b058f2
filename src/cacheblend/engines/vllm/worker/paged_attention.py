"""Attention of a prompt's rows by the CPU backend's own kernel, in the paged cache that will hold their KV anyway.

The kernels compute sequences whose last rows are the queries. So each run of adjacent rows is passed as a sequence that
ends with the run, and all sequences share the prompt's blocks:

    active rows   2 3 . . 6 . 8 9        sequences   0..3 (rows 2 3)   0..6 (row 6)   0..9 (rows 8 9)

Where `core.kernels` is faster than the kernel, rows are attended to over the prompt's own buffers: in float32 all, in
bfloat16 those of short runs where the processor multiplies bf16 matrices fast but has no AMX, which the kernel does in
float32. Of an FP8 cache the kernel always serves, since those buffers are not rounded. For CPUs only: runs cannot be
found without waiting for a device, and a GPU's kernels are not made for many short sequences.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.load.layer_kv import LayerCache
from cacheblend.engines import processor
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer, RequestBlocks

_FEW_ROWS = 64  # less work than a call's own cost (measured with products, before float32 went to PyTorch's attention)
_LONG_RUNS = 16  # rows of a run, on average: from here on the kernel is as fast in bfloat16


def longest_runs(dtype: torch.dtype) -> float:
    """Rows of a run, on average, below which `attend_rows` beats vLLM's kernel; 0: the kernel wins."""
    if dtype == torch.float32:
        return math.inf
    is_faster = dtype == torch.bfloat16 and processor.extensions() == {processor.BF16}
    return _LONG_RUNS if is_faster else 0


class PagedAttention:
    """The `RowAttention` of one prompt. Also writes each layer's KV to the paged cache; `blocks`: of the prompt, none
    of them the null block."""

    def __init__(self, layers: Sequence[PagedLayer], builder: Any, blocks: RequestBlocks) -> None:
        self._layers, self._builder, self._blocks = layers, builder, blocks
        self._is_fp8 = any(layer.is_fp8 for layer in layers)
        self._block_ids = blocks.table.int()
        self._written: torch.Tensor | None = None
        self._metadata: dict[int, tuple[torch.Tensor, Any]] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, kv: LayerCache, positions: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """See `RowAttention`; the kernel has its own copy of `spec`."""
        keys, values = kv.keys, kv.values
        fresh, slots = kv.rows(positions), self._blocks.slots[positions]
        if self._written is not keys:  # the first call for a layer also writes its loaded rows
            own = slice(self._blocks.first, None)
            self._layers[layer].write(keys[:, own], values[:, own], self._blocks.slots[own])
            self._written = keys
        else:  # a prefill that lost its prefix computes it again: those rows have no slot
            self._layers[layer].write(*fresh, slots)
        known = self._metadata.get(start := int(positions[0]))
        if known is None or not torch.equal(known[0], positions):  # built once for rows that stay the same over layers
            at, made = positions.cpu(), None
            ends = torch.cat([(at.diff() != 1).nonzero().flatten() + 1, torch.tensor([len(at)])])
            if self._is_fp8 or not _FEW_ROWS <= len(at) < longest_runs(query.dtype) * len(ends):
                first_rows, lengths = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(), at[ends - 1] + 1
                made = interface.sequences_metadata(self._builder, first_rows, lengths.int(), self._block_ids, slots)
            known = self._metadata[start] = (positions, made)
        if (metadata := known[1]) is None:  # the kernel is not used for these rows
            return kv.attend(query, positions, spec)
        return self._layers[layer].attend(query, fresh.keys, fresh.values, metadata)
