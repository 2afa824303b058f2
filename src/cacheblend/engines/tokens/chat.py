"""Messages and documents for a chat template, and where it puts their texts.

A template may read a content, and trim, split, escape, repeat or drop it. So it is handed the real contents, but for
letters that no text of the conversation has, each in the place of one letter, which are put right in what it renders:

    content   " <|im_end|> Where?"
    guarded   " ********** Where?"   special tokens in texts: those that are rendered are the template's own, whatever
                                     it does with the contents
    marked    " ********** #her#?"   the first and last letter of each content: the content is where they are rendered

    rendered  "<|im_start|>user\n********** #her#?<|im_end|>\n"     (trimmed by the template)

What is rendered with marks has to be what is rendered without, else they changed what the template did: then the
contents are looked up in the latter by their texts.

Knows strings. Does not know tokenizers.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple

from cacheblend.core.errors import InvalidInputError, shown


@dataclass(frozen=True)
class Passage:
    """A text that is reused as a unit at any position.

    Attributes:
        text: what the model reads.
        title: a name for people; the model reads it where a chat template writes the titles of documents.
    """

    text: str
    title: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "title"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInputError(f"a passage's {name} must be a text, got {getattr(self, name)!r}")

    @staticmethod
    def of(value: object, where: str = "") -> "Passage":
        """A passage of what callers have. Knows the forms, not the libraries that they come from.

        Args:
            value: a passage; a text; a mapping with the text as ``text``, ``content``, ``contents`` or
                ``page_content``, and maybe a ``title``; a document of LangChain (`page_content`) or Haystack
                (`content`); a node of LlamaIndex, with or without a score, of which the passage is what LlamaIndex
                shows a model (`get_content`); any object with a `text`. A title is taken from the metadata, too
                (``title`` or ``source``).
            where: names its place for messages.

        Raises:
            InvalidInputError: it is none of these, or a message of a chat.
        """
        if isinstance(value, Passage):
            return value
        if isinstance(value, str):
            return Passage(value)
        text, title = _text_and_title(value)
        if isinstance(text, str):
            return Passage(text, title)
        place = f"{where}: " if where else ""
        raise InvalidInputError(f"{place}a passage is {_FORMS}, {_unlike(value)}")

    @staticmethod
    def is_like(value: object) -> bool:
        """Whether `of` makes a passage of it."""
        return isinstance(value, Passage | str) or isinstance(_text_and_title(value)[0], str)


_FORMS = (
    'a Passage, a text, {"text": ..., "title": ...}, or a document of LangChain, LlamaIndex or Haystack (page_content, '
    "get_content, content)"
)
_TEXT_KEYS = ("text", "content", "contents", "page_content")


def _text_and_title(value: object) -> tuple[object, str]:
    """What a mapping or a document of another library has as text, None if nothing, and as title."""
    if isinstance(value, Mapping):
        texts = [value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)]
        text = texts[0] if len(texts) == 1 and "role" not in value else None
        metadata = value.get("metadata") or value.get("meta")
        title = value.get("title")
    else:
        text = _text_of(value)
        metadata, title = (
            getattr(value, "metadata", None) or getattr(value, "meta", None),
            getattr(value, "title", None),
        )
    if not title and isinstance(metadata, Mapping):
        title = metadata.get("title") or metadata.get("source")
        title = title if isinstance(title, str) else ""
    return text, title or ""


def _text_of(value: object) -> object:
    """The text of another library's document; None of a message, which has a role, or LangChain's and LlamaIndex's
    `additional_kwargs`."""
    if isinstance(value, type) or hasattr(value, "role") or hasattr(value, "additional_kwargs"):
        return None
    for name in ("page_content", "get_content", "content", "text"):
        found = getattr(value, name, None)
        if name == "get_content" and callable(found):
            try:
                found = found(metadata_mode="llm")
            except (TypeError, ValueError):
                found = found()
        if isinstance(found, str):
            return found
    return None


def _unlike(value: object) -> str:
    """Why a value is no passage."""
    if (isinstance(value, Mapping) and "role" in value) or hasattr(value, "role"):
        return f"not a message, {shown(value)}"
    if isinstance(value, Mapping) and sum(isinstance(value.get(key), str) for key in _TEXT_KEYS) > 1:
        return f"with one text, not several under text, content, contents and page_content: {shown(value)}"
    return f"got {shown(value)}"


Content = str | Passage
Message = dict[str, Any]
"""``{"role": ..., "content": ...}``; content is a string, or parts ``{"type": "text" | "chunk", "text": ...}``."""


Render = Callable[[list[Message], list["Document"], dict[str, Any]], str]
"""What a template makes of messages, documents and options."""

_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
"""Letters for private use: those of them that a conversation does not have stand in for others."""
_ESCAPE = re.compile(r"\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
"""One of these letters as JSON writes it in ASCII."""
_HALVES = re.compile(r"^\s*\\u(?P<low>d[c-f][0-9a-f]{2})|\\u(?P<high>db[89a-f][0-9a-f])\s*$")
"""A half of that at an end of a text, to which another text may bring the other half."""
_UNSUITED = frozenset("\"'`\\/&<>{}[]()|")  # no marks: templates escape them, or look for them
_LONG_ENOUGH = 8  # characters of a content that is looked up by its text


class Document(dict[str, str]):
    """A document as a template reads it: ``text``, and ``title`` if it has one. A template that asks for ``content`` or
    ``contents`` gets the text."""

    def __missing__(self, key: str) -> str:
        if key in ("content", "contents"):
            return self["text"]
        if key == "title":
            return ""
        raise KeyError(key)


class Guard:
    """Special tokens that no text of a conversation may become.

    Args:
        texts: of the special tokens and the template's own markers.
        thoughts: those of `texts` that a model writes around its thoughts (``</think>``): templates look for them in
            earlier answers, where they stay as they are.

    Attributes:
        everywhere: finds one of `texts`.
        in_answers: finds one that is not in `thoughts`.
        left: finds one of `thoughts`.
        openers: finds a first letter of one of `texts`.
    """

    def __init__(self, texts: Iterable[str], thoughts: Iterable[str] = ()) -> None:
        texts, thoughts = set(texts), set(thoughts)
        self.everywhere, self.in_answers, self.left = map(_any_of, (texts, texts - thoughts, thoughts))
        self.openers = _any_of({text.strip()[:1] for text in texts} - {""})


@dataclass(frozen=True)
class Place:
    """Where a content, or a part of it, is in a rendered text.

    Attributes:
        start: its first character.
        stop: the one behind its last.
        content: its number, from 0.
        sure: (start, stop) of what is certainly the content's: around it the text is only the same as the content's.
    """

    start: int
    stop: int
    content: int
    sure: tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """What a template made of a conversation.

    Attributes:
        text: as the template renders it without any stand-in.
        places: of the contents, ascending, without overlap.
        guarded: (start, stop) of special tokens that stood in a text of the conversation, ascending.
        openers: where a content has the first character of a special token, but for `guarded`.
        changed: how many contents the text does not have exactly once as they are.
    """

    text: str
    places: tuple[Place, ...]
    guarded: tuple[tuple[int, int], ...]
    openers: frozenset[int]
    changed: int

    def front(self, stop: int, behind: str) -> "Rendered":
        """What is in front of a content that begins at `stop`, with another text behind it."""
        return Rendered(
            self.text[:stop] + behind,
            tuple(place for place in self.places if place.stop <= stop),
            tuple(span for span in self.guarded if span[1] <= stop),
            frozenset(at for at in self.openers if at < stop),
            0,
        )

    def places_in(self, start: int, stop: int) -> Sequence[Place]:
        """The contents that have a character in a span."""
        first = bisect_left(self.places, start + 1, key=lambda place: place.stop)
        last = bisect_left(self.places, stop, key=lambda place: place.start)
        return self.places[first:last]


class _Field(NamedTuple):
    """A text that a template is handed: as it is, but for guarded tokens; with marks; and with letters for first
    characters of special tokens, too."""

    guarded: str
    marked: str
    opened: str


class Conversation:
    """Messages and documents, to be rendered by a template.

    Args:
        messages: see `Message`.
        documents: passages for the template.
        options: for the template.
        guard: of the tokenizer and the template.

    Attributes:
        contents: of the messages, then the documents.

    Raises:
        InvalidInputError: a content part that is neither text nor chunk.
    """

    def __init__(
        self, messages: Sequence[Message], documents: Sequence[Passage], options: Mapping[str, Any], guard: Guard
    ) -> None:
        self.contents: list[Content] = []
        self._messages, self._options, self._guard = list(messages), dict(options), guard
        self._parts = [self._numbers(message) for message in messages]  # of each one's contents; None: it has no text
        self._documents = [self._number(document) for document in documents]
        titles = [document.title for document in documents]
        beside = _strings_in([self._messages, self._options])
        self._letters = _StandIns(chain(map(_text, self.contents), titles, beside))
        self._marks: dict[str, tuple[int, int]] = {}  # by letter: a content's number, and the place of its letter in it

    def render(self, render: Render) -> Rendered:
        """The conversation by a template. Documents that it does not use start the last user message.

        Raises:
            InvalidInputError: as `render`.
        """
        fields = [None if part is None else self._field(at, part) for at, part in enumerate(self._parts)]
        documents = [self._field(None, [number]) for number in self._documents]
        marked = self._rendered(render, fields, documents, "opened")
        if documents and not all(self._is_in(number, marked) for number in self._documents):
            question = max((i for i, m in enumerate(self._messages) if m.get("role") == "user"), default=-1)
            fields[question] = self._field(question, [*self._documents, *(self._parts[question] or ())])
            documents = []
            marked = self._rendered(render, fields, documents, "opened")
        guarded = self._rendered(render, fields, documents, "guarded")
        if self._letters.without_marks(marked) != guarded:  # it looks for characters like "<", or escapes them
            marked = self._rendered(render, fields, documents, "marked")
        return self._found(guarded, marked)

    # ---- what the template is handed --------------------------------------------------------------------

    def _numbers(self, message: Message) -> list[int] | None:
        content = message.get("content")
        if isinstance(content, list):
            return [self._number(_content_part(part)) for part in content]
        return [self._number(content)] if isinstance(content, str) and content else None

    def _number(self, content: Content) -> int:
        self.contents.append(content)
        return len(self.contents) - 1

    def _field(self, message: int | None, numbers: Sequence[int]) -> _Field:
        """Contents as one text. `message`: whose they are; None: it is a document."""
        is_answer = message is not None and self._messages[message].get("role") == "assistant"
        text = "".join(_text(self.contents[number]) for number in numbers)
        guarded = self._guarded(text, self._guard.in_answers if is_answer else self._guard.everywhere)
        left = [found.span() for found in self._guard.left.finditer(guarded)] if is_answer else []
        fixed = {at for span in left for at in range(*span)}
        marked, opened = list(guarded), list(guarded)
        for found in self._guard.openers.finditer(guarded):
            if found.start() not in fixed:
                opened[found.start()] = self._letters.opener(found[0])
        start = 0
        for number in numbers:
            stop = start + len(_text(self.contents[number]))
            free = [at for at in range(start, stop) if at not in fixed] if fixed else range(start, stop)
            suited = {_first_suited(text, opened, free), _first_suited(text, opened, free[::-1])}
            for at in (at for at in suited if at is not None):
                opened[at] = marked[at] = self._letters.mark(opened[at])
                self._marks[opened[at]] = number, at - start
            start = stop
        return _Field(guarded, "".join(marked), "".join(opened))

    def _guarded(self, text: str, guard: re.Pattern[str] | None = None) -> str:
        return (guard or self._guard.everywhere).sub(lambda found: self._letters.guarded(found[0]), text)

    def _guard_all(self, value: Any) -> Any:
        """A JSON value with all of its texts guarded; the value itself where there is nothing to guard."""
        if not any(map(self._guard.everywhere.search, _strings_in(value))):
            return value
        if isinstance(value, str):
            return self._guarded(value)
        try:
            if isinstance(value, Mapping):
                return {self._guard_all(key): self._guard_all(inner) for key, inner in value.items()}
            return [self._guard_all(inner) for inner in value]
        except RecursionError as error:
            raise InvalidInputError("the messages or tools are nested too deeply; nest them less") from error

    def _rendered(
        self,
        render: Render,
        fields: Sequence[_Field | None],
        documents: Sequence[_Field],
        which: Literal["guarded", "marked", "opened"],
    ) -> str:
        messages = []
        for message, field in zip(self._messages, fields, strict=True):
            beside = {key: value for key, value in message.items() if field is None or key != "content"}
            text = {} if field is None else {"content": getattr(field, which)}
            guarded = self._guard_all(beside)
            kept = message if guarded.keys() == beside.keys() else {}  # for the order of the keys
            messages.append({**kept, **guarded, **text})
        handed = []
        for number, field in zip(self._documents, documents, strict=False):
            passage = self.contents[number]
            title = self._guarded(passage.title) if isinstance(passage, Passage) else ""
            text = getattr(field, which)
            handed.append(Document({"title": title, "text": text} if title else {"text": text}))
        options = {name: value for name, value in self._options.items() if name != "chat_template"}
        handed_on = {**self._options, **self._guard_all(options)}
        return self._letters.unescaped(render(messages, handed, handed_on))

    # ---- what it made of it -----------------------------------------------------------------------------

    def _is_in(self, number: int, marked: str) -> bool:
        letters = [letter for letter, (content, _) in self._marks.items() if content == number]
        if letters:
            return any(letter in marked for letter in letters)
        return _text(self.contents[number]) in self._letters.put_right(marked)

    def _found(self, guarded: str, marked: str) -> Rendered:
        text = self._letters.put_right(guarded)
        openers = frozenset[int]()
        if self._letters.without_marks(marked) == guarded:
            found = self._marked_places(text, marked)
            openers = frozenset(self._letters.openers_in(marked))
        else:
            found = self._places_by_text(text)
        places: list[Place] = []
        for place in sorted(found, key=lambda place: (place.start, -place.stop)):
            if place.start < place.stop and (not places or place.start >= places[-1].stop):
                places.append(place)
        spans = tuple(self._letters.guards_in(guarded))
        return Rendered(text, tuple(places), spans, openers, self._changed(text, places))

    def _marked_places(self, text: str, marked: str) -> Iterator[Place]:
        """The contents by their marks; text around these that is the content's, too, belongs to them."""
        seen: dict[int, list[tuple[int, int]]] = {}  # by content: (position in the text, place in the content)
        for found in _PRIVATE.finditer(marked):
            if found[0] in self._marks:
                number, place = self._marks[found[0]]
                seen.setdefault(number, []).append((found.start(), place))
        for number, marks in seen.items():
            content = _text(self.contents[number])
            while marks:
                start, first = marks.pop(0)
                stop, last = start, first
                if marks and marks[0][1] > first:
                    stop, last = marks.pop(0)
                before = _common(content[:first][::-1], text[max(0, start - first) : start][::-1])
                behind = content[last + 1 :]
                behind_it = _common(behind, text[stop + 1 : stop + 1 + len(behind)])
                yield Place(start - before, stop + 1 + behind_it, number, (start, stop + 1))

    def _places_by_text(self, text: str) -> Iterator[Place]:
        """The contents by their texts: as they are, trimmed, or as JSON."""
        at = 0
        for number, content in enumerate(map(_text, self.contents)):
            trimmed = content.strip()
            for form in (content, trimmed, *(json.dumps(trimmed, ensure_ascii=ascii)[1:-1] for ascii in (False, True))):
                start = text.find(form, at) if len(form) >= _LONG_ENOUGH else -1
                if start < 0 and len(form) >= _LONG_ENOUGH:
                    start = text.find(form)
                if start >= 0:
                    at = start + len(form)
                    yield Place(start, at, number, (start, at))
                    break

    def _changed(self, text: str, places: Sequence[Place]) -> int:
        """How many contents are not in the text once, as they are; those that have no letter to be found by are left
        out."""
        found: dict[int, list[Place]] = {}
        for place in places:
            found.setdefault(place.content, []).append(place)
        marked = {number for number, _ in self._marks.values()}
        same = {n for n, [p, *more] in found.items() if not more and text[p.start : p.stop] == _text(self.contents[n])}
        return len(marked - same)


class _StandIns:
    """Letters that stand in for others, one for one.

    Args:
        texts: all texts that are rendered, whose own letters are not used.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        used, halves = set[str](), {"low": set[str](), "high": set[str]()}
        for text in texts:
            used.update(() if text.isascii() else _PRIVATE.findall(text))
            if "\\ud" in text:
                used.update(_of_escape(*found.groups()) for found in _ESCAPE.finditer(text))
                for found in _HALVES.finditer(text):
                    halves[str(found.lastgroup)].add(found[str(found.lastgroup)])
        used.update(_of_escape(high, low) for high in halves["high"] for low in halves["low"])
        planes = chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        self._free = (letter for letter in map(chr, planes) if letter not in used)
        self._guards: dict[str, str] = {}  # by letter
        self._openers: dict[str, str] = {}
        self._opening: set[str] = set()  # openers, and marks that stand for one
        self._guarded: dict[int, str] = {}  # what the guards stand for
        self._marked: dict[int, str] = {}  # what marks and openers stand for: a letter as it is guarded

    def guarded(self, text: str) -> str:
        """Letters for a special token's; the same for the same letters."""
        for letter in text:
            if letter not in self._guards:
                self._guards[letter] = self._next()
                self._guarded[ord(self._guards[letter])] = letter
        return "".join(self._guards[letter] for letter in text)

    def opener(self, letter: str) -> str:
        """A letter for one that a special token begins with; the same for the same letter."""
        if letter not in self._openers:
            self._openers[letter] = self.mark(letter)
            self._opening.add(self._openers[letter])
        return self._openers[letter]

    def mark(self, letter: str) -> str:
        """Another letter at each call, for one of a text or one that stands in for it."""
        mark = self._next()
        self._marked[ord(mark)] = self._marked.get(ord(letter), letter)
        if letter in self._opening:
            self._opening.add(mark)
        return mark

    def openers_in(self, text: str) -> Iterator[int]:
        """Where letters that `opener` returned, or marks for them, are."""
        return (found.start() for found in _PRIVATE.finditer(text) if found[0] in self._opening)

    def guards_in(self, text: str) -> Iterator[tuple[int, int]]:
        """Where runs of letters that `guarded` returned are: (start, stop)."""
        start = stop = -1
        for found in _PRIVATE.finditer(text):
            if ord(found[0]) in self._guarded:
                if found.start() != stop:
                    if stop >= 0:
                        yield start, stop
                    start = found.start()
                stop = found.end()
        if stop >= 0:
            yield start, stop

    def without_marks(self, text: str) -> str:
        """The text with what marks and openers stand for."""
        return text.translate(self._marked)

    def put_right(self, text: str) -> str:
        """The text with what all letters stand for."""
        return text.translate(self._marked).translate(self._guarded)

    def unescaped(self, text: str) -> str:
        """The text with these letters where JSON has their escapes: templates may write ASCII only."""

        def letter_of(found: re.Match[str]) -> str:
            letter = _of_escape(*found.groups())
            return letter if ord(letter) in self._guarded or ord(letter) in self._marked else found[0]

        return _ESCAPE.sub(letter_of, text) if "\\ud" in text else text

    def _next(self) -> str:
        letter = next(self._free, None)
        if letter is None:
            raise InvalidInputError("the messages have more than 65,000 contents, or as many letters for private use")
        return letter


def _of_escape(high: str, low: str) -> str:
    """The letter of two surrogates in hexadecimal digits."""
    return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)


def _content_part(part: Any) -> Content:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind not in ("text", "chunk") or not isinstance(text, str):
        raise InvalidInputError(f"a content part is {{'type': 'text' or 'chunk', 'text': ...}}, got {part!r}")
    return text if kind == "text" else Passage(text, part.get("title", ""))


def _text(content: Content) -> str:
    return content.text if isinstance(content, Passage) else content


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds one of the texts, the longest at each place; in time that hardly depends on how many there are."""
    return re.compile(_prefix_tree(sorted({*texts} - {""})) or "(?!)")


def _prefix_tree(texts: Sequence[str]) -> str:
    """A pattern for texts in order, in which what they begin alike with stands once: ``<(?:s>|unk>)``."""
    if not texts:
        return ""
    alike = texts[0][: _common(texts[0], texts[-1])]
    rests = [text[len(alike) :] for text in texts if text != alike]
    branches = [_prefix_tree(list(group)) for _, group in groupby(rests, key=lambda rest: rest[0])]
    ending = "?" if len(rests) < len(texts) else ""
    return re.escape(alike) + (f"(?:{'|'.join(branches)}){ending}" if branches else "")


def _first_suited(text: str, letters: Sequence[str], places: Sequence[int]) -> int | None:
    """The first of the places whose letter can be marked: a letter or digit if there is one."""
    other = None
    for at in places:
        if letters[at] == text[at] and text[at].isalnum():
            return at
        if other is None and not text[at].isspace() and (letters[at] != text[at] or text[at] not in _UNSUITED):
            other = at
    return other


def _common(one: str, other: str) -> int:
    """How many characters two texts begin alike with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _strings_in(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    waiting = [value]  # no recursion: it may be nested deeply
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, Mapping):
            waiting += [*inner, *inner.values()]
        elif isinstance(inner, list | tuple):
            waiting += inner
