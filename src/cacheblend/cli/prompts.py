"""From a command's options to a prompt: system prompt, passages, question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cacheblend.core.prompt import Prompt
    from cacheblend.engines.hf import BlendEngine, Passage

SEPARATOR = "\n\n"


def build_prompt(
    engine: "BlendEngine", passages: Sequence["Passage"], question: str, system: str | None, chat: bool | None
) -> "Prompt":
    """The prompt; passages are chunks, what stands between them is plain text.

    Args:
        engine: whose tokenizer and chat template are used.
        passages: in the order in which the model shall read them.
        question: behind the passages.
        system: in front of them; None for none.
        chat: through the chat template; None where there is one.

    Raises:
        InvalidInputError: no prompt can be made of it.
    """
    has_template = bool(getattr(engine.tokenizer, "chat_template", None))
    if chat is None:
        chat = has_template
    if chat:
        parts: list[dict[str, str]] = []
        for passage in passages:
            parts += [{"type": "chunk", "text": passage.text, "title": passage.title}, _text(SEPARATOR)]
        user: dict[str, Any] = {"role": "user", "content": [*parts, _text(question)]}
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        return engine.prompt([*messages, user])
    content: list[str | Passage] = [system + SEPARATOR] if system else []
    for passage in passages:
        content += [passage, SEPARATOR]
    return engine.prompt([*content, question])


def passage_text(argument: str) -> tuple[str, str]:
    """(text, title) of a ``--passage``: a text, or ``@file``."""
    if not argument.startswith("@"):
        return argument, ""
    path = Path(argument[1:])
    try:
        return path.read_text(encoding="utf-8").strip(), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--passage {argument}: the file cannot be read: {error}") from error


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
