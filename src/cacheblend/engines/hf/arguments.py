"""What an engine may be made of; each check says what to give instead."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, check_type, shown
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.prompt import Prompt


def check_model(model: object) -> None:
    """Raises `InvalidInputError` unless it is a model of transformers, or one that stands for it, as PEFT's."""
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        way_out = ", or a folder's path to BlendEngine.from_pretrained" if isinstance(model, str | Path) else ""
        raise InvalidInputError(f"model must be a model of transformers (PreTrainedModel){way_out}, got {shown(model)}")


def check_tokenizer(tokenizer: object) -> None:
    """Raises `InvalidInputError` unless it can be a tokenizer, or is None; whether it has a backend `PromptBuilder`
    checks."""
    if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):
        raise InvalidInputError(
            "tokenizer must be one of transformers, AutoTokenizer.from_pretrained(path), or None for prompts of "
            f"token ids, got {shown(tokenizer)}"
        )


def check_ids(bos_id: object, sentence_end_ids: object, vocabulary: int) -> None:
    """Raises `InvalidInputError` unless they are a token id and token ids of the vocabulary, or None."""
    if bos_id is not None and not _are_ids([bos_id], vocabulary):
        raise InvalidInputError(f"bos_id must be a token id in 0..{vocabulary - 1} or None, got {shown(bos_id)}")
    if sentence_end_ids is not None and not _are_ids(sentence_end_ids, vocabulary):
        raise InvalidInputError(
            f"sentence_end_ids must be token ids in 0..{vocabulary - 1} or None, got {shown(sentence_end_ids)}"
        )


def _are_ids(ids: object, vocabulary: int) -> bool:
    try:
        found = as_token_ids(ids)  # type: ignore[arg-type]  # what else it may be is refused
    except (TypeError, ValueError, OverflowError):
        return False
    return len(found) == 0 or int(found.max()) < vocabulary


def check_path(path: object) -> None:
    """Raises `InvalidInputError` unless it can be the path of a model's folder."""
    way_out = "; BlendEngine(model, tokenizer) takes a model that is open" if isinstance(path, PreTrainedModel) else ""
    check_type(path, str | Path, "path", "the path of a model's folder" + way_out)


def config_of(config: object) -> BlendConfig:
    """Settings as they are, of a mapping of some fields, or the defaults for None.

    Raises:
        InvalidInputError: it is none of these, or a field or its value is wrong.
    """
    return config if isinstance(config, BlendConfig) else BlendConfig.of({} if config is None else config)  # type: ignore[arg-type]


def check_progress(progress: Callable[..., Any] | None) -> None:
    """Raises `InvalidInputError` unless it can be called, or is None."""
    if progress is not None and not callable(progress):
        raise InvalidInputError(f"progress must be a function or None, got {shown(progress)}")


def check_opening(prompt: object, selector: object, modes: Sequence[str], mode: object) -> None:
    """Raises `InvalidInputError` unless a prefill can be opened with these arguments."""
    check_type(prompt, Prompt, "prompt", "a Prompt, engine.prompt(parts)")
    if selector is not None and not callable(getattr(selector, "select", None)):
        raise InvalidInputError(
            f"selector must be a selector object, BlendConfig(...).make_selector(), or None, got {shown(selector)}"
        )
    if mode not in modes:
        raise InvalidInputError(f"mode must be one of {', '.join(modes)}, got {shown(mode)}")
