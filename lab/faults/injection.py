"""Raises errors and delays at named places of the plug-in; as a worker extension, on chosen ranks.

A fault is a JSON object, so that it can be sent to worker processes:

    {"place": "layer", "after": 12, "error": "OutOfMemoryError", "ranks": [0]}      the 13th call on rank 0 raises
    {"place": "store read", "after": 0, "times": 4, "sleep_s": 1.0}                 four calls wait a second, then go on
"""

import builtins
import importlib
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

_VLLM = "cacheblend.engines.vllm"
_LOADER = "cacheblend.core.load.loader:LayerLoader"
_DISK = "cacheblend.store.disk.store:DiskStore"
PLACES = {
    "open": f"{_VLLM}.worker.prefill_factory:Opener.blend",
    "embed": f"{_VLLM}.worker.model:BlendModel.embed",
    "project": f"{_VLLM}.worker.layers:VllmLayerRunner.project",
    "layer": f"{_VLLM}.worker.layers:VllmLayerRunner.run",
    "mlp": "vllm.model_executor.models.llama:LlamaMLP.forward",
    "attention": f"{_VLLM}.internals.attention_shim:AttentionShim.opened",
    "attend": f"{_VLLM}.worker.paged_cache:PagedLayer.attend",
    "read paged": f"{_VLLM}.worker.paged_cache:PagedLayer.read",
    "write paged": f"{_VLLM}.worker.paged_cache:PagedLayer.write",
    "load": f"{_LOADER}.layer",
    "fill": f"{_LOADER}._fill",
    "read": f"{_LOADER}._read",
    "select": "cacheblend.core.select.selectors:Hkvd.select",
    "hand out": "cacheblend.core.fuse.prefill:BlendedPrefill._hand_out",
    "finish": f"{_VLLM}.worker.worker:Worker._finish",
    "combine": f"{_VLLM}.internals.tensor_parallel:TensorParallel.combine",
    "open capture": f"{_VLLM}.worker.prefill_factory:Opener.capture",
    "read copied": f"{_VLLM}.worker.prefill_factory:Opener.read_pages",
    "gather": f"{_VLLM}.worker.capture_writer:CaptureWriter.gather",
    "gather heads": f"{_VLLM}.internals.tensor_parallel:TensorParallel.gather_heads",
    "host copy": f"{_VLLM}.worker.capture_writer:CaptureWriter._on_host",
    "store read": f"{_DISK}.read_layers",
    "store find": f"{_DISK}.find",
    "store write": f"{_DISK}.write_all",
    "store list": f"{_DISK}.manifests",
}
"""What is wrapped, by the name that a fault gives it."""

IN_STORE = ("store read", "store find", "store write", "store list")
"""Places at which an error is the store's; at the others it is this package's or the device's own."""

OF_CAPTURES = ("open capture", "gather", "gather heads", "host copy", "store write")
"""Places that only a missed chunk or a history passes."""

OF_HISTORIES = ("read copied",)
"""Places that only an edited conversation's history passes."""

OF_RANKS = ("combine", "gather heads")
"""Places that are passed with several ranks only."""

AT_ENDS = (
    "open",
    "embed",
    "select",
    "finish",
    "combine",
    *OF_CAPTURES,
    *OF_HISTORIES,
    "store find",
    "store list",
    "read paged",
)
"""Places that a prompt or a chunk passes about once; the others are passed in each layer."""

PAUSE_S = 0.5
_THREADS = ("read", "host copy", *IN_STORE)
"""Places that threads pass; the others count inside of the worker's step only, since vLLM's own forward is no fault."""

_lock = threading.Lock()
_armed: list[dict[str, Any]] = []
_fired = 0
_released = threading.Event()
_wrapped: set[str] = set()
_inside = threading.local()


def arm(fault: dict[str, Any]) -> None:
    """Puts a fault in place in this process; `KeyError` for an unknown place."""
    target = PLACES[fault["place"]]
    with _lock:
        _released.clear()
        if not _wrapped:
            shorten_pauses()
            _wrap(f"{_VLLM}.worker.worker:Worker.step", _marked)
        if target not in _wrapped:
            _wrap(target, partial(_faulty, fault["place"]))
            _wrapped.add(target)
        _armed.append({"after": 0, "times": 1, **fault})


def disarm() -> int:
    """Removes all faults and ends their delays; returns how often one was met since the last call."""
    global _fired
    _released.set()
    with _lock:
        _armed.clear()
        fired, _fired = _fired, 0
    return fired


def shorten_pauses() -> None:
    """A store that has failed is left alone for a minute, in which a campaign would inject nothing: here for less."""
    for module in ("cacheblend.engines.keeper", f"{_VLLM}.scheduler.conversations"):
        importlib.import_module(module).PAUSE_S = PAUSE_S  # type: ignore[attr-defined]


class Faults:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    rank: int
    model_runner: Any

    def cacheblend_arm(self, fault: dict[str, Any]) -> None:
        """See `arm`; only on the ranks that the fault names, on all if it names none."""
        if self.rank in fault.get("ranks", [self.rank]):
            arm(fault)

    def cacheblend_disarm(self) -> int:
        return disarm()

    def cacheblend_scramble(self, seed: int) -> None:
        """Fills the whole KV cache with random numbers, so that a read of rows that were not computed is seen."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for cache in self.model_runner.kv_caches:
            cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype) * 3)


def _wrap(target: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, path = target.split(":")
    owner, name = path.split(".")
    holder = getattr(importlib.import_module(module), owner)
    setattr(holder, name, wrapper(getattr(holder, name)))


def _marked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The worker's step, which tells that this thread is in it."""

    @wraps(step)
    def call(*args: Any, **options: Any) -> Any:
        _inside.step = True
        try:
            return step(*args, **options)
        finally:
            _inside.step = False

    return call


def _faulty(place: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        met = _met(place)
        if met is not None:
            if met.get("until_disarmed"):
                _released.wait(met["sleep_s"])
            elif met.get("sleep_s"):
                time.sleep(met["sleep_s"])
            if met.get("error"):
                raise _error(met["error"], place)
        return real(*args, **options)

    return call


def _met(place: str) -> dict[str, Any] | None:
    """The fault that this call meets."""
    global _fired
    if place not in _THREADS and not getattr(_inside, "step", False):
        return None
    with _lock:
        for fault in _armed:
            if fault["place"] == place and fault["times"] > 0:
                if fault["after"] > 0:
                    fault["after"] -= 1
                    continue
                fault["times"] -= 1
                _fired += 1
                return fault
    return None


def _error(name: str, place: str) -> Exception:
    import torch

    from cacheblend.core import errors

    kinds = (vars(builtins), vars(torch), vars(errors))
    kind = next(found[name] for found in kinds if name in found)
    made: Exception = kind(f"injected at {place}")
    return made
