"""Blending inside unmodified vLLM, as a KV connector. Importing this imports no vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CacheBlendConnector",
  "kv_connector_module_path": "cacheblend.engines.vllm", "kv_role": "kv_both",
  "kv_connector_extra_config": {"store": "file:///var/cache/cacheblend"}}'

scheduler process: connector -> scheduling (chunks, plans, claims)     | jobs: what goes across
worker processes:  connector -> worker (load, fuse, write, capture)    | model, runner, paged: vLLM's layers and cache
compat: every name of vLLM's that is not its public interface
"""

from typing import Any

__all__ = ["CacheBlendConnector"]


def __getattr__(name: str) -> Any:
    if name == "CacheBlendConnector":  # what vLLM asks this module for
        from cacheblend.engines.vllm.connector import CacheBlendConnector

        return CacheBlendConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
