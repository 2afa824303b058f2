"""A request's KV in vLLM's own paged cache: stored records are placed there, rows are written and attend there.

    prompt    | held by vLLM | chunk A | text | chunk B | question |        rows
    blocks    | 7 | 2        | 9 | 4 | 1 | 11 | 5                 |        any of the cache's, in the prompt's order
    written   never          | placed, or fresh rows

A row is copied out of its block only where it is compared with a fresh one, or where the question's pass asks for it.
Used where the cache's layout has strides and `core.kernels` serves the device; else a prompt has dense buffers
(`LayerKV`), which are copied to the cache layer by layer.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cacheblend.core.errors import CacheBlendError, ModelNotBlendableError
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.float8 import as_bytes
from cacheblend.core.kernels.kv_placement import Placement
from cacheblend.core.kernels.operations import attend_rows, is_served, kv_deviation, place
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.load.layer_kv import MOVED_AT_ONCE, LayerCache, LayerKV
from cacheblend.engines import provenance
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer, Pages, RequestBlocks
from cacheblend.engines.vllm.worker.ranks import Ranks

logger = logging.getLogger("cacheblend.vllm")


class PagedKV:
    """One layer of a request's KV; a `LayerCache`."""

    def __init__(self, layer: PagedLayer, pages: Pages, blocks: RequestBlocks) -> None:
        self._layer, self._pages, self._blocks, self._float8 = layer, pages, blocks, layer.float8

    @property
    def keys(self) -> torch.Tensor:
        """A copy of the whole layer's keys, [kv_heads, rows, head_dim]."""
        return self.rows(torch.arange(len(self._blocks.slots), device=self._blocks.slots.device)).keys

    @property
    def values(self) -> torch.Tensor:
        return self.rows(torch.arange(len(self._blocks.slots), device=self._blocks.slots.device)).values

    def rows(self, positions: torch.Tensor) -> LayerKV:
        size = self._blocks.block_size
        at = self._blocks.table[positions // size], positions % size
        found = [as_bytes(part)[at].transpose(0, 1) for part in self._pages]
        if self._float8 is not None:
            found = self._float8.decode([part.view(self._float8.kind) for part in found])
        return LayerKV(*found)

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `LayerCache.write`; rows in blocks that other requests may share stay as they are."""
        self._layer.write(keys, values, self._blocks.slots[positions])

    def move_keys(self, positions: torch.Tensor, shifts: torch.Tensor, of_all: torch.Tensor) -> None:
        for at in torch.split(positions, MOVED_AT_ONCE):
            rows = self.rows(at)
            self.write(at, (rows.keys + shifts[:, of_all[at]]).to(rows.keys.dtype), rows.values)

    def place(self, records: Sequence[torch.Tensor], placement: Placement, rotation: KeyRotation | None = None) -> None:
        """See `LayerCache.place`. Raises CacheBlendError: a row lies in a block that other requests may share."""
        start = min((piece.start for piece in placement.pieces), default=self._blocks.first)
        if start < self._blocks.first:
            raise CacheBlendError(
                f"a record would be placed at row {start}; rows up to {self._blocks.first} are shared"
            )
        place(records, placement, *self._pages, rotation, self._blocks.table, self._float8)

    def deviation(self, fresh: Sequence[torch.Tensor], measure: Measure, positions: torch.Tensor) -> torch.Tensor:
        """See `LayerCache.deviation`; in eight bits fresh rows are rounded as the placed ones were, so that equal rows
        have none."""
        fresh = fresh if self._float8 is None else self._float8.rounded(fresh)
        return kv_deviation(fresh, self.rows(positions), measure)

    def attend(self, query: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if self._float8 is None:
            return attend_rows(query, *self._pages, positions, spec, self._blocks.table)
        # A key's scale is one of its logits, and a value's one of the mix: bytes are read without them.
        scaled = replace(spec, scaling=spec.scaling * self._float8.key_scale)
        return attend_rows(query, *self._pages, positions, scaled, self._blocks.table).mul_(self._float8.value_scale)


def open_pages(
    layers: Sequence[PagedLayer],
    shapes: Sequence[HeadShape],
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
    wanted: bool | None,
) -> list[Pages] | None:
    """The layers' pages, if prompts are computed in them; None: they have buffers of their own."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return None
    found, reason = list[Pages](), ""
    for number, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        if wanted is None and not is_served(device, dtype, shape, float8=layer.is_fp8):
            reason = f"no kernel serves {shape} in {dtype} on {device}{' over an FP8 cache' if layer.is_fp8 else ''}"
            break
        try:
            pages = layer.pages()
        except ModelNotBlendableError as error:
            reason = str(error)
            break
        if pages is None or (pages.keys.dtype != dtype and not layer.is_fp8):
            what = "no strides" if pages is None else f"the type {pages.keys.dtype}, and the model {dtype}"
            reason = f"the cache of layer {number} has {what}"
            break
        found.append(pages)
    (is_refused,) = ranks.agree_each([int(bool(reason))])
    if is_refused:
        logger.warning(
            "prompts are blended in buffers of their own, and copied to vLLM's cache: %s", reason or "another rank does"
        )
        return None
    logger.info("prompts are blended in vLLM's own cache")
    return found


_FEW_ROWS = 64  # less work than a call's own cost (measured with products, before float32 went to PyTorch's attention)
_LONG_RUNS = 16  # rows of a run, on average: from here on the kernel is as fast in bfloat16


def longest_runs(dtype: torch.dtype) -> float:
    """Rows of a run, on average, below which `attend_rows` beats vLLM's kernel; 0: the kernel wins."""
    if dtype == torch.float32:
        return math.inf
    is_faster = dtype == torch.bfloat16 and provenance.extensions() == {provenance.BF16}
    return _LONG_RUNS if is_faster else 0


class PagedAttention:
    """The `RowAttention` of one prompt, by the CPU backend's own kernel. Also writes each layer's KV to the paged
    cache; `blocks`: of the prompt, none of them the null block.

    The kernels compute sequences whose last rows are the queries. So each run of adjacent rows is passed as a sequence
    that ends with the run, and all sequences share the prompt's blocks:

        active rows   2 3 . . 6 . 8 9        sequences   0..3 (rows 2 3)   0..6 (row 6)   0..9 (rows 8 9)

    Where `core.kernels` is faster, rows are attended to over the prompt's own buffers: in float32 all, in bfloat16
    those of short runs where the processor multiplies bf16 fast but has no AMX, which the kernel does in float32. Of an
    FP8 cache the kernel always serves, since those buffers are not rounded. For CPUs only: runs cannot be found without
    waiting for a device, and a GPU's kernels are not made for many short sequences.
    """

    def __init__(self, layers: Sequence[PagedLayer], builder: Any, blocks: RequestBlocks) -> None:
        self._layers, self._builder, self._blocks = layers, builder, blocks
        self._is_fp8 = any(layer.is_fp8 for layer in layers)
        self._block_ids = blocks.table.int()
        self._written: torch.Tensor | None = None
        self._metadata: dict[int, tuple[torch.Tensor, Any]] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, kv: LayerCache, positions: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
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
