"""The entry point `vllm.general_plugins`: runs in each of vLLM's processes before a model is built. It runs wherever
this package is installed beside vLLM, whether or not the connector is used, and on any version: so what a version lacks
is no error here."""

import logging

from cacheblend.engines.vllm import versions

logger = logging.getLogger("vllm.cacheblend")  # which vLLM shows


def register() -> None:
    """Begins to remember which module holds which, so that the loaded model is found, and gives the connector its name:
    a server of a `MultiConnector` looks it up to read statistics, and ends where there is none. Idempotent."""
    try:
        with versions.explained_imports():
            from cacheblend.engines.vllm.internals.interface import register_connector
            from cacheblend.engines.vllm.internals.weight_loader import watch_loading
    except Exception as error:
        logger.warning("CacheBlendConnector cannot be used here: %s", error)
        return
    watch_loading()
    register_connector("CacheBlendConnector", "cacheblend.engines.vllm")
