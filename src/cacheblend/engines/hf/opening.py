"""Opens a model folder: weights, tokenizer, fingerprint. A model that cannot be blended is refused before its weights
are read, where its config shows that."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.engines.fingerprint import fingerprint_folder
from cacheblend.engines.hf.configs import check_config

REASON_LINES, REASON_CHARACTERS = 3, 400
"""Most of a library's error message that `loading_reason` gives."""


@dataclass(frozen=True)
class OpenedModel:
    """A loaded model.

    Attributes:
        model: on its device.
        tokenizer: None if it was not requested.
        fingerprint: of the files, and of load options that change K and V.
        name: the folder's.
    """

    model: PreTrainedModel
    tokenizer: Any
    fingerprint: str
    name: str


def open_folder(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    with_tokenizer: bool = True,
    **model_options: Any,
) -> OpenedModel:
    """See `BlendEngine.from_pretrained`."""
    folder, where = Path(path), _checked_device(device)
    _check_dtype(dtype)
    # Options may override the config (RoPE, window) or quantise, which changes K and V.
    changing = {name: value for name, value in model_options.items() if name != "attn_implementation"}
    fingerprint = fingerprint_folder(folder, changing)
    config = AutoConfig.from_pretrained(folder, **model_options)
    opens = class_of(config)
    tokenizer = _tokenizer(folder) if with_tokenizer else None
    model = _read_weights(opens, folder, dtype, model_options).eval()
    model.to(where)
    return OpenedModel(model, tokenizer, fingerprint, folder.resolve().name)


def class_of(config: PretrainedConfig) -> Any:
    """The class of transformers that opens a model: of language models, or of those that read images beside text.

    The latter are opened as a whole, and blended for prompts of text. The language model alone would have to be cut out
    of the weights by names that differ from model to model.

    Raises:
        ModelNotBlendableError: neither opens it, or its config shows that it cannot be blended (`check_config`).
    """
    check_config(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or ()
    ):
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ModelNotBlendableError(
        f"{config.model_type} is no language model to transformers; only decoders that answer with text are blended, "
        "also those that read images beside it"
    )


def _read_weights(opens: Any, folder: Path, dtype: str | torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
    try:
        model: PreTrainedModel = opens.from_pretrained(folder, dtype=dtype, **options)
        return model
    except TypeError as error:  # transformers passes options that it does not know to the model's class
        raise InvalidInputError(f"{folder} cannot be opened with the options {', '.join(options)}: {error}") from error


def _check_dtype(dtype: str | torch.dtype) -> None:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    known = dtype == "auto" or isinstance(named, torch.dtype)
    if not known:
        raise InvalidInputError(f"no dtype is called {dtype!r}; use auto, float32, bfloat16 or float16")


def _checked_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise InvalidInputError(f"the device {device!r} cannot be used: {reason}") from error


def _tokenizer(folder: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if not tokenizer.encode("a", add_special_tokens=False):  # transformers makes an empty one of config.json alone
            raise ValueError("its vocabulary is empty")
        return tokenizer
    except Exception as error:
        refused = InvalidInputError(
            f"{folder} has no tokenizer that transformers can open: {loading_reason(error)}; add or repair its files"
        )
        # A note, which a traceback shows: on the command line there is no such argument.
        refused.add_note("To pass prompts as token ids, open the model with with_tokenizer=False.")
        raise refused from error


def loading_reason(error: Exception) -> str:
    """Why transformers could not load a file, in one line.

    Its first line alone often says only that there is a problem; the following ones say which.
    """
    text = str(error)
    if "above report" in text:  # the report goes to a log, which may be turned off
        return "the weights do not fit config.json: tensors have other shapes than it describes"
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    reason = " ".join(lines[:REASON_LINES]) or type(error).__name__
    return reason if len(reason) <= REASON_CHARACTERS else f"{reason[:REASON_CHARACTERS]}..."
