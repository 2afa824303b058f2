"""Streams layers from the store ahead of the layer loop.

The loader owns the request's KV cache: one pair of buffers a layer, as long as the prompt. It fills in what is
loaded (keys already re-positioned); the fusor writes the fresh rows over it. Knows plans, block sources and
rotations; knows neither engines nor files.

Records are read ahead by a thread, and sent on to the device (`staging`); they are put in place by the caller's own
thread. A second thread that runs tensor operations would bring a second team of workers to the same cores, and each
would wait for the other: on two cores that made a whole prefill 1.8 times slower.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from cacheblend.core.blocks import BlockSource, KVLayout
from cacheblend.core.errors import BlockLostError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan import BlendPlan, Source, Span
from cacheblend.core.rope import KeyRotation, Turn, reposition_keys, turn_by
from cacheblend.core.staging import Staging

ROWS_AT_ONCE = 4096  # bounds the fp32 copies that re-positioning makes
AHEAD_BYTES = 1 << 30  # of records that are read ahead, a layer at least


class LayerKV(NamedTuple):
    """One layer of a request's KV cache, each [kv_heads, length, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts rows [kv_heads, n, head_dim] at these positions, [n] int64."""
        self.keys.index_copy_(1, positions, keys)
        self.values.index_copy_(1, positions, values)


class Records(NamedTuple):
    """One layer's records as they are stored, read, on the device or on their way there, and not yet in place.

    Attributes:
        spans: what stands where.
        by_name: their records.
        sent: see `Staging`.
        read_s: seconds that reading took.
    """

    spans: list[Span]
    by_name: dict[BlockName, torch.Tensor]
    sent: Any
    read_s: float


class LayerLoader:
    """One request's layers, loaded in order, at most `read_ahead` (or `AHEAD_BYTES`) ahead of the furthest asked for.

    Args:
        plan: what to load.
        source: where from.
        layout: of the buffers.
        rotations: one a layer; None where keys carry no position.
        first_reused_layer: LOADED rows are left out before this layer, since there all of them are computed.
        device: of the buffers.
        read_ahead: 0 loads in the caller's thread.
        heads: the KV heads to read (a tensor-parallel rank's); `layout` is that of those heads.
        codec: of the chunks' records; exact ones are never compressed.
    """

    def __init__(
        self,
        plan: BlendPlan,
        source: BlockSource,
        layout: KVLayout,
        rotations: Sequence[KeyRotation | None],
        *,
        first_reused_layer: int = 0,
        device: torch.device | str = "cpu",
        read_ahead: int = 2,
        heads: slice | None = None,
        codec: str = "raw",
    ) -> None:
        self._plan, self._source, self._layout, self._rotations = plan, source, layout, rotations
        self._stored = replace(layout, codec=codec)
        self._first_reused_layer, self._device, self._heads = first_reused_layer, torch.device(device), heads
        self._staging = Staging(self._device)
        self._spans = [s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)]
        self._read_ahead = min(read_ahead, self._layers_of(AHEAD_BYTES))
        self._runs = _moved_runs(self._spans)
        self._turns: dict[tuple[int, int], Turn] = {}
        self._pending: dict[int, Future[Records]] = {}
        self._given: dict[int, LayerKV] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.load_s = 0.0  # reading and placing
        self.wait_s = 0.0  # of which the caller saw

    def layer(self, index: int) -> LayerKV:
        """Buffers of layer `index`, loaded rows in place, all others zero. Ask in order.

        Asked again, it hands out the same buffers as they stand: they are the request's KV cache, and nothing is
        read or moved twice.

        Raises:
            BlockLostError: names every block of this layer that could not be read.
        """
        if index in self._given:
            return self._given[index]
        started = time.perf_counter()
        try:
            if self._read_ahead == 0 or not self._spans:
                records = self._read(index)
            else:
                self._schedule(index)
                records = self._pending.pop(index).result()
            self._given[index] = self._place(index, records)
            return self._given[index]
        finally:
            self.wait_s += time.perf_counter() - started

    def release(self, index: int) -> None:
        """Lets go of a layer's buffers, which nobody will ask for again."""
        self._given.pop(index, None)

    def __enter__(self) -> "LayerLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead, waits for the read under way, and lets go of the buffers. Idempotent."""
        self._given.clear()
        self._turns.clear()
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _layers_of(self, nbytes: int) -> int:
        """So many layers of what is loaded take at most this many bytes; one layer may take more."""
        tokens = {span.name: span.record_tokens or len(span) for span in self._spans}
        whole = sum(self._stored.block_bytes(count) for count in tokens.values())
        return max(1, nbytes * len(self._layout.layers) // max(1, whole))

    def _schedule(self, index: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-loader")
        for ahead in range(index, min(index + self._read_ahead, len(self._layout.layers) - 1) + 1):
            if ahead not in self._pending:
                self._pending[ahead] = self._thread.submit(self._read, ahead)

    def _read(self, index: int) -> Records:
        started = time.perf_counter()
        reused = index >= self._first_reused_layer
        spans = [span for span in self._spans if reused or span.source is not Source.LOADED]
        names = list(dict.fromkeys(span.name for span in spans))  # a repeated chunk is read once
        answers = self._source.read_many(names, index, self._heads) if names else []
        records: dict[BlockName, torch.Tensor] = {}
        lost: dict[BlockName, BlockLostError] = {}
        for name, record in zip(names, answers, strict=True):
            if isinstance(record, BlockLostError):
                lost[name] = record
            else:
                records[name] = record
        if lost:
            *_, reason = (error.reason for error in lost.values())
            raise BlockLostError(list(lost), f"layer {index}: {reason}")
        on_device, sent = self._staging.send(list(records.values()))
        return Records(spans, dict(zip(records, on_device, strict=True)), sent, time.perf_counter() - started)

    def _place(self, index: int, records: Records) -> LayerKV:
        started = time.perf_counter()
        shape = self._layout.layers[index]
        size = (shape.kv_heads, len(self._plan), shape.head_dim)
        kv = LayerKV(*(torch.zeros(size, dtype=self._layout.dtype, device=self._device) for _ in range(2)))
        self._staging.receive(list(records.by_name.values()), records.sent)
        for span in records.spans:
            record = self._decoded(index, span, records.by_name[span.name])
            rows = slice(span.record_start, span.record_start + len(span))
            kv.keys[:, span.start : span.stop] = record[:, 0, rows]
            kv.values[:, span.start : span.stop] = record[:, 1, rows]
        if index >= self._first_reused_layer:
            self._reposition(index, kv.keys)
        self.load_s += records.read_s + time.perf_counter() - started
        return kv

    def _decoded(self, index: int, span: Span, stored: torch.Tensor) -> torch.Tensor:
        """A record as it was computed; decompressed on the buffers' device, to which fewer bytes travel."""
        if stored.dim() == 4:
            return stored
        return self._stored.decode(index, stored.to(self._device), span.record_tokens or len(span))

    def _reposition(self, index: int, keys: torch.Tensor) -> None:
        rotation = self._rotations[index]
        if rotation is None:
            return
        for start, offsets in self._runs:
            key = (start, id(rotation))
            if key not in self._turns:
                self._turns[key] = turn_by(rotation, offsets, self._device)
            rows = keys[:, start : start + len(offsets)]
            rows.copy_(reposition_keys(rows, self._turns[key]))


def _moved_runs(spans: Sequence[Span]) -> list[tuple[int, torch.Tensor]]:
    """Runs of adjacent rows whose keys must move: (first position, [rows] offsets)."""
    runs: list[tuple[int, list[torch.Tensor], int]] = []
    for span in spans:
        offset = span.start - span.stored_start
        if span.source is not Source.LOADED or offset == 0:
            continue
        offsets = torch.full((len(span),), offset, dtype=torch.int64)
        if runs and runs[-1][0] + runs[-1][2] == span.start and runs[-1][2] + len(span) <= ROWS_AT_ONCE:
            start, parts, rows = runs[-1]
            runs[-1] = (start, [*parts, offsets], rows + len(span))
        else:
            runs.append((span.start, [offsets], len(span)))
    return [(start, torch.cat(parts)) for start, parts, _ in runs]
