"""What form an answer has: `Grammar`, and what is checked of it before a library compiles it.

Knows neither tokenizers nor the library; `grammars` has both.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cacheblend.core.errors import InvalidInputError, check_encodable, check_type
from cacheblend.engines.hf.grammar_schema import check_schema

MOST_BYTES = 1 << 16
"""Of a grammar's text: 64 KiB compile in half a second, a MB in minutes."""
MOST_REPETITIONS = 10_000
"""Of a bounded repetition, those inside each other multiplied: matching (a{1,1000}){1,1000} slows down by the token."""
Kind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]


@dataclass(frozen=True)
class Grammar:
    """A form that an answer has from its first to its last character.

    Attributes:
        kind: ``json_object``: any JSON object. ``json_schema``: JSON by a schema; properties that it does not name and
            does not allow in `additionalProperties` are not written, properties come in the schema's order.
            ``regex``: a regular expression that the whole answer matches. ``choice``: one of some texts. ``ebnf``: a
            grammar in GBNF, whose first rule is ``root``.
        text: the schema as JSON, the expression, the texts as a JSON list, or the grammar; empty for ``json_object``.

    Raises:
        InvalidInputError: an unknown kind, or a text that is too long, nested too deeply or of the wrong kind.
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInputError(f"a grammar's kind is one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidInputError(f"a grammar's text must be a text, got {type(self.text).__name__}")
        check_encodable(self.text, f"the {self.kind}")
        if (size := len(self.text.encode())) > MOST_BYTES:
            raise InvalidInputError(f"the {self.kind} has {size:,} bytes; at most {MOST_BYTES:,} are compiled")
        if self.kind == "json_object" and self.text:
            raise InvalidInputError("json_object has no text; for a schema use the kind json_schema")
        if self.kind == "json_schema":
            check_schema(_json(self.text, "json_schema"), check_repetitions)
        elif self.kind == "choice":
            _check_choices(_json(self.text, "choice"))
        elif self.kind != "json_object":
            check_repetitions(self.text)

    @staticmethod
    def of_schema(schema: Any) -> "Grammar":
        """JSON by a schema, given as Python's dicts and lists."""
        try:
            return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
        except (RecursionError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from None

    @staticmethod
    def of_choices(choices: Sequence[str]) -> "Grammar":
        """One of some texts."""
        check_type(choices, list | tuple, "choices", "a list of texts")
        return Grammar("choice", json.dumps(list(choices), ensure_ascii=False))

    def source(self) -> tuple[Literal["json_schema", "regex", "ebnf"], str]:
        """What the library compiles: its kind there, and the text."""
        if self.kind == "json_object":
            return "json_schema", '{"type": "object"}'
        if self.kind == "choice":
            return "ebnf", "root ::= " + " | ".join(map(_literal, json.loads(self.text)))
        return self.kind, self.text


def check_repetitions(text: str) -> None:
    """Refuses repetitions whose product is too large, in a regular expression or in GBNF.

    Raises:
        InvalidInputError: naming the product and the limit.
    """
    groups, atom = [1], 1  # the most repetitions inside each open group; those of the last atom
    for match in _TOKEN.finditer(text):
        found = match.group()
        if found == "(":
            groups.append(1)
        elif found == ")" and len(groups) > 1:
            atom = groups.pop()
            groups[-1] = max(groups[-1], atom)
        elif found[0] == "{" and len(found) > 1:
            atom *= max(1, *(int(number[:20]) for number in re.findall("[0-9]+", found)))
            groups[-1] = max(groups[-1], atom)
            if atom > MOST_REPETITIONS:
                raise InvalidInputError(
                    f"the repetition {found[:40]} makes {atom:,} with those inside it; at most {MOST_REPETITIONS:,} "
                    "are allowed: use * or +, or smaller numbers"
                )
        else:
            atom = 1
    return None


_TOKEN = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|\"(?:\\.|[^\"\\])*\"|\{\s*[0-9]*\s*,?\s*[0-9]*\s*\}|\s+|.", re.DOTALL | re.ASCII
)
"""An escape, a class, a quoted text (of GBNF), a repetition, blanks, or one character."""


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidInputError(f"the {what} is nested too deeply to be read") from None
    except ValueError as error:
        raise InvalidInputError(f"the {what} is not JSON: {error}") from None


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise InvalidInputError("choice is a list of texts")
    if not choices:
        raise InvalidInputError("choice is an empty list; give at least one text")


def _literal(text: str) -> str:
    """A text as GBNF quotes it; ``\\x`` would take the digits behind it, too."""
    escaped = (f"\\{c}" if c in '"\\' else f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in text)
    return f'"{"".join(escaped)}"'
