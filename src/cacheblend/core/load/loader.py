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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.kernels.operations import place
from cacheblend.core.kernels.placing import Piece, Placement
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.load.staging import Staging
from cacheblend.core.load.threads import CallsInOrder, DaemonPool
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import BlockSource, KVLayout
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span

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
    """One layer's records as stored, and the seconds that reading took, by tier."""

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
        self._first_reused_layer, self._heads = first_reused_layer, heads
        self._staging = Staging(torch.device(device))
        self._device = self._staging.device
        self._overlap = self._device.type == "cuda" if overlap is None else overlap
        found = [s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)]
        self._spans = [s for s in found if s.name != RESIDENT]
        self._resident = resident if len(self._spans) < len(found) else None
        self._read_ahead = min(read_ahead, self._layers_of(AHEAD_BYTES if ahead_bytes is None else ahead_bytes))
        exact, reused = ([s for s in self._spans if (s.source is Source.LOADED) == is_reused] for is_reused in (0, 1))
        self._exact, self._reused = _Placed.of(exact, "raw"), _Placed.of(reused, codec)
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
        return _Read(records, seconds)

    def _spans_of(self, index: int) -> list[Span]:
        """The spans that are read for a layer."""
        reused = index >= self._first_reused_layer
        return [span for span in self._spans if reused or span.source is not Source.LOADED]

    def _fill(self, index: int, read: _Read, kv: LayerKV, allocated: Any = None) -> _Loaded:
        """Writes records into the buffers, after the event `allocated`, when the device has them."""
        started = time.perf_counter()
        on_device = {name: self._staging.send(record) for name, record in read.records.items()}
        self._staging.wait(allocated, kv)
        self._exact.fill(kv, on_device, None)
        if index >= self._first_reused_layer:
            self._reused.fill(kv, on_device, self._rotations[index])
        return _Loaded(kv, sum(read.seconds.values()) + time.perf_counter() - started, read.seconds)

    @staticmethod
    def _put_resident(kv: LayerKV, record: torch.Tensor) -> None:
        for part, rows in zip(kv, record.unbind(1), strict=True):
            part[:, : rows.shape[1]] = rows


class _Placed(NamedTuple):
    """Where the records of some spans go: the records' names, in the order of the placement's indices."""

    names: list[BlockName]
    placement: Placement

    @classmethod
    def of(cls, spans: Sequence[Span], codec: str) -> "_Placed":
        """Each name once, however often its rows stand in the prompt; exact rows are not moved."""
        indices = {name: index for index, name in enumerate(dict.fromkeys(span.name for span in spans))}
        pieces = [
            Piece(
                indices[span.name],
                span.record_tokens or len(span),
                span.record_start,
                span.start,
                len(span),
                span.start - span.stored_start if span.source is Source.LOADED else 0,
            )
            for span in spans
        ]
        return cls(list(indices), Placement(pieces, codec))

    def fill(self, kv: LayerKV, records: Mapping[BlockName, torch.Tensor], rotation: KeyRotation | None) -> None:
        if self.names:
            place([records[name] for name in self.names], self.placement, kv.keys, kv.values, rotation)


def _by_tier(spans: Sequence[Span]) -> dict[str, list[BlockName]]:
    """Names by the tier they are read from, each once."""
    tiers: dict[str, dict[BlockName, None]] = {}
    for span in spans:
        tiers.setdefault(span.tier, {})[span.name] = None
    return {tier: list(names) for tier, names in tiers.items()}
