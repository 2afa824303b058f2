"""Attention of a prompt's rows by the backend's own kernel, in the paged cache that will hold the prompt's KV anyway.

The kernels compute sequences whose last rows are the queries. So each run of adjacent rows is passed as a sequence that
ends with the run, and all sequences share the prompt's blocks:

    active rows   2 3 . . 6 . 8 9        sequences   0..3 (rows 2 3)   0..6 (row 6)   0..9 (rows 8 9)

The kernel applies windows, caps and sinks itself. With long runs it is as fast as in vLLM's own prefill. Where
`core.kernels` is faster than the kernel, rows are attended to over the prompt's own buffers: on CPUs in float32 all, in
bfloat16 those of short runs where the processor multiplies bf16 matrices fast but has no AMX, which the kernel does in
float32; on GPUs all, if our own kernel serves, since runs cannot be found without waiting for the device.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.kernels.operations import ATTEND_ROWS, attend_rows
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines import processor
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.worker.paged import PagedLayer

NO_SLOT = -1
"""vLLM's slot of a row that must not be written."""

_FEW_ROWS = 64  # less work than a call's own cost (measured with products, before float32 went to PyTorch's attention)
_LONG_RUNS = 16  # rows of a run, on average: from here on the kernel is as fast in bfloat16


def longest_runs(dtype: torch.dtype, device: torch.device) -> float:
    """Rows of a run, on average, below which `attend_rows` beats vLLM's kernel; 0: the kernel wins."""
    if device.type == "cuda":
        return math.inf if ATTEND_ROWS.on(device, dtype).is_kernel else 0
    if dtype == torch.float32:
        return math.inf
    is_faster = dtype == torch.bfloat16 and processor.extensions() == {processor.BF16}
    return _LONG_RUNS if is_faster else 0


class PagedAttention:
    """The `RowAttention` of one prompt. Also writes each layer's KV to the paged cache.

    Args:
        layers: of the paged cache.
        builder: see `compat.metadata_builder`.
        block_ids: of the prompt, none of them the null block.
        first: preceding rows are in the cache already, and are not written.
        slots: [rows] of the prompt's rows from `first` on.
    """

    def __init__(
        self, layers: Sequence[PagedLayer], builder: Any, block_ids: Sequence[int], first: int, slots: torch.Tensor
    ) -> None:
        self._layers, self._builder, self._first = layers, builder, first
        self._slots = torch.cat([slots.new_full((first,), NO_SLOT), slots])
        self._block_ids = torch.tensor(block_ids, dtype=torch.int32, device=slots.device)
        self._written: torch.Tensor | None = None
        self._metadata: dict[int, tuple[torch.Tensor, Any]] = {}
        self._own = (torch.empty(0), slice(None))  # of the rows last written, those that are not in the cache already

    def __call__(
        self, layer: int, query: torch.Tensor, kv: LayerKV, positions: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """See `RowAttention`; the kernel has its own copy of `spec`."""
        fresh = LayerKV(kv.keys[:, positions], kv.values[:, positions])
        slots = self._slots[positions]
        if self._written is not kv.keys:  # the first call for a layer also writes its loaded rows
            own = slice(self._first, None)
            self._layers[layer].write(kv.keys[:, own], kv.values[:, own], self._slots[own])
            self._written = kv.keys
        else:
            own = self._own_of(positions)
            self._layers[layer].write(fresh.keys[:, own], fresh.values[:, own], slots[own])
        if query.is_cuda and longest_runs(query.dtype, query.device):
            return attend_rows(query, kv.keys, kv.values, positions, spec)
        metadata = self._metadata_of(positions, slots, query.dtype)
        if metadata is None:
            return attend_rows(query, kv.keys, kv.values, positions, spec)
        return self._layers[layer].attend(query, fresh.keys, fresh.values, metadata)

    def _own_of(self, positions: torch.Tensor) -> slice:
        """Rows that are not in the cache already: all, unless a prefill that lost its prefix computes it again.

        Waits for the device once for rows that stay the same over layers.
        """
        if self._first and self._own[0] is not positions:
            self._own = (positions, slice(int((positions < self._first).sum()), None))
        return self._own[1]

    def _metadata_of(self, positions: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> Any:
        """The kernel's metadata, built once for rows that stay the same over layers; None: it is not used for them."""
        start = int(positions[0])
        known = self._metadata.get(start)
        if known is None or not torch.equal(known[0], positions):
            known = self._metadata[start] = (positions, self._make_metadata(positions.cpu(), slots, dtype))
        return known[1]

    def _make_metadata(self, positions: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> Any:
        ends = torch.cat([(positions.diff() != 1).nonzero().flatten() + 1, torch.tensor([len(positions)])])
        if _FEW_ROWS <= len(positions) < longest_runs(dtype, positions.device) * len(ends):
            return None
        first_rows = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int()
        return compat.sequences_metadata(
            self._builder, first_rows, (positions[ends - 1] + 1).int(), self._block_ids, slots
        )
