"""Scanning a text that comes in pieces: what is decided never depends on where the pieces are cut.

Each function is a generator: it yields while the text so far does not decide, and returns what the whole text would
have it return. Knows no format of tool calls.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Scan = Generator[None, None, T]

SPACE = " \t\r\n"
DEPTH = 64
"""Nesting of an argument's values at most: what reads them is recursive."""
_STRUCTURE = re.compile(r"""["'\\()\[\]{}]""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class NoCallError(Exception):
    """What looked like a call is none.

    Attributes:
        at: where the search for calls goes on; all in front of it is text.
    """

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


@dataclass
class HeldText:
    """The text so far.

    Attributes:
        text: from the answer's beginning.
        ended: nothing will be added.
    """

    text: str = ""
    ended: bool = False


def skip(held: HeldText, at: int, characters: str = SPACE) -> Scan[int]:
    """The place of the first other character from `at` on; the end of a text that has none."""
    while True:
        while at < len(held.text) and held.text[at] in characters:
            at += 1
        if at < len(held.text) or held.ended:
            return at
        yield


def starts(held: HeldText, at: int, literal: str) -> Scan[bool]:
    """Whether the text goes on with `literal` at `at`."""
    while not held.ended and len(held.text) < at + len(literal) and literal.startswith(held.text[at:]):
        yield
    return held.text.startswith(literal, at)


def matched(held: HeldText, at: int, characters: re.Pattern[str]) -> Scan[str]:
    """The longest text from `at` on of which each character matches."""
    stop = at
    while True:
        while stop < len(held.text) and characters.match(held.text, stop):
            stop += 1
        if stop < len(held.text) or held.ended:
            return held.text[at:stop]
        yield


def bracketed(held: HeldText, at: int, opening: str, quotes: str) -> Scan[int]:
    r"""The end of a value in brackets, whatever is in its strings.

        {"a": ["}", {"b": "\""}]} more
        ^ at                     ^ returned

    Each character is looked at once, however many pieces the text has.

    Args:
        held: the text.
        at: where the value begins.
        opening: the bracket that it begins with.
        quotes: the characters that strings begin and end with.

    Raises:
        NoCallError: the text goes on with something else, brackets do not match or never close, or are nested too
            deeply.
    """
    if not (yield from starts(held, at, opening)):
        raise NoCallError(at)
    closing: list[str] = []
    quote = ""
    while True:
        while found := _STRUCTURE.search(held.text, at):
            char, at = found[0], found.end()
            if char == "\\":
                at += bool(quote)  # what is escaped may not have come yet
            elif quote:
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char if char in quotes else ""
            elif char in _CLOSING:
                closing.append(_CLOSING[char])
                if len(closing) > DEPTH:
                    raise NoCallError(at)
            elif closing.pop() != char:
                raise NoCallError(at)
            if not closing:
                return at
        if held.ended:
            raise NoCallError(len(held.text))
        at = max(at, len(held.text))
        yield
