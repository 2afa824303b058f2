"""From a command's options to a prompt: system prompt, passages, question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cacheblend.core.prompt import Prompt
    from cacheblend.engines.hf import BlendEngine, Passage


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
    from cacheblend.engines.hf.layout import PromptLayout

    return PromptLayout(system=system or "", chat=chat).prompt(engine, passages, question)


def passage_text(argument: str) -> tuple[str, str]:
    """(text, title) of a ``--passage``: a text, or ``@file``."""
    if not argument.startswith("@"):
        return argument, ""
    path = Path(argument[1:])
    try:
        return path.read_text(encoding="utf-8").strip(), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--passage {argument}: the file cannot be read: {error}") from error
