"""Streams layers from the store ahead of the layer loop.

The loader owns the request's KV cache: one pair of buffers a layer, as long as the prompt. It fills in what is
loaded (keys already re-positioned); the fusor writes the fresh rows over it. Knows plans, block sources and
rotations; knows neither engines nor files.

While a layer computes, a thread reads the next ones' records. On CUDA it also sends them, decompresses them, puts them
in place and moves their keys, on a stream of its own (`staging`). On a CPU the caller's thread does that, with all its
helpers: there is no other processor to do it beside the layers, and a thread that takes one away from them costs more
than it spares (docs/log.md, 2026-11-22).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.load.rope import KeyRotation, Turn, reposition_keys, turn_by
from cacheblend.core.load.staging import Staging
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import BlockSource, KVLayout
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span

ROWS_AT_ONCE = 4096  # bounds the fp32 copies that re-positioning makes
AHEAD_BYTES = 1 << 30  # of buffers whose records are read ahead, a layer's at least


class LayerKV(NamedTuple):
    """One layer of a request's KV cache, each [kv_heads, length, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts rows [kv_heads, n, head_dim] at these positions, [n] int64."""
        self.keys.index_copy_(1, positions, keys)
        self.values.index_copy_(1, positions, values)


class _Read(NamedTuple):
    """One layer's records as they are stored, what stands where, and the seconds that reading took."""

    spans: list[Span]
    records: dict[BlockName, torch.Tensor]
    seconds: float


class _Loaded(NamedTuple):
    """One layer's buffers, filled, the seconds that it took the host, and the moment when the device is done."""

    kv: LayerKV
    seconds: float
    done: Any = None


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
        beside: what is read ahead is put in place ahead, too, beside the layers; None: on CUDA.
        heads: the KV heads to read (a tensor-parallel rank's); `layout` is that of those heads.
        codec: of the chunks' records; exact ones are never compressed.
        resident: of a layer, the rows of the plan's span `RESIDENT`, [kv_heads, 2, n, head_dim] on the device.
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
        beside: bool | None = None,
        heads: slice | None = None,
        codec: str = "raw",
        resident: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._plan, self._source, self._layout, self._rotations = plan, source, layout, rotations
        self._stored = replace(layout, codec=codec)
        self._first_reused_layer, self._heads = first_reused_layer, heads
        self._staging = Staging(torch.device(device))
        self._device = self._staging.device
        self._beside = self._device.type == "cuda" if beside is None else beside
        found = [s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)]
        self._spans = [s for s in found if s.name != RESIDENT]
        self._resident = resident if len(self._spans) < len(found) else None
        self._read_ahead = min(read_ahead, self._layers_of(AHEAD_BYTES))
        self._runs = _moved_runs(self._spans)
        self._turns: dict[tuple[int, int], Turn] = {}
        self._pending: dict[int, Future[_Read | _Loaded]] = {}
        self._given: dict[int, LayerKV] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.read_s: dict[str, float] = {}  # by tier
        self.load_s = 0.0  # reading and putting in place
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
                got: _Read | _Loaded = self._read(index)
            else:
                self._schedule(index)
                got = self._pending.pop(index).result()
            loaded = self._fill(index, got, self._buffers(index)) if isinstance(got, _Read) else got
            self._staging.wait(loaded.done)
            if self._resident is not None:
                self._put_resident(loaded.kv, self._resident(index))
            self._given[index] = loaded.kv
            self.load_s += loaded.seconds
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
        """Stops loading ahead, waits for the layer under way, and lets go of the buffers. Idempotent."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._given.clear()
        self._turns.clear()

    def _layers_of(self, nbytes: int) -> int:
        """So many layers' buffers take at most this many bytes; one layer's may take more."""
        return max(1, nbytes * len(self._layout.layers) // max(1, self._layout.block_bytes(len(self._plan))))

    def _schedule(self, index: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-loader")
        for ahead in range(index, min(index + self._read_ahead, len(self._layout.layers) - 1) + 1):
            if ahead not in self._pending:
                self._pending[ahead] = self._submit(self._thread, ahead)

    def _submit(self, thread: ThreadPoolExecutor, index: int) -> "Future[_Read | _Loaded]":
        if not self._beside:
            return thread.submit(self._read, index)
        # Memory comes from the caller's stream, which gives it back: the other one would keep a KV cache for itself.
        return thread.submit(self._load_beside, index, self._buffers(index), self._staging.now())

    @torch.no_grad()
    def _load_beside(self, index: int, kv: LayerKV, allocated: Any) -> _Loaded:
        with self._staging.beside():
            read = self._read(index)
            return self._fill(index, read, kv, allocated)._replace(done=self._staging.now())

    def _buffers(self, index: int) -> LayerKV:
        shape = self._layout.layers[index]
        size = (shape.kv_heads, len(self._plan), shape.head_dim)
        return LayerKV(*(torch.zeros(size, dtype=self._layout.dtype, device=self._device) for _ in range(2)))

    def _read(self, index: int) -> _Read:
        started = time.perf_counter()
        reused = index >= self._first_reused_layer
        spans = [span for span in self._spans if reused or span.source is not Source.LOADED]
        records: dict[BlockName, torch.Tensor] = {}
        lost: dict[BlockName, BlockLostError] = {}
        for tier, names in _by_tier(spans).items():
            asked = time.perf_counter()
            for name, record in zip(names, self._source.read_many(names, index, self._heads), strict=True):
                if isinstance(record, BlockLostError):
                    lost[name] = record
                else:
                    records[name] = record
            self.read_s[tier] = self.read_s.get(tier, 0.0) + time.perf_counter() - asked
        if lost:
            *_, reason = (error.reason for error in lost.values())
            raise BlockLostError(list(lost), f"layer {index}: {reason}")
        return _Read(spans, records, time.perf_counter() - started)

    def _fill(self, index: int, read: _Read, kv: LayerKV, allocated: Any = None) -> _Loaded:
        """Puts what was read in place, behind the moment when the buffers are there."""
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
        return _Loaded(kv, read.seconds + time.perf_counter() - started)

    @staticmethod
    def _put_resident(kv: LayerKV, record: torch.Tensor) -> None:
        for part, rows in zip(kv, record.unbind(1), strict=True):
            part[:, : rows.shape[1]] = rows

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


def _by_tier(spans: Sequence[Span]) -> dict[str, list[BlockName]]:
    """Names by where they are read from; a repeated chunk's once."""
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
