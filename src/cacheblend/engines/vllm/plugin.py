"""The entry point `vllm.general_plugins`: runs in each of vLLM's processes before a model is built.

It runs wherever this package is installed beside vLLM, whether or not the connector is used, and on any version: so
what a version lacks is no error here.
"""

import logging

from cacheblend.engines.vllm import versions

logger = logging.getLogger("vllm.cacheblend")  # which vLLM shows


def register() -> None:
    """Registers classes that are vLLM's own and also remember the loaded model. Idempotent."""
    from vllm import ModelRegistry

    try:
        with versions.explained_imports():
            from cacheblend.engines.vllm.compat_model import known_architectures

            known = known_architectures()
    except Exception as error:
        logger.warning("CacheBlendConnector cannot be used here: %s", error)
        return
    for architecture in known:
        ModelRegistry.register_model(architecture, f"cacheblend.engines.vllm.models:{architecture}")
