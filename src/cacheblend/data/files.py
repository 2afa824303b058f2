"""Reads text and JSON files, and fields of their rows; every error names the file and the place in it."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable

_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}


def read_text(path: Path) -> str:
    """The text of a file, with Unix line ends. Raises `InvalidInputError`: it cannot be read, or is not UTF-8."""
    return "".join(_lines(path, len)).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str, where: str) -> Any:
    """Parses JSON; `where` names the place for the `InvalidInputError` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON: {error}") from error


def read_items(path: Path, seen: Callable[[bytes], object] = len) -> Iterator[tuple[str, int, Any]]:
    """Yields (place, number, value) of each row: of a JSON list, numbered from 0, or of JSON lines, from 1, which are
    read one by one. `seen` is called with all that is read. Raises `InvalidInputError`: it cannot be read, or is not
    JSON of either kind."""
    lines, is_first = _lines(path, seen), True
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if is_first and line.lstrip()[:1] == "[":
            items = parse_json("\n" * (number - 1) + line + "".join(lines), str(path))
            yield from ((f"{path}, row {n}", n, item) for n, item in enumerate(items))
        elif line.strip():
            try:
                item = parse_json(line, where)
            except InvalidInputError:
                whole, text = None, line + "".join(lines) if is_first else ""
                with suppress(ValueError, RecursionError):
                    whole = json.loads(text)
                if isinstance(whole, dict):
                    raise InvalidInputError(
                        f"{path}: it is one JSON object over several lines; put rows into a list, [{{...}}, {{...}}], "
                        "or each on one line"
                    ) from None
                raise
            yield where, number, item
            is_first = False


def _lines(path: Path, seen: Callable[[bytes], object]) -> Iterator[str]:
    """The lines of a file. Only line feeds end them: JSON strings may contain U+2028 and similar unescaped."""
    at = 0
    try:
        with path.open("rb") as file:
            for line in file:
                seen(line)
                yield line.decode("utf-8" if at else "utf-8-sig")
                at += len(line)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: byte {at + error.start} ({error.reason})") from error


def kind(value: Any) -> str:
    """The type of a JSON value, for messages."""
    return _KINDS.get(type(value), "a number")


def as_object(value: Any, where: str, having: str = "") -> dict[str, Any]:
    """The value, if it is an object; `having`: what it should have, for the `InvalidInputError`."""
    if not isinstance(value, dict):
        raise InvalidInputError(f"{where}: expected an object{having}, found {kind(value)}")
    return value


def as_text(value: Any, place: str, empty: str | None = None) -> str:
    """The value, if it is a text that UTF-8 can encode; `empty`: what to do about a blank one; None: it may be blank.
    Raises `InvalidInputError`."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{place}: expected a text, found {kind(value)}")
    check_encodable(value, f"{place}: the text")
    if empty is not None and not value.strip():
        raise InvalidInputError(f"{place}: it is empty; {empty}")
    return value


def required(item: dict[str, Any], field: str, where: str) -> Any:
    """The value of a field. Raises `InvalidInputError` if the row has none."""
    if field not in item:
        found = ", ".join(map(repr, item)) or "none"
        raise InvalidInputError(f"{where}: the field {field!r} is missing (found {found})")
    return item[field]


def read_list(item: dict[str, Any], field: str, where: str) -> list[Any]:
    """The list in a field. Raises `InvalidInputError` if it is missing, or is not a list."""
    found = required(item, field, where)
    if not isinstance(found, list):
        raise InvalidInputError(f"{where}, field {field!r}: expected a list, found {kind(found)}")
    return found
