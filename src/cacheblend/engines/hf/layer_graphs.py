"""CUDA graphs of layers: what a layer starts in front of its attention is started by one call, and what is behind it.

    norm, projections, RoPE │ attention │ projection, residual, norm, MLP, residual
    ────── one graph ───────┘   as is   └──────────────── another ────────────────

A pass of few rows, and decoding, wait for the host, which starts some thirty kernels a layer. A graph reads and writes
where it was captured: rows go through memory that all layers share, padded to one of a few sizes, and attention, whose
KV cache is each request's own, stays outside. Each graph is compared with its layer before it serves; a layer that
cannot be captured, or computes something else, is run as it is.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.engines.hf.view import LayerMask

logger = logging.getLogger("cacheblend.graphs")

MOST_ROWS = 2048
"""Of more rows the device's work takes longer than starting it."""
_MOST_SIZES = 24  # numbers of rows that there are graphs for; the one that was not used for longest goes first
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # of the largest number

Replay = Callable[[], None]
Path = tuple[Any, ...]
"""Where a part of a layer's arguments stands."""


class Recorder(Protocol):
    """Keeps what is started on a device, to start it again."""

    def is_here(self) -> bool:
        """Whether what is started now runs behind what was started before: calls share memory."""

    def record(self, run: Callable[[Replay], None]) -> tuple[Replay, Replay]:
        """Starts again what `run` starts in front of the one call of its argument, and behind it. Raises what `run`
        raises, and `RuntimeError` where something in it cannot be kept."""


class CudaRecorder:
    """A `Recorder` of CUDA graphs, which share their temporary memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._main, self._side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self._side):  # what products keep for a stream is no part of a graph
                torch.mm(*torch.zeros(2, 16, 16, device=device, dtype=torch.bfloat16))

    def is_here(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._main

    def record(self, run: Callable[[Replay], None]) -> tuple[Replay, Replay]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())  # other threads may do what they like meanwhile
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def split() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            self._side.wait_stream(self._main)
            begin()
            try:
                run(split)
            except BaseException:
                with suppress(RuntimeError):
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
        self._main.wait_stream(self._side)
        if len(graphs) != 2:
            raise RuntimeError(f"it has {len(graphs) - 1} attentions")
        return graphs[0].replay, graphs[1].replay


@dataclass
class _Slot:
    """Memory for an argument of layers, [1, rows, ...], and what was copied there last: layers share arguments."""

    memory: torch.Tensor
    source: torch.Tensor | None = None


@dataclass
class _Graphs:
    """A layer's graphs for one number of rows; `addresses`: of its weights."""

    first: Replay
    second: Replay
    spec: AttentionSpec
    gives_tuples: bool
    rows: list[torch.Tensor]  # query, keys, values [heads, rows, head_dim]
    mixed: torch.Tensor  # [rows, heads, head_dim]
    addresses: list[int]
    is_checked: bool = False


class LayerGraphs:
    """What the graphs of a model's layers share: they run one at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.lock = recorder, threading.Lock()
        self._memory: dict[Hashable, torch.Tensor] = {}
        self._slots: dict[Hashable, _Slot] = {}
        self._by_rows: OrderedDict[int, dict[Hashable, _Graphs]] = OrderedDict()

    def of(self, rows: int) -> dict[Hashable, _Graphs]:
        """The graphs for so many rows, by layer and kind of arguments."""
        if rows not in self._by_rows:
            if len(self._by_rows) == _MOST_SIZES:
                self._by_rows.popitem(last=False)
            self._by_rows[rows] = {}
        self._by_rows.move_to_end(rows)
        return self._by_rows[rows]

    def memory(self, name: Hashable, like: torch.Tensor, shape: Sequence[int], dim: int, rows: int) -> torch.Tensor:
        """Memory of this shape, whose dimension `dim` is for `MOST_ROWS` rows, of which these are used."""
        whole = list(shape)
        whole[dim] = MOST_ROWS
        key = name, *whole, like.dtype
        if key not in self._memory:
            self._memory[key] = torch.zeros(whole, dtype=like.dtype, device=like.device)
        return self._memory[key].narrow(dim, 0, rows)

    def argument(self, name: Hashable, value: torch.Tensor, rows: int) -> torch.Tensor:
        """An argument [1, n, ...] in memory of its own, as [1, rows, ...]."""
        key = name, value.shape[2:], value.dtype
        if key not in self._slots:
            self._slots[key] = _Slot(self.memory(name, value, value.shape, 1, MOST_ROWS))
        slot = self._slots[key]
        if slot.source is not value:
            slot.memory[:, : value.shape[1]].copy_(value)
            slot.source = value
        return slot.memory[:, :rows]


class _UnknownArgumentError(Exception):
    """An argument of a layer that a graph cannot be given."""


class GraphedLayer:
    """A layer, to be called as it is: by its graphs where there are any."""

    def __init__(self, layer: nn.Module, shared: LayerGraphs) -> None:
        self._layer, self._shared, self._is_plain = layer, shared, False
        parts = list(layer.modules())
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._held = [held for part in parts for held in (part._parameters, part._buffers) if held]

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain or hidden.shape[1] > MOST_ROWS or not self._shared.lock.acquire(blocking=False):
            return self._layer(hidden, *args, **kwargs)
        try:
            if not self._shared.recorder.is_here():
                return self._layer(hidden, *args, **kwargs)
            return self._run(hidden, args, kwargs)
        except _UnknownArgumentError:
            return self._layer(hidden, *args, **kwargs)
        finally:
            self._shared.lock.release()

    def _run(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = hidden.shape[1]
        rows, addresses = padded(count), self._addresses()
        tensors: dict[Path, torch.Tensor] = {}
        masks: list[LayerMask] = []
        kind = tuple(_take_apart(each, (name,), count, tensors, masks) for name, each in _named(args, kwargs))
        if len(masks) != 1 or masks[0].attend is None:
            raise _UnknownArgumentError
        memory = {path: self._shared.argument((path, kind), each, rows) for path, each in tensors.items()}
        own = self._shared.memory("hidden", hidden, hidden.shape, 1, rows)
        of_rows = self._shared.of(rows)
        graphs = of_rows.get((self, kind))
        if graphs is None or graphs.addresses != addresses:
            try:
                graphs = of_rows[self, kind] = self._capture(own, args, kwargs, memory, addresses)
            except Exception as error:
                return self._give_up(f"{type(error).__name__}: {error}".splitlines()[0], hidden, args, kwargs)
        own[:, :count].copy_(hidden)
        graphs.first()
        query, keys, values = (each[:, :count] for each in graphs.rows)
        graphs.mixed[:count].copy_(masks[0].attend(query, keys, values, graphs.spec))
        found = [] if graphs.is_checked else [each.clone() for each in (query, keys, values)]
        graphs.second()
        out = own[:, :count].clone()
        if not graphs.is_checked:
            if reason := self._difference([*found, out], graphs.mixed[:count], hidden, args, kwargs):
                return self._give_up(reason, hidden, args, kwargs)
            graphs.is_checked = True
        return (out,) if graphs.gives_tuples else out

    def _capture(
        self,
        own: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        memory: dict[Path, torch.Tensor],
        addresses: list[int],
    ) -> _Graphs:
        found: dict[str, Any] = {}

        def run(split: Replay) -> None:
            def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: Any) -> torch.Tensor:
                n, parts = own.shape[1], {"query": query, "keys": keys, "values": values}
                found["rows"] = [self._shared.memory(name, x, x.shape, 1, n).copy_(x) for name, x in parts.items()]
                shape = n, len(query), values.shape[-1]
                found["mixed"], found["spec"] = self._shared.memory("mixed", query, shape, 0, n), spec
                split()
                mixed: torch.Tensor = found["mixed"]
                return mixed

            out = self._layer(
                own, *_put_together(args, (), memory, attend), **_put_together(kwargs, (), memory, attend)
            )
            found["gives_tuples"] = isinstance(out, tuple)
            own.copy_(out[0] if found["gives_tuples"] else out)

        first, second = self._shared.recorder.record(run)
        return _Graphs(first, second, addresses=addresses, **found)

    def _difference(
        self, found: list[torch.Tensor], mixed: torch.Tensor, hidden: torch.Tensor, args: Any, kwargs: Any
    ) -> str:
        """What the graphs have computed otherwise than the layer, "" if nothing."""
        expected: list[torch.Tensor] = []

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: AttentionSpec) -> torch.Tensor:
            expected.extend([query, keys, values])
            return mixed.clone()

        out = self._layer(hidden, *_put_together(args, (), {}, attend), **_put_together(kwargs, (), {}, attend))
        expected.append(out[0] if isinstance(out, tuple) else out)
        errors = [(a - b).abs().max() / b.abs().max().clamp_min(1e-6) for a, b in zip(found, expected, strict=True)]
        error, most = float(torch.stack([each.float() for each in errors]).max()), _TOLERANCE[hidden.dtype]
        return "" if error <= most else f"{hidden.shape[1]} rows differ by {error:.2g}, more than {most}"

    def _give_up(self, reason: str, hidden: torch.Tensor, args: Any, kwargs: Any) -> Any:
        logger.warning("a %s runs without graphs: %s", type(self._layer).__name__, reason)
        self._is_plain = True
        return self._layer(hidden, *args, **kwargs)

    def _addresses(self) -> list[int]:
        """Of all that the layer computes with: whoever has the model may replace a weight. Hooks would not be called by
        a graph; and of weights of some kinds there is no address."""
        try:
            if not any(self._hooks):
                return [each.data_ptr() for held in self._held for each in held.values() if each is not None]
        except RuntimeError:
            self._is_plain = True
        raise _UnknownArgumentError


def graphed_layers(layers: Sequence[nn.Module], recorder: Recorder) -> list[GraphedLayer]:
    """Some layers of one model, to be called in their place."""
    shared = LayerGraphs(recorder)
    return [GraphedLayer(layer, shared) for layer in layers]


def padded(rows: int) -> int:
    """The number of rows that so many are padded to, by an eighth at most beyond 64."""
    step = 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length() >> 4)
    return -(-rows // step) * step


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Hashable, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _take_apart(
    value: Any, path: Path, rows: int, tensors: dict[Path, torch.Tensor], masks: list[LayerMask]
) -> Hashable:
    """What of an argument is the same in each call that a graph serves; `tensors` gets what is each row's, by its
    place, `masks` the mask."""
    if isinstance(value, LayerMask):
        if value.tap is not None:
            raise _UnknownArgumentError
        masks.append(value)
        return LayerMask, value.window
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, rows):
        tensors[path] = value
        return path, value.shape[2:], value.dtype
    if type(value) is tuple:
        return tuple(_take_apart(part, (*path, i), rows, tensors, masks) for i, part in enumerate(value))
    if value is None or isinstance(value, bool | int | float | str):
        return path, value
    raise _UnknownArgumentError


def _put_together(value: Any, path: Path, memory: dict[Path, torch.Tensor], attend: Attend) -> Any:
    """Arguments with what lies in `memory`, by its place, and this attention."""
    if isinstance(value, LayerMask):
        return replace(value, attend=attend)
    if isinstance(value, dict):
        return {name: _put_together(part, (*path, name), memory, attend) for name, part in value.items()}
    if type(value) is tuple:
        return tuple(_put_together(part, (*path, i), memory, attend) for i, part in enumerate(value))
    return memory.get(path, value)
