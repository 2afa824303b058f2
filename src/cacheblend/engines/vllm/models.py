"""The model classes registered with vLLM, created on first access: `models:LlamaForCausalLM`."""

from functools import cache
from typing import Any


@cache
def __getattr__(name: str) -> Any:
    from cacheblend.engines.vllm.architectures import ARCHITECTURES
    from cacheblend.engines.vllm.compat_model import recording

    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return recording(name)
