"""The formats in which models write tool calls into their answers, and which of them a chat template teaches.

hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                 Hermes, Qwen
llama3     <|python_tag|>{"name": ..., "parameters": {...}}, or the object alone    Llama 3
mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], [TOOL_CALLS]name[ARGS]{...}
pythonic   [f(a=1), g(b="x")]                                                       Llama 4

Knows a text. Does not know requests, nor how calls are sent.
"""

import ast
import json
import re
import secrets
import string
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cacheblend.core.errors import InvalidInputError
from cacheblend.serve.tools.call_scanner import HeldText, NoCallError, Scan, bracketed, matched, skip, starts

_NAME = re.compile(r"[\w.-]")
_KEYS = {"name", "arguments", "parameters", "id", "type"}


class Call(NamedTuple):
    """A call of a tool; its arguments are the text of a JSON object."""

    name: str
    arguments: str


class FoundCall(NamedTuple):
    """Calls, and where the text behind them begins."""

    calls: list[Call]
    stop: int


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _short_id() -> str:
    """Mistral's templates refuse a conversation with ids of another form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: of the format.
        read: reads calls from behind a marker on, or from `bare` on. Raises `NoCallError`.
        markers: with which calls begin, anywhere in an answer.
        bare: the bracket that calls may begin with in front of all other text; empty: there is none.
        between: what may separate calls, beside white space.
        inner: further texts of the format that are special tokens in some vocabularies.
        new_id: makes a call's id.
    """

    name: str
    read: Callable[[HeldText, int], Scan[FoundCall]]
    markers: tuple[str, ...]
    bare: str = ""
    between: str = ""
    inner: tuple[str, ...] = ()
    new_id: Callable[[], str] = _call_id


def _hermes(held: HeldText, at: int) -> Scan[FoundCall]:
    begin = yield from skip(held, at)
    end = yield from bracketed(held, begin, "{", '"')
    call = _call_of(_json(held.text[begin:end], end), end)
    stop = yield from _closed(held, end, "</tool_call>")
    if stop is None:
        raise NoCallError(end)
    return FoundCall([call], stop)


def _llama3(held: HeldText, at: int) -> Scan[FoundCall]:
    begin = yield from skip(held, at)
    end = yield from bracketed(held, begin, "{", '"')
    found = _json(held.text[begin:end], end)
    if not {"arguments", "parameters"} & found.keys():  # no marker need be in front of it: may be any object
        raise NoCallError(end)
    return FoundCall([_call_of(found, end)], end)


def _mistral(held: HeldText, at: int) -> Scan[FoundCall]:
    begin = yield from skip(held, at)
    if (yield from starts(held, begin, "[")):
        end = yield from bracketed(held, begin, "[", '"')
        calls = [_call_of(item, end) for item in _json(held.text[begin:end], end)]
        if not calls:
            raise NoCallError(end)
        return FoundCall(calls, end)
    name = yield from matched(held, begin, _NAME)
    at = begin + len(name)
    if (yield from starts(held, at, "[CALL_ID]")):
        at += len("[CALL_ID]")
        at += len((yield from matched(held, at, _NAME)))
    if (yield from starts(held, at, "[ARGS]")):
        at += len("[ARGS]")
    at = yield from skip(held, at)
    end = yield from bracketed(held, at, "{", '"')
    return FoundCall([Call(name, _dumped(_json(held.text[at:end], end), end))], end)


def _pythonic(held: HeldText, at: int) -> Scan[FoundCall]:
    begin = yield from skip(held, at)
    end = yield from bracketed(held, begin, "[", "\"'")
    calls = _python_calls(held.text[begin:end], end)
    stop = yield from _closed(held, end, "<|python_end|>")
    return FoundCall(calls, end if stop is None else stop)


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("hermes", _hermes, ("<tool_call>",), inner=("</tool_call>",)),
        Format("llama3", _llama3, ("<|python_tag|>",), bare="{", between=";"),
        Format("mistral", _mistral, ("[TOOL_CALLS]",), inner=("[CALL_ID]", "[ARGS]"), new_id=_short_id),
        Format("pythonic", _pythonic, ("<|python_start|>",), bare="[", inner=("<|python_end|>",)),
    )
}
AUTO, NONE = "auto", "none"
CHOICES = (AUTO, *FORMATS, NONE)


def format_of(choice: str, chat_template: Any) -> Format | None:
    """The format that calls are read in; None: they are not read.

    Args:
        choice: one of `CHOICES`; ``auto``: the one that the template has, as far as it is known.
        chat_template: of the tokenizer: a text, several by name, or None.

    Raises:
        InvalidInputError: there is no such choice.
    """
    if choice not in CHOICES:
        raise InvalidInputError(f"there is no tool call parser {choice!r}; there are {', '.join(CHOICES)}")
    if choice != AUTO:
        return FORMATS.get(choice)
    templates = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    name = _recognised("\n".join(map(str, templates)))
    return None if name is None else FORMATS[name]


def _recognised(template: str) -> str | None:
    if "<tool_call>" in template:
        is_xml = any(tag in template for tag in ("<function=", "<arg_key>", "<parameter"))
        return None if is_xml else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template or re.search(r"\[func(tion)?_?name1?\(", template):
        return "pythonic"
    is_llama = "<|start_header_id|>" in template and re.search(r"\"parameters\": ", template)
    return "llama3" if "<|python_tag|>" in template or is_llama else None


def _closed(held: HeldText, at: int, literal: str) -> Scan[int | None]:
    """The place behind `literal`, which may be missing in part where the answer ends (a stop text, ``max_tokens``);
    None: the text goes on with something else."""
    begin = yield from skip(held, at)
    if (yield from starts(held, begin, literal)):
        return begin + len(literal)
    return len(held.text) if held.ended and literal.startswith(held.text[begin:]) else None


def _json(text: str, end: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        raise NoCallError(end) from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice, and one of its values would be lost")
    return found


def _call_of(found: Any, end: int) -> Call:
    """A call that is written as an object; any key that a call does not have would be lost."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or found.keys() - _KEYS:
        raise NoCallError(end)
    given = [found[key] for key in ("arguments", "parameters") if key in found]
    if len(given) > 1:
        raise NoCallError(end)
    arguments = given[0] if given and given[0] is not None else {}
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = _json(arguments, end)
    return Call(found["name"], _dumped(arguments, end))


def _dumped(arguments: Any, end: int) -> str:
    if not isinstance(arguments, dict):
        raise NoCallError(end)
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # infinity, which JSON has not; a set
        raise NoCallError(end) from None
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair stays escaped
        return json.dumps(arguments)
    return text


def _python_calls(text: str, end: int) -> list[Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes
            body = ast.parse(text, mode="eval").body
        nodes = body.elts if isinstance(body, ast.List) else []
        calls = [_python_call(node, end) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCallError(end) from None
    if not calls:
        raise NoCallError(end)
    return calls


def _python_call(node: ast.expr, end: int) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise NoCallError(end)
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise NoCallError(end)
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return Call(_dotted(node.func, end), _dumped(arguments, end))


def _dotted(node: ast.expr, end: int) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise NoCallError(end)
    return ".".join([node.id, *reversed(parts)])
