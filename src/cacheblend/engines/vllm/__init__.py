"""Blending inside unmodified vLLM, as a KV connector. Importing this package does not import vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CacheBlendConnector",
  "kv_connector_module_path": "cacheblend.engines.vllm", "kv_role": "kv_both",
  "kv_connector_extra_config": {"store": "file:///var/cache/cacheblend"}}'

scheduler process: connector -> scheduler (chunks, plans, claims), capture_queue (missed chunks)
worker processes:  connector -> worker (load, fuse, write, capture), capture_writer (stores captured chunks)
                   model, layers: vLLM's own decoder layers; paged_cache, paged_kv: its KV cache
jobs: messages between the two; internals: every use of vLLM's internals
"""

from typing import Any

__all__ = ["CacheBlendConnector"]


def __getattr__(name: str) -> Any:
    if name == "CacheBlendConnector":  # vLLM looks the connector up here
        from cacheblend.engines.vllm.versions import explained_imports

        with explained_imports():
            from cacheblend.engines.vllm.connector import CacheBlendConnector

        return CacheBlendConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
