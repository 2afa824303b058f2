"""From a command's options to a prompt: system prompt, passages, question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import PROMPT

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.engines.hf import BlendEngine, Passage

Question = Annotated[
    str | None,
    typer.Option("--question", "-q", help="Default: the one of --data's row.", rich_help_panel=PROMPT),
]
Passages = Annotated[
    list[str] | None,
    typer.Option("--passage", "-p", help="A passage, or @file. Several times, in order.", rich_help_panel=PROMPT),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help="Passages of a file, as for warm; rows as for evaluate bring their question.",
        rich_help_panel=PROMPT,
    ),
]
RowNumber = Annotated[int, typer.Option("--row", min=0, help="Which row of --data, from 0.", rich_help_panel=PROMPT)]


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


def read_inputs(
    question: str | None, arguments: list[str], data: Path | None, row: int
) -> tuple[list[tuple[str, str]], str]:
    """The passages as (text, title), and the question.

    Args:
        question: None takes that of the row.
        arguments: of ``--passage``; they come behind the row's.
        data: file of the row.
        row: its number.

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
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--passage {argument}: the file cannot be read: {error}") from error
