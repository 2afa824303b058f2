"""What tests do inside vLLM's workers: `worker_extension_cls="injecting.Injecting"`, with this folder on PYTHONPATH.

`collective_rpc("arm_fault", args=(place, rank, kind, after))` has the call number `after` (from 0) of a place raise,
once; `disarm_fault` tells how often each rank raised. Besides, a CPU stands in for the ranks' GPU as a store's tier:
what vLLM's model takes for it while it loads is left out.
"""

import math
import threading
import time
from functools import partial
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from cacheblend.core import errors
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.engines.vllm import stores
from cacheblend.engines.vllm.internals.interface import connector_of_worker
from cacheblend.engines.vllm.worker import paged_kv, shadow_prefills
from cacheblend.store import MemoryStore
from cacheblend.store.disk import DiskStore
from cacheblend.store.open import DevicePlace
from cacheblend.store.residence import OnDevice
from lab.faults import injection

KINDS = {"error": "RuntimeError", "memory": "OutOfMemoryError", "lost": "Lost"}
errors.Lost = partial(errors.BlockLostError, [])  # type: ignore[attr-defined]


class Unwrapped:
    """Places that are no methods."""

    awaited = staticmethod(BlendedPrefill.awaited.fget)  # type: ignore[attr-defined]
    compare = staticmethod(shadow_prefills.compare)


BlendedPrefill.awaited = property(lambda prefill: Unwrapped.awaited(prefill))  # type: ignore[method-assign,assignment]
shadow_prefills.compare = lambda *given: Unwrapped.compare(*given)

_VLLM = "cacheblend.engines.vllm"
injection.PLACES |= {
    "readiness": "injecting:Unwrapped.awaited",
    "run": injection.PLACES["layer"],
    "write": injection.PLACES["write paged"],
    "read answer": f"{_VLLM}.worker.prefill_factory:Opener.read_answer",
    "open check": f"{_VLLM}.worker.prefill_factory:Opener.full",
    "run check": f"{_VLLM}.worker.layers:CheckRunner.run",
    "logits": f"{_VLLM}.worker.model:BlendModel.logits",
    "compare": "injecting:Unwrapped.compare",
}

_disk_reads = 0
_delay_s = 0.0
_answers = threading.Event()
_answers.set()
_real_read = DiskStore.read_layers


def _read_layers(self: Any, *args: Any, **options: Any) -> Any:
    global _disk_reads
    _disk_reads += len(args[0]) * len(args[1])
    time.sleep(_delay_s)
    _answers.wait()
    return _real_read(self, *args, **options)


DiskStore.read_layers = _read_layers  # type: ignore[method-assign]
DevicePlace.open = lambda place, read_only=False: MemoryStore(  # type: ignore[method-assign]
    place.max_bytes, residence=OnDevice(torch.device("cpu"))
)
stores.check_device = lambda url, device: None


class Injecting:
    """Methods for `collective_rpc`."""

    def arm_fault(self, place: str, rank: Any, kind: str, after: int) -> None:
        if rank in ("all", get_tensor_model_parallel_rank()):
            injection.arm({"place": place, "error": KINDS[kind], "after": after})

    def disarm_fault(self) -> dict[str, int]:
        return {"raised": injection.disarm()}

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
            from paged_scenes import serve_triton

            serve_triton(setattr)
        else:
            longest = {"kernel": 0.0, "products": math.inf}[what]
            paged_kv.longest_runs = lambda dtype: longest

    def hang_store(self, is_hanging: bool) -> None:
        """Reads of the store return no more, or return again."""
        _answers.clear() if is_hanging else _answers.set()

    def slow_store(self, seconds: float, rank: int) -> None:
        """Each read of the store takes one rank so many seconds more."""
        global _delay_s
        if rank == get_tensor_model_parallel_rank():
            _delay_s = seconds

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

    def device_tier(self) -> dict[str, Any]:
        """The names of this rank's tiers, and the bytes in the first."""
        store = connector_of_worker()._store
        return {"tiers": store.tier_names, "bytes": store.front.stats().bytes}
