"""Reads passages, with a question where a row has one; every error names file, row and field.

| ending  | form |
|---|---|
| .json   | a list of rows as for evaluations: ``{"passages": [{"text", "title"?}, ...], "question"?}``, |
|         | or ``ctxs`` in place of ``passages``; or a list of passages, ``{"text", "title"?}`` |
| .jsonl  | the same, one row or passage per line |
| .txt    | one passage per paragraph; blank lines separate paragraphs |
| folder  | all ``*.txt`` in it, each as above |
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.data.files import Text, kind, read_items, read_passage, read_text
from cacheblend.data.questions import NEAR_MISSES, NEAR_MISSES_OF_PASSAGES, read_passages_of, refuse_near_misses

JSON = (".json", ".jsonl")
WITH_QUESTION = ("passages", "ctxs")
"""Names of the field with the passages of a row."""


@dataclass(frozen=True)
class Row:
    """One question with its passages."""

    question: str | None
    passages: list[Text]


def read_passages(path: Path) -> list[Text]:
    """All passages of a file or a folder, in order, repeats included.

    Raises:
        InvalidInputError: the file cannot be read, has another form, or has no passages.
    """
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise InvalidInputError(f"the folder {path} has no .txt file")
        return [passage for file in files for passage in _paragraphs(file)]
    if path.suffix in JSON:
        found = [passage for row in _rows(path) for passage in row.passages]
    elif path.suffix == ".txt":
        found = list(_paragraphs(path))
    else:
        raise InvalidInputError(f"{path}: {_why_not(path)}; passages come as .json, .jsonl, .txt or a folder of .txt")
    if not found:
        raise InvalidInputError(f"{path} has no passages")
    return found


def read_row(path: Path, number: int) -> Row:
    """Row `number`, from 0. Text files, and passages without questions in JSON lines, are one row together.

    In a JSON list, each passage without a question is a row of its own.

    Raises:
        InvalidInputError: as for `read_passages`, or there is no such row.
    """
    rows = list(_rows(path)) if path.suffix in JSON else [Row(None, read_passages(path))]
    if not rows:
        raise InvalidInputError(f"{path} has no passages")
    if not 0 <= number < len(rows):
        raise InvalidInputError(f"{path} has rows 0..{len(rows) - 1}, not {number}")
    return rows[number]


def _rows(path: Path) -> Iterator[Row]:
    """Rows with questions; other passages are a row each in a list, and one row together in JSON lines."""
    together: list[Text] = []
    for where, number, item in read_items(path):
        if not isinstance(item, dict):
            raise InvalidInputError(f"{where}: expected an object, found {kind(item)}")
        title = f"{path.stem} #{number}"
        field = next((field for field in WITH_QUESTION if field in item), None)
        if field is not None:
            yield _row(item, field, where, title)
            continue
        refuse_near_misses(item, NEAR_MISSES_OF_PASSAGES, where)
        if path.suffix == ".jsonl":
            together.append(read_passage(item, where, title))
        else:
            yield Row(None, [read_passage(item, where, title)])
    if together:
        yield Row(None, together)


def _row(item: dict[str, Any], field: str, where: str, title: str) -> Row:
    refuse_near_misses(item, NEAR_MISSES, where)
    question = item.get("question")
    if question is not None and not isinstance(question, str):
        raise InvalidInputError(f"{where}, field 'question': expected a text, found {kind(question)}")
    check_encodable(question or "", f"{where}, field 'question': the text")
    return Row(question, list(read_passages_of(item, field, where, title)))


def _why_not(path: Path) -> str:
    """Why a path without one of the known endings cannot be read."""
    if not path.exists():
        return "there is no such file"
    if not path.is_file():
        return "it is a pipe or a device, not a file; write its contents to a file first"
    return f"the ending {path.suffix!r} is not known" if path.suffix else "the name has no ending"


def _paragraphs(path: Path) -> Iterator[Text]:
    parts = [part.strip() for part in re.split(r"\n[ \t]*\n", read_text(path))]
    for number, part in enumerate((part for part in parts if part), start=1):
        yield Text(part, f"{path.stem} #{number}")
