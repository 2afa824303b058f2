"""Faults inside vLLM's workers: `worker_extension_cls="injecting.Injecting"`, with this folder on PYTHONPATH.

`collective_rpc("arm_fault", args=(place, rank, kind, after))` has the call number `after` (from 0) of a place raise,
once; `disarm_fault` tells how often each rank raised, and how many calls of the place it saw.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.llama import LlamaMLP

from cacheblend.core.errors import BlockLostError
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.vllm.internals.attention_shim import AttentionShim
from cacheblend.engines.vllm.internals.interface import connector_of_worker
from cacheblend.engines.vllm.internals.tensor_parallel import TensorParallel
from cacheblend.engines.vllm.worker import paged_attention, shadow_prefills
from cacheblend.engines.vllm.worker.capture_writer import CaptureWriter
from cacheblend.engines.vllm.worker.layers import CheckRunner, VllmLayerRunner
from cacheblend.engines.vllm.worker.model import BlendModel
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer
from cacheblend.engines.vllm.worker.prefill_factory import Opener
from cacheblend.engines.vllm.worker.worker import Worker
from cacheblend.store.disk import DiskStore

PLACES: dict[str, tuple[Any, str]] = {
    "open": (Opener, "blend"),
    "embed": (BlendModel, "embed"),
    "readiness": (BlendedPrefill, "awaited"),
    "load": (LayerLoader, "layer"),
    "fill": (LayerLoader, "_fill"),
    "project": (VllmLayerRunner, "project"),
    "run": (VllmLayerRunner, "run"),
    "attention": (AttentionShim, "opened"),
    "mlp": (LlamaMLP, "forward"),
    "select": (Hkvd, "select"),
    "combine": (TensorParallel, "combine"),
    "write": (PagedLayer, "write"),
    "hand out": (BlendedPrefill, "_hand_out"),
    "finish": (Worker, "_finish"),
    "open capture": (Opener, "capture"),
    "gather": (CaptureWriter, "gather"),
    "gather heads": (TensorParallel, "gather_heads"),
    "host copy": (CaptureWriter, "_on_host"),
    "read answer": (Opener, "read_answer"),
    "open check": (Opener, "full"),
    "run check": (CheckRunner, "run"),
    "logits": (BlendModel, "logits"),
    "compare": (shadow_prefills, "compare"),
}
KINDS: dict[str, Callable[[str], Exception]] = {
    "error": RuntimeError,
    "memory": torch.OutOfMemoryError,
    "lost": lambda reason: BlockLostError([], reason),
}

_armed: dict[str, Any] = {}
_seen = {"calls": 0, "raised": 0}
_disk_reads = 0
_is_in_step = False
_delay_s = 0.0
_answers = threading.Event()
_answers.set()


def _hit(place: str) -> None:
    """A call of a place; what vLLM's own forward calls does not count."""
    if _armed.get("place") != place or not (_is_in_step or place == "host copy"):
        return
    number, _seen["calls"] = _seen["calls"], _seen["calls"] + 1
    if number == _armed["after"] and _armed["rank"] in ("all", get_tensor_model_parallel_rank()):
        _seen["raised"] += 1
        raise KINDS[_armed["kind"]](f"injected at {place}")


def _inject(place: str, owner: Any, name: str) -> None:
    real = getattr(owner, name)
    if isinstance(real, property):
        read: Any = real.fget

        def read_or_raise(self: Any) -> Any:
            _hit(place)
            return read(self)

        setattr(owner, name, property(read_or_raise))
        return

    def call_or_raise(*args: Any, **options: Any) -> Any:
        _hit(place)
        return real(*args, **options)

    setattr(owner, name, call_or_raise)


for _place, (_owner, _name) in PLACES.items():
    _inject(_place, _owner, _name)

_real_step, _real_read = Worker.step, DiskStore.read_layers


def _step(self: Any, jobs: Any) -> None:
    global _is_in_step
    _is_in_step = True
    try:
        _real_step(self, jobs)
    finally:
        _is_in_step = False


def _read_layers(self: Any, *args: Any, **options: Any) -> Any:
    global _disk_reads
    _disk_reads += len(args[0]) * len(args[1])
    time.sleep(_delay_s)
    _answers.wait()
    return _real_read(self, *args, **options)


Worker.step = _step  # type: ignore[method-assign]
DiskStore.read_layers = _read_layers  # type: ignore[method-assign]


class Injecting:
    """Methods for `collective_rpc`."""

    def arm_fault(self, place: str, rank: Any, kind: str, after: int) -> None:
        _armed.update(place=place, rank=rank, kind=kind, after=after)
        _seen.update(calls=0, raised=0)

    def disarm_fault(self) -> dict[str, int]:
        _armed.clear()
        return dict(_seen)

    def dump_cache(self, path: str, blocks: int) -> None:
        """Writes the first blocks of each layer's cache to a file."""
        layers: Any = connector_of_worker()._worker._model.attention
        torch.save([layer.kv_cache[:blocks].clone() for layer in layers], path)

    def disk_reads(self) -> int:
        """Records that were read from folders, since the start."""
        return _disk_reads

    def attend_by(self, what: str) -> None:
        """Rows are attended to by the backend's kernel wherever they can be, or by products wherever they can be; our
        Triton kernels serve, under the interpreter."""
        if what == "triton":
            from cacheblend.core.kernels import operations as known
            from paged_scenes import serve_triton

            every = known.ATTEND_ROWS, known.PLACE, known.ATTEND_FLOAT8, known.PLACE_FLOAT8, known.KV_DEVIATION
            serve_triton(setattr, *every)
        else:
            longest = {"kernel": 0.0, "products": math.inf}[what]
            paged_attention.longest_runs = lambda dtype: longest

    def hang_store(self, is_hanging: bool) -> None:
        """Reads of the store return no more, or return again."""
        _answers.clear() if is_hanging else _answers.set()

    def pause_after_slow_reads(self, seconds: float) -> None:
        """Sets for how long the scheduler side, which is in this process, blends nothing after a slow read."""
        from cacheblend.engines.vllm.scheduler import scheduler

        scheduler.PAUSE_S = seconds

    def read_timeout(self, seconds: float) -> None:
        """After so many seconds without a layer vLLM computes a prompt."""
        worker: Any = connector_of_worker()._worker
        worker._readiness._timeout_s = seconds

    def check_exact(self) -> None:
        """The scheduler side, which is in this process, has also those answers compared of which everything was
        recomputed."""
        from cacheblend.engines.shadow import ShadowWatch

        ShadowWatch.takes = lambda self, loaded, recomputed, **_: bool(loaded)  # type: ignore[method-assign]

    def slow_store(self, seconds: float, rank: int) -> None:
        """Each read of the store takes one rank so many seconds more."""
        global _delay_s
        if rank == get_tensor_model_parallel_rank():
            _delay_s = seconds
