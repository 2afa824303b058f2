"""CUDA graphs of layers: what a layer starts in front of its attention is started by one call, and what is behind it.

    norm, projections, RoPE │ attention │ projection, residual, norm, MLP, residual
    ────── one graph ───────┘   as is   └──────────────── another ────────────────

A pass of few rows, and decoding, wait for the host, which starts some thirty kernels a layer. A graph reads and writes
where it was captured: rows go through memory that all layers share, padded to one of a few sizes, and attention, whose
KV cache is each request's own, stays outside. Each graph is compared with its layer before it serves; a layer that
waits for the device (mixtures of experts), cannot be captured, or computes something else, is run as it is.
"""

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.engines.hf.view import LayerMask

logger = logging.getLogger("cacheblend.graphs")

MOST_ROWS = 2048  # of more rows the device's work takes longer than starting it
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # of a row's mean
_ONE_AT_A_TIME = threading.Lock()  # torch captures no two graphs at once in a process
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Replay = Callable[[], None]
Path = tuple[Any, ...]  # where a part of a layer's arguments stands


class CudaRecorder:
    """Keeps what is started on a device, to start it again. Graphs share the memory of their temporary results."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._main, self._side = device, torch.cuda.current_stream(device), _capture_stream(device)
        with _ONE_AT_A_TIME, self._aside():
            self._renew_pool()

    def is_here(self) -> bool:
        """Whether what is started now runs behind what was started before: calls share memory."""
        return torch.cuda.current_stream(self._device) == self._main

    def record(self, run: Callable[[Replay], None]) -> tuple[Replay, Replay]:
        """Starts again what `run` starts in front of the one call of its argument, and behind it. Raises what `run`
        raises, and `RuntimeError` where something in it cannot be kept."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def split() -> None:
            graphs[-1].capture_end()
            graphs.append(self._begin())

        with _ONE_AT_A_TIME, self._aside():
            try:
                graphs.append(self._begin())
                run(split)
                graphs[-1].capture_end()
            except BaseException:
                try:
                    graphs[-1].capture_end()
                except (RuntimeError, IndexError):  # up to torch 2.11 the allocator goes on recording where it failed
                    with suppress(RuntimeError):
                        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
                    with suppress(RuntimeError):
                        self._renew_pool()
                raise
        if len(graphs) != 2:
            raise RuntimeError(f"it has {len(graphs) - 1} attentions")
        return graphs[0].replay, graphs[1].replay

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of captures. No garbage is collected: what goes with it may not be called in a capture."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._side):
                self._side.wait_stream(self._main)
                yield
                self._main.wait_stream(self._side)
        finally:
            if collects:
                gc.enable()

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()  # other threads may do what they like meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def _renew_pool(self) -> None:
        """Memory for graphs, which is there for as long as one of them is: so one is kept."""
        self._pool = torch.cuda.graph_pool_handle()
        self._kept = self._begin()
        torch.zeros(1, device=self._device)
        self._kept.capture_end()


@cache
def _capture_stream(device: torch.device) -> Any:
    """Of a priority of its own: streams of one priority are given out in turn, and one of them loads records."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the host waits for inside: sizes or values that only the device knows, copies to the host."""

    found, is_listening = "", True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, name = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)], str(func)
        waits = _WAITS & set(func.tags) or "grouped_mm" in name
        if name == "aten.index.Tensor":  # of numbers the size is known
            waits = any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
        to_host = isinstance(out, torch.Tensor) and not out.is_cuda and any(each.is_cuda for each in given)
        if self.is_listening and (waits or to_host):
            self.found = self.found or name
        return out


@dataclass
class _Graphs:
    """A layer's graphs for one number of rows, and where they read and write."""

    first: Replay
    second: Replay
    spec: AttentionSpec
    gives_tuples: bool
    parts: list[torch.Tensor]  # query, keys, values [heads, rows, head_dim]
    mixed: torch.Tensor  # [rows, heads, head_dim]
    hidden: torch.Tensor  # [1, rows, width]
    out: torch.Tensor
    addresses: list[int]  # of the layer's weights


class LayerGraphs:
    """What the graphs of a model's layers share: they run one at a time."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self.recorder, self.lock = recorder, threading.Lock()
        self._memory: dict[Hashable, torch.Tensor] = {}
        self._sources: dict[Hashable, torch.Tensor] = {}

    def memory(self, name: Hashable, like: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
        """Memory for such a tensor, whose dimension `dim` is for `MOST_ROWS` rows, of which these are used."""
        shape = list(like.shape)
        shape[dim] = MOST_ROWS
        key = name, *shape, like.dtype
        if key not in self._memory:
            with torch.inference_mode(False):  # else only inference mode could write to it
                self._memory[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._memory[key].narrow(dim, 0, rows)

    def argument(self, name: Hashable, value: torch.Tensor, rows: int) -> torch.Tensor:
        """An argument [1, n, ...] in memory of its own, as [1, rows, ...]; layers share arguments: copied once."""
        memory, key = self.memory(name, value, 1, rows), (name, *value.shape[2:], value.dtype)
        if self._sources.get(key) is not value:
            memory[:, : value.shape[1]].copy_(value)
            self._sources[key] = value
        return memory


class _UnknownArgumentError(Exception):
    """An argument of a layer that a graph cannot be given."""


class GraphedLayer:
    """A layer, to be called as it is: by its graphs where there are any."""

    def __init__(self, layer: nn.Module, shared: LayerGraphs) -> None:
        self._layer, self._shared, self._is_plain = layer, shared, False
        self._graphs: dict[Hashable, _Graphs] = {}
        parts = list(layer.modules())
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._held = [held for part in parts for held in (part._parameters, part._buffers)]

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        may = not self._is_plain and hidden.shape[1] <= MOST_ROWS and self._shared.recorder.is_here()
        if not may or not self._shared.lock.acquire(blocking=False):
            return self._layer(hidden, *args, **kwargs)
        try:
            return self._run(hidden, _Call(args, kwargs, hidden.shape[1]))
        except _UnknownArgumentError:
            return self._layer(hidden, *args, **kwargs)
        finally:
            self._shared.lock.release()

    def _run(self, hidden: torch.Tensor, call: "_Call") -> Any:
        call.addresses, argument = self._addresses(), self._shared.argument
        call.memory = {path: argument((path, call.kind), each, call.rows) for path, each in call.tensors.items()}
        graphs, count = self._graphs.get((call.rows, call.kind)), call.count
        if graphs is None or graphs.addresses != call.addresses:
            return self._capture(hidden, call)
        graphs.hidden[:, :count].copy_(hidden)
        graphs.first()
        query, keys, values = (each[:, :count] for each in graphs.parts)
        graphs.mixed[:count].copy_(call.attend(query, keys, values, graphs.spec))
        graphs.second()
        found = graphs.out[:, :count].clone()
        return (found,) if graphs.gives_tuples else found

    def _capture(self, hidden: torch.Tensor, call: "_Call") -> Any:
        """The layer's own output; it has graphs from then on, if they compute the same."""
        own = self._shared.memory("hidden", hidden, 1, call.rows)
        own[:, : call.count].copy_(hidden)
        seen: list[tuple[Any, ...]] = []
        waits = _Waits()  # type: ignore[no-untyped-call]

        def note(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            waits.is_listening = False
            mixed = call.attend(query, keys, values, spec)
            waits.is_listening = True
            seen.append(([query, keys, values], mixed, spec))
            return mixed

        with waits:
            out = call.of(self._layer, hidden, {}, note)
        try:
            if waits.found:
                raise RuntimeError(f"it waits for the device ({waits.found})")
            (attended,) = seen
            self._graphs[call.rows, call.kind] = self._checked(own, out, call, *attended)
        except torch.OutOfMemoryError:
            pass  # there may be room another time
        except Exception as error:  # of a device: anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning("a %s runs without graphs: %s", type(self._layer).__name__, reason)
            self._is_plain = True
        return out

    def _checked(
        self, own: torch.Tensor, out: Any, call: "_Call", computed: list[torch.Tensor], result: torch.Tensor, spec: Any
    ) -> _Graphs:
        """Graphs for the rows in `own`. Raises `RuntimeError`: they give other queries, keys or values than `computed`,
        or another output than `out` for the attention's `result`."""
        gives_tuples, names, memory = isinstance(out, tuple), ("query", "keys", "values"), self._shared.memory
        parts = [memory(name, each, 1, call.rows) for name, each in zip(names, computed, strict=True)]
        mixed, into = memory("mixed", result, 0, call.rows), memory("out", own, 1, call.rows)

        def run(split: Replay) -> None:
            def stop(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: AttentionSpec) -> torch.Tensor:
                for part, each in zip(parts, (query, keys, values), strict=True):
                    part.copy_(each)
                split()
                return mixed

            found = call.of(self._layer, own, call.memory, stop)
            into.copy_(found[0] if gives_tuples else found)

        first, second = self._shared.recorder.record(run)
        first()
        found = [each[:, : call.count].clone() for each in parts]
        mixed[: call.count].copy_(result)
        second()
        pairs = zip([*found, into[:, : call.count]], [*computed, out[0] if gives_tuples else out], strict=True)
        errors = [(a - b).abs().float().mean(-1) / b.abs().float().mean(-1).clamp_min(1e-6) for a, b in pairs]
        error, most = float(torch.stack([each.max() for each in errors]).max()), _TOLERANCE[own.dtype]
        if not error <= most:
            raise RuntimeError(f"{call.count} rows differ by {error:.2g}, more than {most}")
        return _Graphs(first, second, spec, gives_tuples, parts, mixed, own, into, call.addresses)

    def _addresses(self) -> list[int]:
        """Of all that the layer computes with: whoever has the model may replace a weight. Hooks would not be called by
        a graph; and of weights of some kinds there is no address."""
        try:
            if not any(self._hooks):
                return [each.data_ptr() for held in self._held for each in held.values() if each is not None]
        except RuntimeError:
            self._is_plain = True
        raise _UnknownArgumentError


class _Call:
    """A layer's arguments without the hidden states: `tensors` that have a part for each row, by where they stand, and
    what is the same in all calls of this `kind`. Raises `_UnknownArgumentError`: one is neither."""

    memory: dict[Path, torch.Tensor]  # where graphs read what is in `tensors`
    addresses: list[int]  # of the layer's weights

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
        self._args, self._kwargs, self.count, self.rows = args, kwargs, count, padded(count)
        self.tensors: dict[Path, torch.Tensor] = {}
        masks: list[LayerMask] = []
        self.kind = tuple(self._known(x, (name,), masks) for name, x in (*enumerate(args), *kwargs.items()))
        if len(masks) != 1 or masks[0].attend is None:
            raise _UnknownArgumentError
        self.attend: Attend = masks[0].attend

    def of(self, layer: nn.Module, hidden: torch.Tensor, memory: dict[Path, torch.Tensor], attend: Attend) -> Any:
        """The layer's output for arguments that lie in this memory, or in their own, and this attention."""

        def part(value: Any, path: Path) -> Any:
            if isinstance(value, LayerMask):
                return replace(value, attend=attend)
            if type(value) is tuple:
                return tuple(part(each, (*path, i)) for i, each in enumerate(value))
            return memory.get(path, value)

        args, kwargs = enumerate(self._args), self._kwargs.items()
        return layer(hidden, *(part(x, (i,)) for i, x in args), **{name: part(x, (name,)) for name, x in kwargs})

    def _known(self, value: Any, path: Path, masks: list[LayerMask]) -> Hashable:
        if isinstance(value, LayerMask) and value.tap is None:
            masks.append(value)
            return path, value.window
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, self.count):
            self.tensors[path] = value
            return path, value.shape[2:], value.dtype
        if type(value) is tuple:
            return tuple(self._known(part, (*path, i), masks) for i, part in enumerate(value))
        if value is None or isinstance(value, bool | int | float | str):
            return path, value
        raise _UnknownArgumentError


def graphed_layers(layers: Sequence[nn.Module], recorder: CudaRecorder) -> list[GraphedLayer]:
    """Some layers of one model, to be called in their place."""
    shared = LayerGraphs(recorder)
    return [GraphedLayer(layer, shared) for layer in layers]


def padded(rows: int) -> int:
    """The number of rows that so many are padded to, 49 in all; by an eighth at most beyond 64."""
    step = 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length() >> 4)
    return -(-rows // step) * step
