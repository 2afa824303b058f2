"""Streams layers from the store ahead of the layer loop.

The loader owns the request's KV cache: one pair of buffers for each layer, as long as the prompt. It writes the loaded
rows (keys already re-positioned); the prefill overwrites those that it recomputes. Knows plans, block sources and
rotations; knows neither engines nor files.

While a layer computes, a thread reads the records of the next layers. On CUDA that thread also copies them to the
device, decompresses them, writes them into the buffers and re-positions their keys, on a separate stream (`staging`).
On a CPU the thread only reads; the caller's thread does the rest, with all its helper threads, because a second thread
would take processors from the layers and cost more time than it saves (docs/log.md, 2026-11-22).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.load.rope import KeyRotation, Turn, reposition_keys, turn_by
from cacheblend.core.load.staging import Staging
from cacheblend.core.load.threads import CallsInOrder, DaemonPool
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import BlockSource, KVLayout
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span

ROWS_AT_ONCE = 4096  # bounds the fp32 copies that re-positioning makes
AHEAD_BYTES = 1 << 30  # bounds the buffers of layers that are loaded ahead; one layer is always loaded ahead


class LayerKV(NamedTuple):
    """One layer of a request's KV cache, each [kv_heads, length, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites the rows at `positions` [n] int64 with these, [kv_heads, n, head_dim]."""
        self.keys.index_copy_(1, positions, keys)
        self.values.index_copy_(1, positions, values)


class _Read(NamedTuple):
    """One layer's records as stored, the spans they belong to, and the seconds that reading took, by tier."""

    spans: list[Span]
    records: dict[BlockName, torch.Tensor]
    seconds: dict[str, float]


class _Loaded(NamedTuple):
    """One layer's filled buffers, the seconds that the host took, of them those of reading, and the event when the
    device is done."""

    kv: LayerKV
    seconds: float
    read: dict[str, float]
    done: Any = None


class LayerLoader:
    """Loads one request's layers in order, at most `read_ahead` layers (or `AHEAD_BYTES`) ahead of the last asked for.

    Args:
        plan: says which blocks are loaded.
        source: the store they are read from.
        layout: of the buffers.
        rotations: one for each layer; None where keys have no position.
        first_reused_layer: LOADED rows are not read before this layer, because earlier layers compute all of them.
        device: of the buffers.
        read_ahead: 0 loads in the caller's thread.
        overlap: copy prefetched layers while earlier ones compute; None: on CUDA only.
        heads: the KV heads to read (of a tensor-parallel rank); `layout` has only these heads.
        codec: of the chunks' records; blocks of the exact prefix are never compressed.
        resident: gives the rows of the plan's span `RESIDENT` for a layer, [kv_heads, 2, n, head_dim] on the device.
        threads: where the store is read; `close` does not wait for it. None: in a thread of its own, and `close` waits.
        ahead_bytes: of buffers that are loaded ahead at most, but always one layer's; None: `AHEAD_BYTES`.

    Attributes:
        read_s: seconds of reading the layers that were given, by tier.
        load_s: seconds of reading and of filling buffers, on the host.
        wait_s: seconds that callers of `layer` waited.
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
        overlap: bool | None = None,
        heads: slice | None = None,
        codec: str = "raw",
        resident: Callable[[int], torch.Tensor] | None = None,
        threads: DaemonPool | None = None,
        ahead_bytes: int | None = None,
    ) -> None:
        self._plan, self._source, self._layout, self._rotations = plan, source, layout, rotations
        self._stored = replace(layout, codec=codec)
        self._first_reused_layer, self._heads = first_reused_layer, heads
        self._staging = Staging(torch.device(device))
        self._device = self._staging.device
        self._overlap = self._device.type == "cuda" if overlap is None else overlap
        found = [s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)]
        self._spans = [s for s in found if s.name != RESIDENT]
        self._resident = resident if len(self._spans) < len(found) else None
        self._read_ahead = min(read_ahead, self._layers_of(AHEAD_BYTES if ahead_bytes is None else ahead_bytes))
        self._runs = _moved_runs(self._spans)
        self._turns: dict[tuple[int, int], Turn] = {}
        self._pending: dict[int, Future[_Read] | Future[_Loaded]] = {}
        self._given: dict[int, LayerKV] = {}
        self._threads = threads
        self._reader: DaemonPool | CallsInOrder | None = None
        self.read_s: dict[str, float] = {}
        self.load_s = 0.0
        self.wait_s = 0.0

    def layer(self, index: int) -> LayerKV:
        """Buffers of layer `index` with the loaded rows, all others zero. Ask in order.

        A second call for a layer returns the same buffers with their current content: they are the request's KV cache,
        and nothing is read twice.

        Raises:
            BlockLostError: names every block of this layer that could not be read.
        """
        if index in self._given:
            return self._given[index]
        started = time.perf_counter()
        try:
            self._schedule(index)
            pending = self._pending.pop(index, None)
            got = self._read(index) if pending is None else pending.result()
            loaded = self._fill(index, got, self._buffers(index)) if isinstance(got, _Read) else got
            self._staging.wait(loaded.done)
            if self._resident is not None:
                self._put_resident(loaded.kv, self._resident(index))
            self._given[index] = loaded.kv
            self.load_s += loaded.seconds
            for tier, seconds in loaded.read.items():
                self.read_s[tier] = self.read_s.get(tier, 0.0) + seconds
            return self._given[index]
        finally:
            self.wait_s += time.perf_counter() - started

    def awaited(self, index: int) -> "Future[Any] | None":
        """The read that `layer` would wait for; None: `layer` returns, or raises, without waiting for the store.

        Begins to read the layer and those ahead of it. A loader that reads in the caller's thread always answers None.
        """
        if index in self._given:
            return None
        self._schedule(index)
        pending = self._pending.get(index)
        return None if pending is None or pending.done() else pending

    def is_ready(self, index: int) -> bool:
        """Whether `layer` would not wait for the store; see `awaited`."""
        return self.awaited(index) is None

    def release(self, index: int) -> None:
        """Drops a layer's buffers, which must not be asked for again."""
        self._given.pop(index, None)

    def __enter__(self) -> "LayerLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops loading ahead and drops the buffers; waits for the layer being loaded unless `threads` were given.
        Idempotent."""
        self._pending.clear()
        if self._reader is not None:
            self._reader.close()
            if isinstance(self._reader, DaemonPool):
                self._reader.join()
            self._reader = None
        self._given.clear()
        self._turns.clear()

    def _layers_of(self, nbytes: int) -> int:
        """Number of layers whose buffers fit in this many bytes; at least one."""
        return max(1, nbytes * len(self._layout.layers) // max(1, self._layout.block_bytes(len(self._plan))))

    def _schedule(self, index: int) -> None:
        """Has this layer and those ahead of it read, as far as they have records."""
        for ahead in range(index, min(index + self._read_ahead, len(self._layout.layers) - 1) + 1):
            if self._read_ahead and ahead not in self._pending and self._spans_of(ahead):
                self._pending[ahead] = self._submit(ahead)

    def _submit(self, index: int) -> "Future[_Read] | Future[_Loaded]":
        if self._reader is None:
            shared = self._threads
            self._reader = DaemonPool(1, "cacheblend-loader") if shared is None else CallsInOrder(shared)
        if not self._overlap:
            return self._reader.submit(self._read, index)
        # Allocated on the caller's stream, which frees it: else torch caches a whole KV cache for the other stream.
        mode = torch.is_inference_mode_enabled()  # of this thread, and so of the buffers
        return self._reader.submit(self._load_overlapped, index, self._buffers(index), self._staging.now(), mode)

    def _load_overlapped(self, index: int, kv: LayerKV, allocated: Any, inference_mode: bool) -> _Loaded:
        with torch.inference_mode(inference_mode), torch.no_grad(), self._staging.stream():
            read = self._read(index)
            return self._fill(index, read, kv, allocated)._replace(done=self._staging.now())

    def _buffers(self, index: int) -> LayerKV:
        shape = self._layout.layers[index]
        size = (shape.kv_heads, len(self._plan), shape.head_dim)
        return LayerKV(*(torch.zeros(size, dtype=self._layout.dtype, device=self._device) for _ in range(2)))

    def _read(self, index: int) -> _Read:
        spans, seconds = self._spans_of(index), dict[str, float]()
        records: dict[BlockName, torch.Tensor] = {}
        lost: dict[BlockName, BlockLostError] = {}
        for tier, names in _by_tier(spans).items():
            asked = time.perf_counter()
            for name, record in zip(names, self._source.read_many(names, index, self._heads), strict=True):
                if isinstance(record, BlockLostError):
                    lost[name] = record
                else:
                    records[name] = record
            seconds[tier] = time.perf_counter() - asked
        if lost:
            *_, reason = (error.reason for error in lost.values())
            raise BlockLostError(list(lost), f"layer {index}: {reason}")
        return _Read(spans, records, seconds)

    def _spans_of(self, index: int) -> list[Span]:
        """The spans that are read for a layer."""
        reused = index >= self._first_reused_layer
        return [span for span in self._spans if reused or span.source is not Source.LOADED]

    def _fill(self, index: int, read: _Read, kv: LayerKV, allocated: Any = None) -> _Loaded:
        """Writes records into the buffers, after the event `allocated`, when the device has them."""
        started = time.perf_counter()
        on_device = {name: self._staging.send(record) for name, record in read.records.items()}
        self._staging.wait(allocated, kv)
        for span in read.spans:
            record = self._decoded(index, span, on_device[span.name])
            rows = slice(span.record_start, span.record_start + len(span))
            kv.keys[:, span.start : span.stop] = record[:, 0, rows]
            kv.values[:, span.start : span.stop] = record[:, 1, rows]
        if index >= self._first_reused_layer:
            self._reposition(index, kv.keys)
        return _Loaded(kv, sum(read.seconds.values()) + time.perf_counter() - started, read.seconds)

    @staticmethod
    def _put_resident(kv: LayerKV, record: torch.Tensor) -> None:
        for part, rows in zip(kv, record.unbind(1), strict=True):
            part[:, : rows.shape[1]] = rows

    def _decoded(self, index: int, span: Span, stored: torch.Tensor) -> torch.Tensor:
        """A record as computed; decompressed on the buffers' device, so that fewer bytes are copied to it."""
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


def _by_tier(spans: Sequence[Span]) -> dict[str, list[BlockName]]:
    """Names by the tier they are read from, each once."""
    tiers: dict[str, dict[BlockName, None]] = {}
    for span in spans:
        tiers.setdefault(span.tier, {})[span.name] = None
    return {tier: list(names) for tier, names in tiers.items()}


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
