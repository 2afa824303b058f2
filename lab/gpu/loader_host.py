"""Host time of the loader's thread a layer, without a device: ``python -m lab.gpu.loader_host [seconds]`` prints JSON.

That thread holds the interpreter, which the one that computes needs for each kernel it starts. Triton compiles the
kernel that places records for sm_90 and starts nothing; tensors on `meta` stand in for a device's, no copy is made, and
waiting for streams and the memory of tables costs nothing here. Blocks of 256 tokens lie in memory as a disk's do, of
few and small heads; eight layers are read together, as from page-locked memory.
"""

import json
import statistics
import sys
import time
import types
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cacheblend.core.kernels import kv_placement, kv_placement_triton, operations
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.load import staging_buffers
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import BlockName, TokenIds, root_name
from cacheblend.core.plan.blocks import BlockEntry, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text

_LAYERS, _HEADS, _DIM, _TOGETHER, _CHUNK = 32, 2, 16, 8, 2048
_LAYOUT = KVLayout((LayerShape(_HEADS, _DIM),) * _LAYERS, torch.bfloat16)
_META, _CUDA = torch.device("meta"), torch.device("cuda", 0)


class Blocks(EmptySource):
    """A source whose blocks have one memory each."""

    def __init__(self, ids: dict[BlockName, TokenIds]) -> None:
        self._ids, self._records = ids, dict[BlockName, Sequence[torch.Tensor]]()
        for name, own in ids.items():
            records = torch.empty(_LAYERS, _HEADS, 2, len(own), _DIM, dtype=torch.bfloat16)
            self._records[name] = records.unbind()

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [BlockEntry(self._ids[name], _LAYOUT, "memory") if name in self._ids else None for name in names]

    def read_layers(self, names: Sequence[BlockName], layers: Any = range(0), *_: object) -> Any:
        return [list(self._records[name][layers.start : layers.stop]) for name in names]


class _Driver:
    """Triton's driver of a device that starts nothing."""

    def __init__(self) -> None:
        self.utils = types.SimpleNamespace(
            load_binary=lambda *_: (1, 2, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 227 << 10}
        )

    def launcher_cls(self, *_: object) -> Any:
        return lambda *_: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def pretend() -> None:
    """From now on this process has such a device."""
    driver.set_active(_Driver())
    own: Any = types.ModuleType("torch")
    own.__dict__.update(torch.__dict__)
    own.empty = lambda *size, device=None, **options: torch.empty(*size, device=_META if device else None, **options)
    own._foreach_copy_ = lambda *_, **__: None
    modules: Iterable[Any] = (staging_buffers, kv_placement, kv_placement_triton)
    for module in modules:
        module.upload = lambda data, device: (torch.from_numpy(data) if isinstance(data, np.ndarray) else data).to(
            _META
        )
    event = types.SimpleNamespace(query=lambda: True)
    replaced: list[tuple[Any, str, Any]] = [
        (staging_buffers, "torch", own),
        (torch.Tensor, "is_pinned", lambda _: True),
        (staging_buffers.Staging, "stream", lambda _: nullcontext()),
        (staging_buffers.Staging, "now", lambda _: event),
        (staging_buffers.Staging, "wait", lambda *_: None),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    kernel = operations.Served(kv_placement_triton.place, operations.KERNEL)
    operations.PLACE._served[_META, torch.bfloat16] = kernel


def host_time(tokens: int, seconds: float) -> dict[str, float]:
    """Thread time of a layer in microseconds: the least and the median of what fits in so many seconds."""
    planner = Planner(root_name("loader's host time", "bfloat16"))
    chunks = [chunk(range(start, start + _CHUNK)) for start in range(0, tokens, _CHUNK)]
    prompt = Prompt.of([text(range(40)), *chunks, text(range(40))])
    spans = planner.plan(prompt, EmptySource()).spans
    stored = {s.name: prompt.token_ids[s.start : s.stop] for s in spans if prompt.segments[s.segment].is_chunk}
    source = Blocks(stored)
    plan = planner.plan(prompt, source)
    rotation = KeyRotation(torch.arange(1, _DIM // 2 + 1).float(), "half")
    loader = LayerLoader(plan, source, _LAYOUT, [rotation] * _LAYERS, device=_CUDA, overlap=True)
    place = torch.zeros((2, _HEADS, len(plan), _DIM), dtype=torch.bfloat16, device=_META)
    buffers, took, end = [LayerKV(*place.unbind())] * _TOGETHER, list[float](), time.monotonic() + seconds
    layers = range(_TOGETHER, 2 * _TOGETHER)
    loader._load_overlapped(layers, buffers, None, False)  # compiles
    while time.monotonic() < end or not took:
        started = time.thread_time_ns()
        loader._load_overlapped(layers, buffers, None, False)
        took.append((time.thread_time_ns() - started) / 1e3 / _TOGETHER)
    blocks = sum(span.source is Source.LOADED for span in plan.spans)
    return {"blocks": blocks, "least_us": min(took), "median_us": statistics.median(took), "runs": len(took)}


if __name__ == "__main__":
    pretend()
    spent = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    print(json.dumps({str(tokens): host_time(tokens, spent) for tokens in (4096, 16384, 32768)}, indent=1))
