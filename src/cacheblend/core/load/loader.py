"""Streams layers from the store ahead of the layer loop.

The loader owns the request's KV cache: one pair of buffers for each layer, as long as the prompt. It writes the loaded
rows (keys already re-positioned); the prefill overwrites those that it recomputes. Knows plans, block sources and
rotations; knows neither engines nor files.

While a layer computes, a thread reads the records of the next layers. On CUDA that thread also copies them to the
device, decompresses them, writes them into the buffers and re-positions their keys, on a stream of its own
(`staging_buffers`).
On a CPU the thread only reads; the caller's thread does the rest, with all its helper threads, because a second thread
would take processors from the layers and cost more time than it saves (docs/log.md, 2026-11-22).
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from cacheblend.core.closable import Closable
from cacheblend.core.errors import BlockLostError, LoadTimeoutError
from cacheblend.core.kernels.kv_placement import Located
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.load.budget import LoadBudget
from cacheblend.core.load.layer_kv import LayerCache, LayerKV, PlacedSpans
from cacheblend.core.load.staging_buffers import Lease, Staging
from cacheblend.core.load.threads import DaemonPool, submit_or_call
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import BlockSource, KVLayout
from cacheblend.core.plan.plan import RESIDENT, BlendPlan, Source, Span

__all__ = ["LayerKV", "LayerLoader"]

T = TypeVar("T")

AT_ONCE = 1 << 20  # bytes of a block in one read; with more of them a byte costs no less
AT_ONCE_TO_DEVICE = 8 << 20
"""The same where a block's records are then copied to a device at once: asking takes longer than copying a MiB."""

MOMENT_S = 0.002  # layers are read together while that takes no longer
BYTES_PER_S = 1e8
"""Of a store behind a round trip, before anything has been read: a slower one is read in smaller parts from then on."""


class ReadSize:
    """Learns from each read how many layers the next one takes. `block_tokens`, `tokens`: of a block, and of all blocks
    that are read. `at_once`: bytes of a block in one read, at most, but always one layer's. Where reads are round
    trips, all layers may be one."""

    def __init__(self, layout: KVLayout, block_tokens: int, tokens: int, at_once: int = AT_ONCE) -> None:
        self._most = -(-at_once * len(layout.layers) // max(1, layout.block_bytes(block_tokens)))
        self._layers, self._all = 1, max(1, len(layout.layers))
        self._layer_s = layout.block_bytes(tokens) / self._all / BYTES_PER_S  # of a layer's bytes, all blocks

    def of(self, round_trip_s: float = 0.0) -> int:
        """Layers that the next read takes, at least 1, where a read takes `round_trip_s` however little is read."""
        if round_trip_s <= MOMENT_S:
            return self._layers
        return min(self._all, math.ceil(round_trip_s / self._layer_s))

    def learn(self, layers: int, seconds: float, round_trip_s: float = 0.0) -> None:
        """A read of so many layers took so long."""
        if round_trip_s > MOMENT_S:
            self._layer_s = max(1e-9, seconds - round_trip_s) / layers
        else:
            self._layers = max(1, layers // 2) if seconds > MOMENT_S else min(self._most, 2 * layers)


AHEAD_BYTES = 1 << 30  # bounds the buffers of layers that are loaded ahead; one layer is always loaded ahead


class _Read(NamedTuple):
    """One layer's records as stored, those of each of its placements; the seconds that reading took, by tier; and the
    memory that they lie in, with those of other layers; None: they have left it, and are on the device after event
    `sent`."""

    records: list[Sequence[torch.Tensor]]
    seconds: dict[str, float]
    lease: Lease | None
    sent: Any = None


class _Loaded(NamedTuple):
    """One layer's filled buffers, the seconds that the host took, of them those of reading, and the event when the
    device is done."""

    kv: LayerCache
    seconds: float
    read: dict[str, float]
    done: Any = None


class LayerLoader(Closable):
    """Loads one request's layers in order, `read_ahead` layers ahead of the last asked for.

    Small layers are read several at once, so that some more may be ahead, but never more than `ahead_bytes` of buffers.

    Args:
        rotations: one for each layer; None where keys have no position.
        first_reused_layer: LOADED rows are not read before this layer, because earlier layers compute all of them.
        read_ahead: 0 loads in the caller's thread, unless there is a budget.
        overlap: copy prefetched layers while earlier ones compute; None: on CUDA only.
        heads: the KV heads to read (of a tensor-parallel rank); `layout` has only these heads.
        codec: of the chunks' records; see `Span.is_raw`.
        resident: gives the rows of the plan's span `RESIDENT` for a layer, [kv_heads, 2, n, head_dim] on the device.
        threads: where the store is read; `close` does not wait for it. None: in a thread of its own, and `close` waits.
        ahead_bytes: of buffers that are loaded ahead at most, but always one layer's; None: `AHEAD_BYTES`.
        budget: what the request may wait for the store; None: as long as it takes.
        caches: gives each layer's place in an engine's own cache; None: buffers are made here. Records are then only
            read and sent ahead, and placed by the caller of `layer`: a loader that was closed writes nowhere.
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
        budget: LoadBudget | None = None,
        caches: Callable[[int], LayerCache] | None = None,
    ) -> None:
        self._plan, self._source, self._layout, self._rotations = plan, source, layout, rotations
        self._first_reused_layer, self._heads = first_reused_layer, heads
        self._staging = Staging(torch.device(device))
        self._device = self._staging.device
        self._overlap = self._device.type == "cuda" if overlap is None else overlap
        self._threads, self._budget, self._caches = threads, budget, caches
        self._own_thread: DaemonPool | None = None  # where none were given
        found = [s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)]
        self._spans = [s for s in found if s.name != RESIDENT]
        self._resident = resident if len(self._spans) < len(found) else None
        most_bytes = AHEAD_BYTES if ahead_bytes is None else ahead_bytes
        self._most_ahead = max(1, most_bytes * len(layout.layers) // max(1, layout.block_bytes(len(plan))))
        self._read_ahead = min(read_ahead, self._most_ahead)
        self._exact = PlacedSpans.by_codec([s for s in self._spans if s.source is Source.PREFIX], codec)
        self._placed = PlacedSpans.by_codec(self._spans, codec)
        self._next = 0  # the first layer that has not been asked for
        blocks = {s.name: s.record_tokens for s in self._spans}
        self._tiers = {s.tier for s in self._spans}
        at_once = AT_ONCE_TO_DEVICE if self._overlap else AT_ONCE
        self._read_size = ReadSize(layout, max(blocks.values(), default=1), sum(blocks.values()), at_once)
        self._pending: dict[int, Future[dict[int, _Read]] | Future[dict[int, _Loaded]]] = {}
        self._given: dict[int, LayerCache] = {}
        self._first_tier = next((s.tier for s in self._spans), "")
        self._asked = "", 0.0  # the tier that is being read, and since when by the budget's clock
        self._last_tier = ""
        self._calls: list[Future[Any]] = []  # of the reading threads, in order, each behind the one before it
        self.read_s: dict[str, float] = {}  # seconds of reading the layers that were given, by tier
        self.load_s = self.wait_s = 0.0  # seconds of reading and filling buffers on the host; of callers that waited

    @property
    def reading(self) -> str:  # the tier that is being read, or was read last; empty: none yet
        return self._last_tier

    def layer(self, index: int) -> LayerCache:
        """Buffers of layer `index` with the loaded rows, all others unwritten; or its place in `caches`. Ask in order.

        A second call for a layer returns the same buffers with their current content: they are the request's KV cache,
        and nothing is read twice.

        Raises:
            BlockLostError: names every block of this layer that could not be read.
            LoadTimeoutError: the budget is used up; names all blocks of the tier that did not answer.
        """
        if index in self._given:
            return self._given[index]
        started = time.perf_counter()
        try:
            self._schedule(index)
            pending = self._pending.pop(index, None)
            if self._budget is not None:
                if pending is None and self._spans_of(index):
                    pending = self._submit(range(index, index + 1))
                if pending is not None and not self._budget.wait(pending, self._asks):
                    by_tier, tier = _by_tier(self._spans_of(index)), self._asked[0]
                    if tier not in by_tier:  # no thread is free
                        tier = ""
                    late = by_tier.get(tier) or [name for names in by_tier.values() for name in names]
                    what = f"loading layer {index} from {tier or 'the store'}"
                    raise LoadTimeoutError(late, self._budget.give_up(what, tier))
            group = self._read(range(index, index + 1)) if pending is None else pending.result()
            loaded = group.pop(index)  # else this layer would live as long as the last one that was read with it
            if isinstance(loaded, _Read):
                place = self._buffers(index) if self._caches is None else self._caches(index)
                loaded = self._fill(index, loaded, place)
            self._staging.wait(loaded.done)
            if self._resident is not None:
                self.put_resident(loaded.kv, self._resident(index))
            self._given[index] = loaded.kv
            self.load_s += loaded.seconds
            for tier, seconds in loaded.read.items():
                self.read_s[tier] = self.read_s.get(tier, 0.0) + seconds
            return self._given[index]
        finally:
            pending = None  # else an error and the future that has it would keep each other, and what was read, alive
            self.wait_s += time.perf_counter() - started

    def _asks(self) -> tuple[str, float]:
        """See `Reading`. Between two reads it waits for a thread, and for no tier."""
        return (self._first_tier, 0.0) if not self._last_tier else self._asked

    def awaited(self, index: int) -> "Future[Any] | None":
        """The read that `layer` would wait for; None: `layer` returns, or raises, without waiting for the store. Begins
        to read the layer and those ahead of it. A loader that reads in the caller's thread always answers None."""
        if index in self._given:
            return None
        self._schedule(index)
        pending = self._pending.get(index)
        return None if pending is None or pending.done() else pending

    def release(self, index: int) -> None:
        """Drops a layer's buffers, which must not be asked for again, but after `rewind`."""
        self._given.pop(index, None)

    def rewind(self) -> None:
        """Begins anew: layers that were released are asked for once more, in order."""
        self._next = 0

    def close(self) -> None:
        """Stops loading ahead and drops the buffers; waits for the layer being loaded unless `threads` were given.
        Idempotent."""
        self._pending.clear()
        for call in self._calls:
            call.cancel()
        self._calls.clear()
        if self._own_thread is not None:
            self._own_thread.close()
            self._own_thread.join()
            self._own_thread = None
        self._given.clear()

    def _schedule(self, index: int) -> None:
        """Has this layer and those ahead of it read, as far as they have records."""
        last = min(index + self._read_ahead, len(self._layout.layers) - 1) if self._read_ahead else -1
        self._next = max(self._next, index)
        while self._next <= last:
            start = self._next
            round_trip_s = max((self._source.round_trip_s(tier) for tier in self._tiers), default=0.0)
            end = min(
                start + self._read_size.of(round_trip_s),
                len(self._layout.layers),
                max(start, index + self._most_ahead) + 1,
                self._first_reused_layer if start < self._first_reused_layer else math.inf,  # all with the same spans
            )
            layers = range(start, int(end))
            if self._spans_of(start):
                self._pending |= dict.fromkeys(layers, self._submit(layers))
            self._next = layers.stop

    def _submit(self, layers: range) -> "Future[dict[int, _Read]] | Future[dict[int, _Loaded]]":
        if not self._overlap:
            return self._in_order(partial(self._read, layers))
        if self._caches is not None:
            return self._in_order(partial(self._send_ahead, layers))
        # Allocated on the caller's stream, which frees it: else torch caches a whole KV cache for the other stream.
        buffers = [self._buffers(index) for index in layers]
        mode = torch.is_inference_mode_enabled()  # of this thread, and so of the buffers
        return self._in_order(partial(self._load_overlapped, layers, buffers, self._staging.now(), mode))

    def _in_order(self, call: Callable[[], T]) -> "Future[T]":
        """Has a thread call this once the calls before it have ended: together they take one thread."""
        if self._threads is None and self._own_thread is None:
            self._own_thread = DaemonPool(1, "cacheblend-loader")
        pool = self._own_thread or self._threads
        assert pool is not None
        self._calls = [each for each in self._calls if not each.done()]
        self._calls.append(pool.submit_after(self._calls[-1], call) if self._calls else submit_or_call(pool, call))
        return self._calls[-1]

    def _load_overlapped(
        self, layers: range, buffers: Sequence[LayerKV], allocated: Any, inference_mode: bool
    ) -> dict[int, _Loaded]:
        with torch.inference_mode(inference_mode), torch.no_grad(), self._staging.stream():
            sent = self._send_ahead(layers)
            return {i: self._fill(i, sent[i], kv, allocated) for i, kv in zip(layers, buffers, strict=True)}

    def _send_ahead(self, layers: range) -> dict[int, _Read]:
        """Reads layers, and starts their records' way to the device."""
        with self._staging.stream():
            group = self._read(layers)
            if self._device.type == "cpu":
                return group  # the records stay where they were read to
            by_placement = zip(*(read.records for read in group.values()), strict=True)
            try:
                sent = [self._staging.send(records) for records in by_placement]
            finally:  # where one is out of memory, copies of those before it are under way
                done = self._staging.now()
                self._staging.memory.hold(done, [*chain(*chain(*(read.records for read in group.values())))])
            for read in group.values():
                if read.lease is not None:
                    read.lease.release(done)
            return {
                index: _Read(list(records), group[index].seconds, None, done)
                for index, records in zip(layers, zip(*sent, strict=True), strict=True)
            }

    def _buffers(self, index: int) -> LayerKV:
        return LayerKV.unwritten(self._layout.layers[index], len(self._plan), self._layout.dtype, self._device)

    def _read(self, layers: range) -> dict[int, _Read]:
        """Reads layers that have the same spans."""
        seconds, lease = dict[str, float](), self._staging.memory.lease(len(layers))
        records: dict[BlockName, list[torch.Tensor]] = {}
        lost: dict[BlockName, BlockLostError] = {}
        for tier, names in _by_tier(self._spans_of(layers.start)).items():
            asked = time.perf_counter()
            self._asked = tier, 0.0 if self._budget is None else self._budget.clock()
            self._last_tier = tier
            try:
                read = self._source.read_layers(names, layers, self._heads, lease.take)
            finally:
                self._asked = "", 0.0
            for name, found in zip(names, read, strict=True):
                if isinstance(found, BlockLostError):
                    lost[name] = found
                else:
                    records[name] = found
            seconds[tier] = (time.perf_counter() - asked) / len(layers)
        if seconds:
            round_trip_s = max(self._source.round_trip_s(tier) for tier in seconds)
            self._read_size.learn(len(layers), len(layers) * sum(seconds.values()), round_trip_s)
        if lost:
            *_, reason = (error.reason for error in lost.values())
            which = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start} to {layers.stop - 1}"
            raise BlockLostError(list(lost), f"{which}: {reason}")
        by_placement = [
            list(zip(*(records[name] for name in placed.names), strict=True))
            for placed in self._placements(layers.start)
        ]
        return {
            index: _Read([by_layer[number] for by_layer in by_placement], seconds, lease)
            for number, index in enumerate(layers)
        }

    def _spans_of(self, index: int) -> list[Span]:
        """The spans that are read for a layer."""
        reused = index >= self._first_reused_layer
        return [span for span in self._spans if reused or span.source is not Source.LOADED]

    def _placements(self, index: int) -> list[PlacedSpans]:
        """Where those spans' records go."""
        return self._placed if index >= self._first_reused_layer else self._exact

    def _fill(self, index: int, read: _Read, kv: LayerCache, allocated: Any = None) -> _Loaded:
        """Writes records into the buffers, after the event `allocated`, when the device has them."""
        started = time.perf_counter()
        on_device = read.records if read.lease is None else [self._staging.send([each])[0] for each in read.records]
        parts = ((each.memory, each.table) if isinstance(each, Located) else each for each in on_device)
        self._staging.wait(read.sent, [*chain(*parts)])
        self._staging.wait(allocated, () if allocated is None else (kv.keys, kv.values))
        for placed, records in zip(self._placements(index), on_device, strict=True):
            kv.place(records, placed.placement, self._rotations[index])
        done = self._staging.now()
        if read.lease is not None:
            self._staging.memory.hold(done, [*chain(*read.records)])
            read.lease.release(done)
        return _Loaded(kv, sum(read.seconds.values()) + time.perf_counter() - started, read.seconds, done)

    @staticmethod
    def put_resident(kv: LayerCache, record: torch.Tensor) -> None:
        """Fills a layer's first rows with a record of them, [kv_heads, 2, n, head_dim]."""
        for part, rows in zip((kv.keys, kv.values), record.unbind(1), strict=True):
            part[:, : rows.shape[1]] = rows


def _by_tier(spans: Sequence[Span]) -> dict[str, list[BlockName]]:
    """Names by the tier they are read from, each once."""
    tiers: dict[str, dict[BlockName, None]] = {}
    for span in spans:
        tiers.setdefault(span.tier, {})[span.name] = None
    return {tier: list(names) for tier, names in tiers.items()}
