"""A CPU stands in for the ranks' GPU as a store's tier: `worker_extension_cls="standing_in.OnCpu"`.

What vLLM's model takes for it while it loads is left out: there is none on a CPU. Workers import this before they open
a store.
"""

from typing import Any

import torch
from injecting import Injecting

from cacheblend.engines.vllm import stores
from cacheblend.engines.vllm.internals.interface import connector_of_worker
from cacheblend.store import MemoryStore
from cacheblend.store.open import DevicePlace
from cacheblend.store.residence import OnDevice


def _open(place: DevicePlace, read_only: bool = False) -> MemoryStore:
    return MemoryStore(place.max_bytes, residence=OnDevice(torch.device("cpu")))


DevicePlace.open = _open  # type: ignore[method-assign]
stores.check_device = lambda url, device: None


class OnCpu(Injecting):
    """What the tests ask each worker, beside faults."""

    def device_tier(self) -> dict[str, Any]:
        """The names of this rank's tiers, and the bytes in the first."""
        store = connector_of_worker()._store
        return {"tiers": store.tier_names, "bytes": store.front.stats().bytes}
