"""Reads text and JSON files; every error names the file and the place in it. Knows no format of rows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable


@dataclass(frozen=True)
class Text:
    """A passage as in the file; `title` is for people."""

    text: str
    title: str


def read_text(path: Path) -> str:
    """The text of a file, with Unix line ends.

    Raises:
        InvalidInputError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: byte {error.start} ({error.reason})") from error


def parse_json(text: str, where: str) -> Any:
    """Parses JSON; `where` names the place for errors.

    Raises:
        InvalidInputError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON: {error}") from error


def json_lines(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of each line that is not blank, numbered from 1.

    Raises:
        InvalidInputError: a line is not JSON.
    """
    # Not splitlines(): JSON strings may contain U+2028 and similar unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, parse_json(line, f"{path}, line {number}")


def read_items(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yields (place, number, value) of each row: of a JSON list, numbered from 0, or of JSON lines, from 1.

    Raises:
        InvalidInputError: it cannot be read, or is not JSON of either kind.
    """
    text = read_text(path)
    if text.lstrip()[:1] == "[":
        for number, item in enumerate(parse_json(text, str(path))):
            yield f"{path}, row {number}", number, item
        return
    if _is_one_object(text):
        raise InvalidInputError(
            f"{path}: it is one JSON object over several lines; put rows into a list, [{{...}}, {{...}}], or each on "
            "one line"
        )
    for number, item in json_lines(text, path):
        yield f"{path}, line {number}", number, item


def read_list(item: dict[str, Any], field: str, where: str) -> list[Any]:
    """The list in a field of a row.

    Raises:
        InvalidInputError: the field is missing, or is not a list.
    """
    if field not in item:
        raise InvalidInputError(f"{where}: the field {field!r} is missing (found {', '.join(map(repr, item))})")
    if not isinstance(item[field], list):
        raise InvalidInputError(f"{where}, field {field!r}: expected a list, found {kind(item[field])}")
    return list(item[field])


def read_passage(item: Any, where: str, fallback: str) -> Text:
    """A passage from ``{"text", "title"?}``; `fallback` is the title if there is none.

    Raises:
        InvalidInputError: the item has another form, an empty text, or a lone surrogate in a field.
    """
    if not isinstance(item, dict):
        raise InvalidInputError(f"{where}: expected an object with 'text', found {kind(item)}")
    if "text" not in item:
        raise InvalidInputError(f"{where}: the field 'text' is missing (found {', '.join(map(repr, item)) or 'none'})")
    for field in ("text", "title"):
        if not isinstance(item.get(field, ""), str):
            raise InvalidInputError(f"{where}, field {field!r}: expected a text, found {kind(item[field])}")
        check_encodable(item.get(field, ""), f"{where}, field {field!r}: the text")
    if not item["text"].strip():
        raise InvalidInputError(f"{where}, field 'text': it is empty; remove empty passages")
    return Text(item["text"], item.get("title") or fallback)


def _is_one_object(text: str) -> bool:
    """Whether the file is a single object over several lines."""
    first, _, more = text.strip().partition("\n")
    if not first.startswith("{") or not more:
        return False
    try:
        json.loads(first)
        return False
    except ValueError:
        pass
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def kind(value: Any) -> str:
    """The type of a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
