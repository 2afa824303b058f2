"""The LoRA adapters of a worker's jobs: brought into vLLM's slots without harm to its batch, known by their weights.

    look   (a request came)     loaded, if vLLM has not yet ─> digest of the weights ─> the scheduler names chunks by it
    admits (each step)          in a slot, or one can be had: computed;  else passed over, and given up after a while
    use    (before it computes) in a slot, and its weights are those that the chunks were named by; else the job fails

vLLM replaces weights under the same number (`load_inplace`), and lets adapters go when it needs their place: so every
use asks again. All ranks decide alike.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from cacheblend.core.errors import CacheBlendError
from cacheblend.engines.vllm.internals.attention_shim import NO_ADAPTER
from cacheblend.engines.vllm.internals.lora import LoadedAdapters
from cacheblend.engines.vllm.jobs import Adapter, AdapterSeen
from cacheblend.engines.vllm.reasons import ADAPTER_CHANGED
from cacheblend.engines.vllm.worker.ranks import Ranks
from cacheblend.engines.vllm.worker.tasks import READY, WAITING

logger = logging.getLogger("cacheblend.vllm")


class AdapterChangedError(CacheBlendError):
    """vLLM holds other weights under an adapter's number than those that a job is for."""

    reason = ADAPTER_CHANGED

    def __init__(self, name: str) -> None:
        super().__init__(f"vLLM has replaced the weights of the LoRA adapter {name!r} meanwhile")


class WorkerAdapters:
    """The adapters of one rank; after `timeout_s` without a slot a job is given up."""

    def __init__(self, loaded: LoadedAdapters | None, ranks: Ranks, timeout_s: float) -> None:
        self._loaded, self._ranks, self._timeout_s = loaded, ranks, timeout_s
        self._wanted: list[Any] = []
        self._seen: dict[int, AdapterSeen] = {}
        self._kept: set[int] = set()
        self._since: dict[int, float] = {}

    def begin_step(self, requests: Sequence[Any], *, is_idle: bool) -> None:
        if self._loaded is None:
            return
        self._kept = set() if is_idle else self._loaded.batch() - {NO_ADAPTER}
        self._wanted += [one for one in requests if one.lora_int_id not in {each.lora_int_id for each in self._wanted}]
        self._wanted = [request for request in self._wanted if not self._look(request)]

    @property
    def is_asked(self) -> bool:
        """An adapter is to be looked at, or a job has waited for a slot."""
        return bool(self._wanted or self._since)

    def take_seen(self) -> dict[int, AdapterSeen]:
        seen, self._seen = self._seen, {}
        return seen

    def admits(self, adapters: Sequence[Adapter | None]) -> list[bool]:
        """Whether each of these is in a slot or can be brought into one in this step; None: no adapter, always."""
        named = {one.number for one in adapters if one is not None}
        if self._loaded is None or not named:
            return [one is None for one in adapters]
        asked = sorted(named)
        states = self._ranks.agree_each(
            [READY if self._loaded.has_place(one, self._kept) else WAITING for one in asked]
        )
        found = {one: state == READY for one, state in zip(asked, states, strict=True)}
        return [one is None or found[one.number] for one in adapters]

    def overdue(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """Which of these have been waited for too long, by index; asked once in each step, for all jobs."""
        now, admitted = time.monotonic(), self.admits(adapters)
        waiting = {one.number for one, is_in in zip(adapters, admitted, strict=True) if one is not None and not is_in}
        self._since = {number: self._since.get(number, now) for number in waiting}
        if not waiting:
            return []
        late = [one is not None and now - self._since.get(one.number, now) > self._timeout_s for one in adapters]
        return [index for index, is_late in enumerate(self._ranks.agree_each(late)) if is_late]

    def use(self, adapter: Adapter | None) -> None:
        """Brings an adapter into a slot, where it stays for what is computed next. Raises AdapterChangedError: vLLM
        holds other weights under its number; or whatever vLLM raises of an adapter that it cannot load."""
        if adapter is None:
            return
        if self._loaded is None:
            raise AdapterChangedError(adapter.request.lora_name)
        if not self._loaded.is_loaded(adapter.number):
            self._loaded.load(adapter.request, self._kept)
        digest = self._loaded.digest(adapter.number)
        if digest != adapter.digest:
            self._seen[adapter.number] = AdapterSeen(digest)
            raise AdapterChangedError(adapter.request.lora_name)
        self._loaded.activate(adapter.number, self._kept)

    def _look(self, request: Any) -> bool:
        """Notes the digest of an adapter's weights; False: there is no place for it yet."""
        loaded, number, error = self._loaded, int(request.lora_int_id), ""
        assert loaded is not None
        # vLLM reads such a request's files again in each step that has it in the batch: also in the first one.
        is_read = not loaded.is_loaded(number) or (request.load_inplace and number not in self._kept)
        can = loaded.has_place(number, self._kept) or not is_read
        if self._ranks.agree_each([READY if can else WAITING]) != [READY]:
            return False
        digest = ""
        try:
            if is_read:
                loaded.load(request, self._kept)
            digest = loaded.digest(number)
        except Exception as problem:
            logger.warning("the LoRA adapter %r cannot be loaded: %s", request.lora_name, problem)
            error = f"{type(problem).__name__}: {problem}"
        mark = int(digest[:15] or "0", 16)
        highest, lowest = self._ranks.agree_each([mark, -mark])
        if highest != -lowest and not error:
            error = "tensor-parallel ranks hold different weights"
        self._seen[number] = AdapterSeen("" if error else digest, error)
        return True
