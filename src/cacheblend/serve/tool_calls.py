"""Tool calls in answers: the formats that models write them in, and reading them while the answer is generated.

hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                 Hermes, Qwen
llama3     <|python_tag|>{"name": ..., "parameters": {...}}, or the object alone    Llama 3
mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], [TOOL_CALLS]name[ARGS]{...}
pythonic   [f(a=1), g(b="x")]                                                       Llama 4

    "Let me look.\n"  "<tool"  "_call>{\"name\""  ...  "}</tool_call>"
     sent at once      may be a marker: held back       a call, once it is complete

What turns out to be no call is sent as text, whole. Scanning functions are generators: they yield while the text so far
does not decide, and return what the whole text would have them return, so that it does not matter where it is cut.
"""

import ast
import json
import re
import secrets
import string
import uuid
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cacheblend.core.errors import InvalidInputError

T = TypeVar("T")
Scan = Generator[None, None, T]

SPACE = " \t\r\n"
DEPTH = 64  # nesting of an argument's values at most: what reads them is recursive
_STRUCTURE = re.compile(r"""["'\\()\[\]{}]""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NAME = re.compile(r"[\w.-]")
_KEYS = {"name", "arguments", "parameters", "id", "type"}


class NoCallError(Exception):
    """What looked like a call is none; the search for calls goes on `at` a place, and all in front of it is text."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


@dataclass
class HeldText:
    """The text so far, from the answer's beginning; once it has `ended`, nothing is added."""

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
    r"""The end of a value in brackets, whatever is in its strings, which begin and end with one of `quotes`.

        {"a": ["}", {"b": "\""}]} more
        ^ at                     ^ returned

    Each character is looked at once, however many pieces the text has. Raises `NoCallError` if the text goes on with
    another bracket than `opening`, or brackets do not match or never close, or are nested too deeply.
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


class Call(NamedTuple):
    """A call of a tool; its arguments are the text of a JSON object."""

    name: str
    arguments: str


FoundCalls = tuple[list[Call], int]  # calls, and where the text behind them begins


@dataclass(frozen=True)
class Format:
    """A format; `read` reads calls from behind a marker on, or from `bare` on, and raises `NoCallError`."""

    name: str
    read: Callable[[HeldText, int], Scan[FoundCalls]]
    markers: tuple[str, ...]  # with which calls begin, anywhere in an answer
    bare: str = ""  # the bracket that calls may begin with in front of all other text
    between: str = ""  # what may separate calls, beside white space
    inner: tuple[str, ...] = ()  # further texts of the format that are special tokens in some vocabularies
    short_ids: bool = False  # as Mistral's templates take them

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{uuid.uuid4().hex}"


def _hermes(held: HeldText, at: int) -> Scan[FoundCalls]:
    begin = yield from skip(held, at)
    end = yield from bracketed(held, begin, "{", '"')
    call = _call_of(_json(held.text[begin:end], end), end)
    stop = yield from _closed(held, end, "</tool_call>")
    if stop is None:
        raise NoCallError(end)
    return [call], stop


def _llama3(held: HeldText, at: int) -> Scan[FoundCalls]:
    begin = yield from skip(held, at)
    end = yield from bracketed(held, begin, "{", '"')
    found = _json(held.text[begin:end], end)
    if not {"arguments", "parameters"} & found.keys():  # no marker need be in front of it: may be any object
        raise NoCallError(end)
    return [_call_of(found, end)], end


def _mistral(held: HeldText, at: int) -> Scan[FoundCalls]:
    begin = yield from skip(held, at)
    if (yield from starts(held, begin, "[")):
        end = yield from bracketed(held, begin, "[", '"')
        calls = [_call_of(item, end) for item in _json(held.text[begin:end], end)]
        if not calls:
            raise NoCallError(end)
        return calls, end
    name = yield from matched(held, begin, _NAME)
    at = begin + len(name)
    if (yield from starts(held, at, "[CALL_ID]")):
        at += len("[CALL_ID]")
        at += len((yield from matched(held, at, _NAME)))
    if (yield from starts(held, at, "[ARGS]")):
        at += len("[ARGS]")
    at = yield from skip(held, at)
    end = yield from bracketed(held, at, "{", '"')
    return [Call(name, _dumped(_json(held.text[at:end], end), end))], end


def _pythonic(held: HeldText, at: int) -> Scan[FoundCalls]:
    begin = yield from skip(held, at)
    end = yield from bracketed(held, begin, "[", "\"'")
    calls: list[Call] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes
            body = ast.parse(held.text[begin:end], mode="eval").body
        for node in body.elts if isinstance(body, ast.List) else []:
            if not isinstance(node, ast.Call) or node.args:
                raise NoCallError(end)
            arguments = {}
            for keyword in node.keywords:
                if keyword.arg is None or keyword.arg in arguments:
                    raise NoCallError(end)
                arguments[keyword.arg] = ast.literal_eval(keyword.value)
            name, parts = node.func, list[str]()
            while isinstance(name, ast.Attribute):
                parts.append(name.attr)
                name = name.value
            if not isinstance(name, ast.Name):
                raise NoCallError(end)
            calls.append(Call(".".join([name.id, *reversed(parts)]), _dumped(arguments, end)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCallError(end) from None
    if not calls:
        raise NoCallError(end)
    stop = yield from _closed(held, end, "<|python_end|>")
    return calls, end if stop is None else stop


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("hermes", _hermes, ("<tool_call>",), inner=("</tool_call>",)),
        Format("llama3", _llama3, ("<|python_tag|>",), bare="{", between=";"),
        Format("mistral", _mistral, ("[TOOL_CALLS]",), inner=("[CALL_ID]", "[ARGS]"), short_ids=True),
        Format("pythonic", _pythonic, ("<|python_start|>",), bare="[", inner=("<|python_end|>",)),
    )
}
AUTO, NONE = "auto", "none"
CHOICES = (AUTO, *FORMATS, NONE)


def format_of(choice: str, chat_template: Any) -> Format | None:
    """The format that calls are read in; None: they are not read. Raises `InvalidInputError` for an unknown choice.
    ``auto`` is the one that the tokenizer's template has, as far as it is known: a text, several by name, or None."""
    if choice not in CHOICES:
        raise InvalidInputError(f"there is no tool call parser {choice!r}; there are {', '.join(CHOICES)}")
    if choice != AUTO:
        return FORMATS.get(choice)
    templates = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    template = "\n".join(map(str, templates))
    if "<tool_call>" in template:
        is_xml = any(tag in template for tag in ("<function=", "<arg_key>", "<parameter"))
        return None if is_xml else FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<|python_start|>" in template or re.search(r"\[func(tion)?_?name1?\(", template):
        return FORMATS["pythonic"]
    is_llama = "<|start_header_id|>" in template and re.search(r"\"parameters\": ", template)
    return FORMATS["llama3"] if "<|python_tag|>" in template or is_llama else None


def _closed(held: HeldText, at: int, literal: str) -> Scan[int | None]:
    """The place behind `literal`, which may be missing in part where the answer ends (a stop text, ``max_tokens``);
    None: the text goes on with something else."""
    begin = yield from skip(held, at)
    if (yield from starts(held, begin, literal)):
        return begin + len(literal)
    return len(held.text) if held.ended and literal.startswith(held.text[begin:]) else None


def _json(text: str, end: int) -> Any:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key occurs twice, and one of its values would be lost")
        return found

    try:
        return json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError):
        raise NoCallError(end) from None


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


Pieces = list[str | Call]


class CallReader:
    """Reads the calls of one answer, and counts them (`calls`). What calls a tool of none of the names is text; with
    `only_first` what is behind the first call is left out."""

    def __init__(self, form: Format, names: Collection[str], *, only_first: bool = False) -> None:
        self._format, self._names, self._only_first = form, names, only_first
        self._held, self._pieces = HeldText(), list[str | Call]()
        self._scan = self._read()
        self.calls = 0

    def push(self, text: str) -> Pieces:
        """Adds text; returns the text and the calls that later text cannot change."""
        self._held.text += text
        return self._advance() if text else []

    def finish(self) -> Pieces:
        """Returns what was held back."""
        self._held.ended = True
        return self._advance()

    def read(self, text: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Adds text, perhaps the last; the text and the calls that are certain now, these as OpenAI writes them."""
        pieces, id_of = self.push(text) + (self.finish() if ended else []), self._format.new_id
        calls = [each._asdict() for each in pieces if isinstance(each, Call)]
        written = [{"id": id_of(), "type": "function", "function": call} for call in calls]
        return "".join(each for each in pieces if isinstance(each, str)), written

    def finish_reason(self, reason: str) -> str:
        """OpenAI's name for the end of the answer; one that was cut says so, unless what was cut is left out."""
        is_whole = reason == "stop" or self._only_first
        return "tool_calls" if self.calls and is_whole else reason

    def _advance(self) -> Pieces:
        next(self._scan, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Scan[None]:
        at, is_front = 0, True  # is_front: behind a call or the answer's beginning
        while not (self._only_first and self.calls):
            found = yield from self._beginning(at, is_front)
            if found is None:
                return
            start, body = found
            try:
                calls, at = yield from self._format.read(self._held, body)
                if not all(call.name in self._names for call in calls):
                    raise NoCallError(at)
            except NoCallError as error:
                self._add(self._held.text[start : error.at])
                at, is_front = error.at, False
            else:
                chosen = calls[:1] if self._only_first else calls
                self._pieces += chosen
                self.calls += len(chosen)
                is_front = True

    def _beginning(self, at: int, is_front: bool) -> Scan[tuple[int, int] | None]:
        """Passes on the text in front of what may be the next call. Returns the end of that text, and where the call's
        own text begins; None: the answer has ended."""
        held, begin = self._held, at
        if is_front:
            begin = yield from skip(held, at, SPACE + self._format.between if self.calls else SPACE)
            if begin == len(held.text):
                rest = held.text[at:]
                self._add(rest if not self.calls or rest.strip() else "")
                return None
            if held.text[begin] == self._format.bare:
                return at, begin
        look = begin
        while True:
            hits = [(place, mark) for mark in self._format.markers if (place := held.text.find(mark, look)) >= 0]
            if hits:
                place, mark = min(hits)
                if is_front and place == begin:
                    return at, place + len(mark)
                self._add(held.text[at:place])
                return place, place + len(mark)
            certain = len(held.text)
            if not held.ended:  # the end may begin a marker
                end = held.text[look:][-max(map(len, self._format.markers)) :]
                begun = (n for mark in self._format.markers for n in range(1, len(mark)) if end.endswith(mark[:n]))
                certain -= max(begun, default=0)
            if certain > begin:
                self._add(held.text[at:certain])
                at = look = certain
            if held.ended:
                return None
            yield

    def _add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
