"""Passages from a user's files. Knows four formats; every error names file, row and field.

| ending  | form |
|---|---|
| .json   | ``[{"ctxs": [{"title", "text"}, ...], "question"?}, ...]``, or ``[{"text", "title"?}, ...]`` |
| .jsonl  | a line an object ``{"text", "title"?}`` |
| .txt    | one passage a paragraph, paragraphs apart by blank lines |
| folder  | all ``*.txt`` in it, each as above |
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cacheblend.core.errors import InvalidInputError
from cacheblend.data.files import Text, json_lines, kind, parse_json, read_passage, read_text


@dataclass(frozen=True)
class Row:
    """One question with its passages."""

    question: str | None
    passages: list[Text]


def read_passages(path: Path) -> list[Text]:
    """All passages of a file or a folder, in order, repeats included.

    Raises:
        InvalidInputError: it cannot be read, has another form, or holds no passage.
    """
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise InvalidInputError(f"the folder {path} holds no .txt file")
        return [passage for file in files for passage in _paragraphs(file)]
    if path.suffix == ".json":
        found = [passage for row in _rows(path) for passage in row.passages]
    elif path.suffix == ".jsonl":
        found = list(_lines(path))
    elif path.suffix == ".txt":
        found = list(_paragraphs(path))
    else:
        raise InvalidInputError(f"{path}: passages come as .json, .jsonl, .txt or a folder of .txt")
    if not found:
        raise InvalidInputError(f"{path} holds no passage")
    return found


def read_row(path: Path, number: int) -> Row:
    """Row `number`, counted from 0: a question and its passages (of a .json file); other files are one row.

    Raises:
        InvalidInputError: as for `read_passages`, or there is no such row.
    """
    rows = list(_rows(path)) if path.suffix == ".json" else [Row(None, read_passages(path))]
    if not 0 <= number < len(rows):
        raise InvalidInputError(f"{path} has rows 0..{len(rows) - 1}, not {number}")
    return rows[number]


def _rows(path: Path) -> Iterator[Row]:
    rows = parse_json(read_text(path), str(path))
    if not isinstance(rows, list):
        raise InvalidInputError(f"{path}: expected a list of rows, found {kind(rows)}")
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise InvalidInputError(f"{where}: expected an object, found {kind(row)}")
        if "ctxs" not in row:
            yield Row(None, [read_passage(row, where, f"{path.stem} #{number}")])
            continue
        if not isinstance(row["ctxs"], list):
            raise InvalidInputError(f"{where}, field 'ctxs': expected a list, found {kind(row['ctxs'])}")
        question = row.get("question")
        if question is not None and not isinstance(question, str):
            raise InvalidInputError(f"{where}, field 'question': expected a text, found {kind(question)}")
        passages = [
            read_passage(item, f"{where}, ctxs[{i}]", f"{path.stem} #{number}.{i}")
            for i, item in enumerate(row["ctxs"])
        ]
        yield Row(question, passages)


def _lines(path: Path) -> Iterator[Text]:
    for number, item in json_lines(read_text(path), path):
        yield read_passage(item, f"{path}, line {number}", f"{path.stem} #{number}")


def _paragraphs(path: Path) -> Iterator[Text]:
    parts = [part.strip() for part in re.split(r"\n[ \t]*\n", read_text(path))]
    for number, part in enumerate((part for part in parts if part), start=1):
        yield Text(part, f"{path.stem} #{number}")
