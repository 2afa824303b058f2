"""Which model vLLM runs, so that its blocks have the names that the embedded engine gives them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.fingerprint import fingerprint_folder
from cacheblend.engines.sentences import find_sentence_end_ids
from cacheblend.engines.tokens import PromptBuilder


@dataclass(frozen=True)
class Identity:
    """A model, as far as names and selectors need it.

    Attributes:
        folder: its files.
        fingerprint: of them, and of options that change what they mean.
        dtype: of its KV cache.
        bos_id: what its tokenizer puts in front of a prompt; None: nothing.
        name: for people.
        tokenizer: transformers'; None where there is none.
    """

    folder: Path
    fingerprint: str
    dtype: str
    bos_id: int | None
    name: str
    tokenizer: Any

    def sentence_end_ids(self) -> npt.NDArray[np.int64] | None:
        """See `find_sentence_end_ids`; None without a tokenizer."""
        return None if self.tokenizer is None else find_sentence_end_ids(self.tokenizer)


def identify(config: Any) -> Identity:
    """Of vLLM's configuration.

    Raises:
        InvalidInputError: the model's files cannot be found.
    """
    model = config.model_config
    folder = _folder(model.model, model.revision)
    fingerprint = fingerprint_folder(folder)
    stored = getattr(model.hf_config, "quantization_config", None)
    changing = {
        "hf_overrides": model.hf_overrides or None,
        "quantization": None if stored else model.quantization,
    }
    changing = {name: value for name, value in changing.items() if value}
    if changing:  # other KV, so another name
        options = repr(sorted((name, repr(value)) for name, value in changing.items()))
        fingerprint = hashlib.sha256(f"{fingerprint}\n{options}".encode()).hexdigest()
    tokenizer = None if model.skip_tokenizer_init else _tokenizer(model)
    return Identity(
        folder=folder,
        fingerprint=fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        bos_id=None if tokenizer is None else PromptBuilder(tokenizer).bos_id,
        name=folder.resolve().name,
        tokenizer=tokenizer,
    )


def _folder(model: str, revision: str | None) -> Path:
    """The model's folder: as named, or where the hub's files were put when vLLM fetched them."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise InvalidInputError(f"the files of {model} are not on this machine ({error})") from error


def _tokenizer(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.tokenizer)
    except Exception:
        return None
