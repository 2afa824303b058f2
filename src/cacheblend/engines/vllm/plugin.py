"""The entry point `vllm.general_plugins`: runs in each of vLLM's processes before a model is built."""


def register() -> None:
    """Registers classes that are vLLM's own and also remember the loaded model. Idempotent."""
    from vllm import ModelRegistry

    from cacheblend.engines.vllm.compat import ARCHITECTURES

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"cacheblend.engines.vllm.models:{architecture}")
