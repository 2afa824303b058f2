"""From the options of questions to rows and settings, for the commands that evaluate."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend.cli.prompt_options import QuestionOptions

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Settings


def needed_model(model: Path | None) -> Path:
    """The folder of ``--model``, or ``nano``.

    Raises:
        InvalidInputError: none is given, or it is no folder.
    """
    from cacheblend.cli.models import model_folder
    from cacheblend.core.errors import InvalidInputError

    if model is None:
        raise InvalidInputError("--data needs a model: give --model FOLDER, or --model nano for the one that ships")
    model_folder(model)
    return model


def settings_of(questions: QuestionOptions, top_k: Sequence[int] | None, tokens: int) -> "Settings":
    """Settings of an evaluation.

    Raises:
        InvalidInputError: there is no such template, or it is wrong.
    """
    from dataclasses import replace

    from cacheblend.evaluation import Settings, read_template

    chosen = read_template(questions.template, questions.templates)
    if questions.chat is not None:
        chosen = replace(chosen, chat=questions.chat)
    return Settings(chosen, tuple(dict.fromkeys(top_k)) if top_k else (None,), tokens)


def split_rows(
    engine: "BlendEngine",
    rows: "Sequence[QuestionRow]",
    questions: QuestionOptions,
    settings: "Settings",
    bad: list[str],
) -> "list[QuestionRow]":
    """The rows, LongBench contexts cut into passages; with ``--skip-bad`` those that make a prompt.

    Args:
        engine: its tokenizer counts.
        rows: as they were read.
        questions: say how to cut, and whether to skip.
        settings: layout of the prompts.
        bad: gets the reasons for rows that are skipped.

    Raises:
        InvalidInputError: no row is left.
    """
    from cacheblend.data.split import split_contexts
    from cacheblend.evaluation import usable_rows

    builder = engine.builder
    assert builder is not None  # a model folder is opened with its tokenizer
    split = split_contexts(rows, lambda text: len(builder.encode(text)), questions.chunk_tokens)
    return usable_rows(engine, settings, split, bad) if questions.skip_bad else split
