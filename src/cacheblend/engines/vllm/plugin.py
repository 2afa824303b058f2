"""The entry point `vllm.general_plugins`: runs in each of vLLM's processes before a model is built."""


def register() -> None:
    """Puts this package's recording classes in the place of vLLM's own; they differ in nothing else. Idempotent."""
    from vllm import ModelRegistry

    from cacheblend.engines.vllm.compat import ARCHITECTURES

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"cacheblend.engines.vllm.models:{architecture}")
