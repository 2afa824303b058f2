"""Which model vLLM runs, so that its blocks get the names that the embedded engine gives them."""

from pathlib import Path
from typing import Any

from cacheblend.engines.fingerprint import fingerprint_folder
from cacheblend.engines.folders import cached_snapshot, name_of
from cacheblend.engines.identity import ModelIdentity
from cacheblend.engines.tokens import PromptBuilder
from cacheblend.engines.vllm.compat_cache import is_fp8


def identify(config: Any, tokenizer: Any) -> ModelIdentity:
    """The identity of the model in vLLM's configuration.

    Args:
        config: vLLM's.
        tokenizer: see `open_tokenizer`.

    Raises:
        InvalidInputError: the model's files cannot be found.
    """
    model = config.model_config
    folder = _folder(model.model, model.revision, config.load_config.download_dir)
    stored = getattr(model.hf_config, "quantization_config", None)
    options = {
        "hf_overrides": model.hf_overrides or None,
        # transformers orders the rotated numbers of DeepSeek-V3 otherwise than vLLM
        "latents": "vllm" if model.use_mla else None,
        "quantization": None if stored else model.quantization,  # the folder's own is part of its config.json
    }
    return ModelIdentity(
        folder=folder,
        fingerprint=fingerprint_folder(folder, {name: value for name, value in options.items() if value}),
        dtype=str(model.dtype).removeprefix("torch."),
        bos_id=None if tokenizer is None else PromptBuilder(tokenizer).bos_id,
        name=name_of(folder),
        has_exact_hits=not is_fp8(config.cache_config, model.hf_config),
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


def _folder(model: str, revision: str | None, cache_dir: str | None) -> Path:
    """The model's folder: as named, or where vLLM put the files that it fetched from the hub."""
    folder = Path(model)
    return folder if folder.is_dir() else cached_snapshot(model, revision, cache_dir)
