"""The LoRA adapters of requests, known by what the workers hold: their weights' digest is part of the names of chunks.

    first request of an adapter ─> take: the workers load it and look ─> seen: its digest ─> look-up of its chunks

What a file has today says nothing of the weights that a worker loaded yesterday, and vLLM replaces weights under the
same name and number. Where that shows only while a job is computed, the job fails, and its report corrects the digest.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cacheblend.core.errors import CacheBlendError
from cacheblend.engines.vllm.jobs import Adapter, AdapterSeen
from cacheblend.engines.vllm.reasons import ADAPTER_SLOW, ADAPTER_UNUSABLE


class AdapterUnusableError(CacheBlendError):
    """The workers cannot use an adapter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class _KnownAdapter:
    request: Any
    adapter: Adapter | None = None
    error: str = ""
    generation: int = 0
    last: str = ""


class RequestAdapters:
    """The adapters of one engine's requests."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[int, _KnownAdapter] = {}
        self._wanted: dict[int, Any] = {}
        self._came: dict[str, float] = {}

    def of(self, request: Any) -> Adapter | None:
        """The adapter of a request that has one; None: the workers have not said yet. Raises AdapterUnusableError: they
        cannot load it, or have not in time."""
        lora, number = request.lora_request, int(request.lora_request.lora_int_id)
        known = self._known.setdefault(number, _KnownAdapter(lora))
        if request.request_id not in self._came:
            self._came[request.request_id] = time.monotonic()
            is_same = (known.request.lora_name, known.request.lora_path) == (lora.lora_name, lora.lora_path)
            if not is_same or known.adapter is None or lora.load_inplace:  # the workers may say something new
                known.request, known.adapter, known.error = lora, None, ""
                self._wanted[number] = lora
        if known.error:
            raise AdapterUnusableError(ADAPTER_UNUSABLE, known.error)
        if known.adapter is None and time.monotonic() - self._came[request.request_id] > self._timeout_s:
            raise AdapterUnusableError(ADAPTER_SLOW, f"the workers have not loaded it in {self._timeout_s} s")
        return known.adapter and replace(known.adapter, request=lora)

    def forget(self, request: Any) -> None:
        self._came.pop(request.request_id, None)

    def take(self) -> list[Any]:
        wanted, self._wanted = self._wanted, {}
        return list(wanted.values())

    def seen(self, found: Mapping[int, AdapterSeen]) -> None:
        """The workers have looked at adapters; `found`: what they say, by number."""
        for number, each in found.items():
            known = self._known.get(number)
            if known is None:
                continue
            known.error, known.adapter = each.error, None
            if not each.error:
                known.generation += known.last not in ("", each.digest)
                known.last = each.digest
                known.adapter = Adapter(number, each.digest, known.request, known.generation)


def named(adapter: Adapter | None) -> str:
    """What an adapter adds to the root of chunks: its name and its weights; empty: none."""
    return "" if adapter is None else f"lora {adapter.request.lora_name!r} {adapter.digest}"
