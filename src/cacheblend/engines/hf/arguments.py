"""What an engine may be made of; each check says what to give instead."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, check_type, shown
from cacheblend.core.plan.prompt import Prompt


def check_model(model: object) -> None:
    """Raises `InvalidInputError` unless it is a model of transformers."""
    way_out = "; to open a folder use BlendEngine.from_pretrained(path)" if isinstance(model, str | Path) else ""
    check_type(model, PreTrainedModel, "model", "a model of transformers (PreTrainedModel)" + way_out)


def check_tokenizer(tokenizer: object) -> None:
    """Raises `InvalidInputError` unless it can be a tokenizer, or is None; whether it has a backend `PromptBuilder`
    checks."""
    if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):
        raise InvalidInputError(
            "tokenizer must be one of transformers, AutoTokenizer.from_pretrained(path), or None for prompts of "
            f"token ids, got {shown(tokenizer)}"
        )


def check_ids(bos_id: object, sentence_end_ids: object, vocabulary: int) -> None:
    """Raises `InvalidInputError` unless they are token ids of the vocabulary, or None."""
    for name, ids in (("bos_id", [bos_id]), ("sentence_end_ids", sentence_end_ids)):
        if ids is None or ids == [None]:
            continue
        listed = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str) else [None]
        if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < vocabulary for each in listed):
            given = bos_id if name == "bos_id" else ids
            raise InvalidInputError(f"{name} must be token ids in 0..{vocabulary - 1}, got {shown(given)}")


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
