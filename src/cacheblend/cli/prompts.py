"""From texts and files to a prompt: system prompt, passages, question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.engines.hf import BlendEngine, Passage


def build_prompt(
    engine: "BlendEngine", passages: Sequence["Passage"], question: str, system: str | None, chat: bool | None
) -> "Prompt":
    """The prompt; passages are chunks, the text between them is plain.

    Args:
        engine: its tokenizer and chat template are used.
        passages: in the order in which the model reads them.
        question: follows the passages.
        system: precedes them; None for none.
        chat: use the chat template; None uses it if there is one.

    Raises:
        InvalidInputError: no prompt can be made of it.
    """
    from cacheblend.engines.hf.layout import PromptLayout

    return PromptLayout(system=system or "", chat=chat).prompt(engine, passages, question)


def read_inputs(
    question: str | None, arguments: list[str], data: Path | None, row: int
) -> tuple[list[tuple[str, str]], str]:
    """The passages as (text, title), and the question.

    Args:
        question: None takes the row's.
        arguments: values of ``--passage``; they follow the row's passages.
        data: file with the row.
        row: number of the row, from 0.

    Raises:
        InvalidInputError: a file cannot be read, there is no such row, or no question.
    """
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.data import read_row

    texts = [passage_text(argument) for argument in arguments]
    if data is not None:
        found = read_row(data, row)
        texts = [(text.text, text.title) for text in found.passages] + texts
        question = question or found.question
    if not question:
        raise InvalidInputError("there is no question: give --question, or --data with a row that has one")
    return texts, question


def passage_text(argument: str) -> tuple[str, str]:
    """(text, title) of a ``--passage``: a text, or ``@file``."""
    from cacheblend.core.errors import InvalidInputError

    if not argument.startswith("@"):
        return argument, ""
    path = Path(argument[1:])
    try:
        return path.read_text(encoding="utf-8").strip(), path.name
    except (OSError, ValueError) as error:  # a name may also hold a NUL byte
        raise InvalidInputError(f"--passage {argument}: the file cannot be read: {error}") from error
