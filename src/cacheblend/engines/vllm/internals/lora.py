"""Every use of vLLM's internals that concerns LoRA adapters. vLLM's LoRA layers read from a shared object, the punica
wrapper, which adapter each row of a call has. The model runner sets it for the batch of its step, which may go on after
ours: so our calls bring a wrapper of their own, and vLLM's is never written to. Weights lie in slots that all requests
share; an adapter comes into one when vLLM schedules a request of it, or here."""

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig

from cacheblend.engines.adapters import digest_of
from cacheblend.engines.vllm.internals.attention_shim import NO_ADAPTER


class LoadedAdapters:
    """The adapters that a model of this process holds, and the rows of our calls that have one of them."""

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        from vllm.lora.punica_wrapper import get_punica_wrapper

        self._model, self._config = model, config
        most = max(int(config.scheduler_config.max_num_batched_tokens), int(config.model_config.max_model_len))
        self._manager = manager = cast(Any, model.lora_manager)
        made = get_punica_wrapper(most, max_batches=most, device=manager.device, lora_config=manager.lora_config)
        self._wrapper: Any = made
        self._state: tuple[Any, ...] | None = None
        self._digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._loader: Any = None

    def modules_of(self, part: nn.Module) -> list[Any]:
        inside = {id(module) for module in part.modules()}
        return [module for module in self._manager.modules.values() if id(module) in inside]

    def modules_beside(self, parts: Sequence[nn.Module]) -> list[Any]:
        """The LoRA layers outside of these parts of the model: those of embeddings and logits."""
        inside = {id(module) for part in parts for module in part.modules()}
        return [module for module in self._manager.modules.values() if id(module) not in inside]

    @contextmanager
    def applied(self, adapter: int, rows: int, modules: Sequence[Any]) -> Iterator[None]:
        """Inside, these LoRA layers compute so many rows with one adapter; `NO_ADAPTER`: as the model without any.
        Raises RuntimeError: the adapter is in no slot."""
        from vllm.lora.layers import LoRAMapping

        manager, slots = self._manager, self._manager.lora_index_to_id
        if adapter != NO_ADAPTER and not self.is_active(adapter):
            raise RuntimeError(f"the LoRA adapter {adapter} is in no slot ({slots})")
        if (state := (adapter, rows, tuple(slots))) != self._state:
            self._state = None
            mapping = LoRAMapping((adapter,) * rows, (adapter,) * rows, is_prefill=True)
            self._wrapper.update_metadata(mapping, slots, manager.lora_slots + 1, manager.vocab_size)
            self._state = state
        before = [module.punica_wrapper for module in modules]
        try:
            for module in modules:
                module.set_mapping(self._wrapper)
            yield
        finally:
            for module, wrapper in zip(modules, before, strict=True):
                module.set_mapping(wrapper)

    def batch(self) -> set[int]:
        """The adapters of the rows that vLLM computes in its present step, or computed in its last one."""
        mapping = self._manager._last_mapping
        return set() if mapping is None else {int(one) for one in {*mapping.index_mapping, *mapping.prompt_mapping}}

    def is_active(self, adapter: int) -> bool:
        return adapter in self._manager.lora_index_to_id

    def is_loaded(self, adapter: int) -> bool:
        """vLLM holds its weights, in a slot or in the host's memory."""
        return adapter in self._manager.list_adapters()

    def has_place(self, adapter: int, kept: set[int]) -> bool:
        """Whether the adapter is in a slot, or can be brought into one; `kept`: adapters that stay where they are."""
        if self.is_active(adapter):
            return True
        manager, kept = self._manager, kept | self._pinned()
        may_enter = self.is_loaded(adapter) or len(manager) < manager.capacity or self._oldest(kept) is not None
        return may_enter and (None in manager.lora_index_to_id or self._oldest(kept, active=True) is not None)

    def load(self, request: Any, kept: set[int]) -> None:
        """Reads an adapter's files, as vLLM does, in place of one with its number; others go from memory for it. Raises
        Exception: whatever vLLM raises of an adapter that it cannot load."""
        manager, kept = self._manager, kept | self._pinned()
        found = self._open_loader()._load_adapter(request)
        manager.remove_adapter(request.lora_int_id)
        while len(manager) >= manager.capacity:
            oldest = self._oldest(kept)
            if oldest is None:
                raise RuntimeError(f"vLLM's {manager.capacity} LoRA adapters are all in use (--max-cpu-loras)")
            manager.remove_adapter(oldest)
        manager.add_adapter(found)

    def activate(self, adapter: int, kept: set[int]) -> None:
        """Brings a loaded adapter's weights into a slot, in place of the one that was used least recently."""
        manager = self._manager
        if self.is_active(adapter):
            return
        if None not in manager.lora_index_to_id:
            oldest = self._oldest(kept | self._pinned(), active=True)
            if oldest is None:
                raise RuntimeError(f"vLLM's {manager.lora_slots} LoRA slots are all in use (--max-loras)")
            manager.deactivate_adapter(oldest)
        manager.activate_adapter(adapter)

    def digest(self, adapter: int) -> str:
        """SHA-256 of the weights of a loaded adapter, as this process holds them; read once for each loading."""
        found = self._manager.list_adapters()[adapter]
        if found not in self._digests:
            hashed = hashlib.sha256()
            for kind in ("loras", "modules_to_save"):
                for name, weights in sorted((getattr(found, kind, None) or {}).items()):
                    for part, value in sorted(vars(weights).items()):
                        hashed.update(f"{kind} {name} {part} {_described(value)}\n".encode())
            self._digests[found] = hashed.hexdigest()
        return self._digests[found]

    def _oldest(self, kept: set[int], *, active: bool = False) -> int | None:
        known = self._manager.list_adapters()  # in the order of their use
        return next((one for one in known if one not in kept and (not active or self.is_active(one))), None)

    def _pinned(self) -> set[int]:
        caches = self._manager._registered_adapters, self._manager._active_adapters
        return {int(one) for cache in caches for one in getattr(cache, "pinned_items", ())}

    def _open_loader(self) -> Any:
        """vLLM's reader of adapters' files; the model runner's own one, which works alike, cannot be reached."""
        if self._loader is None:
            from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

            model: Any = self._model
            self._loader = LRUCacheWorkerLoRAManager(self._config, self._manager.device, model.embedding_modules)
            self._loader._adapter_manager = self._manager
        return self._loader


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest_of(value)}"
    if isinstance(value, list | tuple):
        return f"[{' '.join(map(_described, value))}]"
    return repr(value)
