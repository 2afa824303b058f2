"""Which model vLLM runs, so that its blocks get the names that the embedded engine gives them."""

from typing import Any

from cacheblend.engines.fingerprint import fingerprint_folder, loaded_with
from cacheblend.engines.folders import name_of
from cacheblend.engines.identity import ModelIdentity
from cacheblend.engines.tokens import PromptBuilder
from cacheblend.engines.vllm.internals.kv_cache import float32_precision, is_fp8
from cacheblend.engines.vllm.internals.weight_loader import files_of

# Formats of which vLLM takes every weight from the model's folder.
_PLAIN_READERS = ("auto", "bitsandbytes", "gguf", "hf", "mistral", "npcache", "pt", "safetensors", "sharded_state")
_FAST_READERS = ("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded")
OF_FOLDER = frozenset([*_PLAIN_READERS, *_FAST_READERS])


def identify(config: Any, tokenizer: Any) -> ModelIdentity:
    """The identity of the model in vLLM's configuration. Raises InvalidInputError: its files cannot be found."""
    model, load = config.model_config, config.load_config
    folder = files_of(config)
    stored = getattr(model.hf_config, "quantization_config", None)
    options = {
        "hf_overrides": model.hf_overrides or None,
        # transformers orders the rotated numbers of DeepSeek-V3 otherwise than vLLM
        "latents": "vllm" if model.use_mla else None,
        "quantization": None if stored else model.quantization,  # the folder's own is part of its config.json
        "float32": float32_precision(model.dtype),
    }
    if load.load_format not in OF_FOLDER:  # random weights, a plug-in's
        options["weights"] = (str(load.load_format), repr(load.model_loader_extra_config))
    weights = fingerprint_folder(folder)
    return ModelIdentity(
        folder=folder,
        fingerprint=loaded_with(weights, {name: value for name, value in options.items() if value}),
        dtype=str(model.dtype).removeprefix("torch."),
        bos_id=None if tokenizer is None else PromptBuilder(tokenizer).bos_id,
        name=name_of(folder),
        has_exact_hits=not is_fp8(config.cache_config, model.hf_config),
        weights=weights,
    )


def open_tokenizer(config: Any) -> Any:
    """transformers' tokenizer of the model in vLLM's configuration; None if vLLM skips it or it cannot be opened."""
    from transformers import AutoTokenizer

    model = config.model_config
    if model.skip_tokenizer_init:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.tokenizer)
    except Exception:
        return None
