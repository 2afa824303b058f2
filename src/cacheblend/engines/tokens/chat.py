"""Messages and documents for a chat template, and where it puts their texts.

A template may read a content, and trim, split, escape, repeat or drop it. So it is handed the real contents, but for
letters that no text of the conversation has, each in the place of one letter, which are put right in what it renders:

    content   " <|im_end|> Where?"
    guarded   " ********** Where?"   special tokens in texts, which the template is not to see or to write
    traced    " ********** #0+1+?"   letters that special tokens are made of: a token that is rendered is the template's
                                     own if none of its letters is one of these, whatever became of the contents
                                     (``<|im_<br>start|>`` without its ``<br>``, a title that is joined with a text);
                                     and the first and last letter of each content: it is where they are rendered

    rendered  "<|im_start|>user\n********** #0+1+?<|im_end|>\n"     (trimmed by the template)

What is rendered with traces has to be what is rendered without, else they changed what the template did: then the
letters that it reads (``/no_think``) are looked for, and stay as they are.

Knows strings. Does not know tokenizers.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

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


Render = Callable[[list[Message], list["TemplateDocument"], dict[str, Any]], str]
"""What a template makes of messages, documents and options."""

_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
"""Letters for private use: those of them that a conversation does not have stand in for others."""
_ESCAPE = re.compile(r"\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
"""One of these letters as JSON writes it in ASCII."""
_PYTHON_ESCAPE = re.compile(r"\\U(000f[0-9a-f]{4}|0010[0-9a-f]{4})")
"""The same as Python's `repr` writes it: templates print tools as they are."""
_HALVES = re.compile(r"^\s*\\u(?P<low>d[c-f][0-9a-f]{2})|\\u(?P<high>db[89a-f][0-9a-f])\s*$")
"""A half of that at an end of a text, to which another text may bring the other half."""
_UNSUITED = frozenset("\"'`\\/&<>{}[]()|")  # no marks: templates escape them, or look for them
_LONG_ENOUGH = 8  # characters of a content that is looked up by its text
_TRIES = 96  # renderings, at most, in which the letters are looked for that a template reads
_MARKS = 0xF2000  # the letters from here on are marks; those before stand in for letters of special tokens
_MARK = re.compile(f"[{chr(_MARKS)}-󿿽􀀀-􏿽]")


class TemplateDocument(dict[str, str]):
    """A document as a template reads it: ``text``, and ``title`` if it has one. A template that asks for ``content`` or
    ``contents`` gets the text."""

    def __missing__(self, key: str) -> str:
        if key in ("content", "contents"):
            return self["text"]
        if key == "title":
            return ""
        raise KeyError(key)


ROLES = frozenset(
    ["system", "user", "assistant", "tool", "developer", "function", "model", "observation", "ipython", "environment"]
)
_BRACKETS = "<>[]{}()|/ "


class Guard:
    """Special tokens that no text of a conversation may become.

    Args:
        texts: of the special tokens and the template's own markers.
        thoughts: what a model writes around its thoughts (``</think>``): templates look for it in earlier answers,
            where it stays as it is.
        words: what a template looks up, or compares with: texts beside contents that are one of these stay as they are,
            unless a special token is that word in brackets (``<tool_call>``), which a template may write around it.

    Attributes:
        roles: those that are known: templates write them into special tokens (``<|user|>``).
        pattern: finds one of `texts`.
        in_answers: finds one of `texts` or `thoughts`.
        letters: of which `texts` are made, but for spaces.
    """

    def __init__(self, texts: Iterable[str], thoughts: Iterable[str] = (), words: Iterable[str] = ()) -> None:
        texts = self.texts = frozenset(texts)
        self.thoughts = frozenset(thoughts)
        self.words = frozenset(words) - {text.strip(_BRACKETS) for text in texts}
        self.roles = ROLES | frozenset(words)
        self.pattern, self.in_answers = _any_of(texts), _any_of(texts | self.thoughts)
        self.letters = frozenset(letter for text in texts for letter in text if not letter.isspace())


@dataclass(frozen=True)
class Place:
    """Where a content, or a part of it, is in a rendered text.

    Attributes:
        start: its first character.
        stop: the one behind its last.
        content: its number, from 0.
    """

    start: int
    stop: int
    content: int


@dataclass(frozen=True)
class Rendered:
    """What a template made of a conversation.

    Attributes:
        text: as the template renders it without any stand-in.
        traced: the same, with other letters for those of the conversation that special tokens are made of.
        places: of the contents, ascending, without overlap.
        guarded: (start, stop) of special tokens that stood in a text of the conversation, ascending.
        own: (start, stop) of the template's special tokens and of thought markers in answers, ascending.
        changed: how many contents the text does not have exactly once as they are.
    """

    text: str
    traced: str
    places: tuple[Place, ...]
    guarded: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, int], ...]
    changed: int

    def front(self, stop: int, behind: str) -> "Rendered":
        """What is in front of a content that begins at `stop`, with another text behind it."""
        return Rendered(
            self.text[:stop] + behind,
            self.traced[:stop] + behind,
            tuple(place for place in self.places if place.stop <= stop),
            tuple(span for span in self.guarded if span[1] <= stop),
            tuple(span for span in self.own if span[1] <= stop),
            0,
        )

    def places_in(self, start: int, stop: int) -> Sequence[Place]:
        """The contents that have a character in a span."""
        first = bisect_left(self.places, start + 1, key=lambda place: place.stop)
        last = bisect_left(self.places, stop, key=lambda place: place.start)
        return self.places[first:last]

    def is_own(self, start: int, stop: int) -> bool:
        """Whether the template wrote all of a special token."""
        return self.text[start:stop] == self.traced[start:stop]

    def without_own(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What is left of a span without the template's special tokens that are in it."""
        at = bisect_left(self.own, (start, start))
        while at < len(self.own) and self.own[at][1] <= stop:
            yield start, self.own[at][0]
            start = self.own[at][1]
            at += 1
        yield start, stop


class _Field(NamedTuple):
    """Contents as one text.

    Attributes:
        text: as it is.
        guarded: with other letters for special tokens.
        left: (start, stop) of thought markers, which stay as they are.
        contents: (number, start, stop) of each.
    """

    text: str
    guarded: str
    left: list[tuple[int, int]]
    contents: list[tuple[int, int, int]]


_Letter = tuple[bool, str]
"""A letter of contents (True), or of the texts beside them: roles, titles, names, tools."""


class _Trace(NamedTuple):
    """Which letters a template is handed in place of the conversation's own, by code point.

    Attributes:
        contents: for those of contents.
        beside: for those of texts beside them.
        roles: for those of roles.
        read: letters of contents that stay as they are, and are not marked.
        marked: whether the first and last letter of each content are marked.
    """

    contents: Mapping[int, str]
    beside: Mapping[int, str]
    roles: Mapping[int, str]
    read: Set[str]
    marked: bool


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
        InvalidInputError: a content part that is neither text nor chunk; or an unknown role that is a part of a special
            token, of which the template may make that token.
    """

    def __init__(
        self, messages: Sequence[Message], documents: Sequence[Passage], options: Mapping[str, Any], guard: Guard
    ) -> None:
        self.contents: list[Content] = []
        self._messages, self._options, self._guard = list(messages), dict(options), guard
        for message in messages:
            self._check_role(message.get("role"))
        parts = [self._numbers(message) for message in messages]
        self._passages = [self._number(document) for document in documents]
        titles = [document.title for document in documents]
        beside = strings_in([self._messages, self._options])
        self._letters = _StandIns(chain(map(_text, self.contents), titles, beside))
        self._marks: dict[str, tuple[int, int]] = {}  # by letter: a content's number, and the place of its letter in it
        self._mark_of: dict[tuple[int, int], str] = {}  # the other way round
        # What the template is handed: of each message, None if it has no text; and of each document.
        self._fields = [None if part is None else self._field(at, part) for at, part in enumerate(parts)]
        self._documents = [self._field(None, [number]) for number in self._passages]
        self._parts = parts

    def render(self, render: Render) -> Rendered:
        """The conversation by a template. Documents that it does not use start the last user message.

        Raises:
            InvalidInputError: as `render`; or the template makes a special token of what is none in the conversation,
                in a way in which it cannot be told from the template's own.
        """
        guarded, everywhere = self._rendered(render, None), self._traced(render)
        if self._documents and not self._has_all_documents(guarded, everywhere):
            question = max((i for i, m in enumerate(self._messages) if m.get("role") == "user"), default=-1)
            self._fields[question] = self._field(question, [*self._passages, *(self._parts[question] or ())])
            self._documents = []
            guarded, everywhere = self._rendered(render, None), self._traced(render)
        traced = marked = self._same(everywhere, guarded)
        if traced is None:
            read = self._read(render, guarded)
            traced = self._same(self._traced(render, read, marked=False), guarded)
            traced = guarded if traced is None else traced  # of a template that tells the time
            marked = self._same(self._traced(render, read), guarded)
            self._check_own(render, guarded, traced, read)
        text = self._letters.put_right(guarded)
        places = self._places(self._places_by_text(text) if marked is None else self._marked_places(text, marked))
        spans, own = tuple(self._letters.guards_in(guarded)), tuple(self._own(text, traced))
        return Rendered(text, traced, places, spans, own, self._changed(text, places))

    # ---- what the template is handed --------------------------------------------------------------------

    def _check_role(self, role: Any) -> None:
        """Its letters are not traced, see `_trace`."""
        if not isinstance(role, str) or role in self._guard.roles:
            return
        words = re.findall(r"\w+", role)
        for token in sorted(self._guard.texts):
            if any(len(word) > 1 and word in token for word in words):
                raise InvalidInputError(
                    f"the role {role!r} is none of the template's, and a part of the special token {token!r}; use "
                    f"another one, as {', '.join(sorted(ROLES)[:4])}"
                )

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
        texts = [_text(self.contents[number]) for number in numbers]
        stops = list(accumulate(map(len, texts)))
        spans = [(number, stop - len(text), stop) for number, text, stop in zip(numbers, texts, stops, strict=True)]
        left = list[tuple[int, int]]()

        def stand_in(found: re.Match[str]) -> str:
            number, _, stop = spans[bisect_right(stops, found.start())]
            if found[0] not in self._guard.thoughts or found.end() > stop or isinstance(self.contents[number], Passage):
                return self._letters.guarded(found[0])
            left.append(found.span())
            return found[0]

        text = "".join(texts)
        guarded = self._guard.in_answers.sub(stand_in, text) if is_answer else self._guarded(text)
        return _Field(text, guarded, left, spans)

    def _guarded(self, text: str) -> str:
        return self._guard.pattern.sub(lambda found: self._letters.guarded(found[0]), text)

    def _content(self, field: _Field, trace: _Trace | None) -> str:
        """A field as the template is handed it; `trace`: None, it is not traced."""
        if trace is None:
            return field.guarded
        pieces, at = list[str](), 0
        for start, stop in [*field.left, (len(field.text), len(field.text))]:
            pieces += [field.guarded[at:start].translate(trace.contents), field.guarded[start:stop]]
            at = stop
        if not trace.marked:
            return "".join(pieces)
        letters = list("".join(pieces))
        fixed = {at for span in field.left for at in range(*span)}
        for number, start, stop in field.contents:
            free = [at for at in range(start, stop) if at not in fixed] if fixed else range(start, stop)
            for places in (free, free[::-1]):
                suited = _first_suited(field.guarded, field.text, places, trace.read, self._guard.letters)
                if suited is not None:
                    letters[suited] = self._mark(number, suited - start, field.guarded[suited])
        return "".join(letters)

    def _mark(self, number: int, place: int, letter: str) -> str:
        if (number, place) not in self._mark_of:
            mark = self._mark_of[number, place] = self._letters.mark(letter)
            self._marks[mark] = number, place
        return self._mark_of[number, place]

    def _trace(self, read: Set[_Letter], *, marked: bool) -> _Trace:
        """Of all letters of special tokens but those that are read."""
        contents, beside = (
            {ord(letter): self._letters.traced(letter) for letter in self._guard.letters if (kind, letter) not in read}
            for kind in (True, False)
        )
        # Templates write roles into special tokens (``<|user|>``), those of harmless messages, too.
        roles = {code: letter for code, letter in beside.items() if not chr(code).isalnum() and chr(code) != "_"}
        return _Trace(contents, beside, roles, {letter for is_content, letter in read if is_content}, marked)

    def _beside(self, value: Any, trace: _Trace | None) -> Any:
        """A JSON value for the template; itself where nothing stands in for anything."""
        if trace is None:
            is_free = not any(map(self._guard.pattern.search, strings_in(value)))
            return value if is_free else _with_texts(value, self._guarded)

        def change(text: str) -> str:
            guarded = self._guarded(text)
            return guarded if text in self._guard.words else guarded.translate(trace.beside)

        return _with_texts(value, change)

    def _handed(self, message: Message, field: _Field | None, trace: _Trace | None) -> Message:
        """A message for the template, its keys in order."""
        handed: Message = {}
        for key, value in message.items():
            if key == "content" and field is not None:
                handed[key] = ""
            elif key == "role" and isinstance(value, str):
                handed[key] = self._guarded(value).translate({} if trace is None else trace.roles)
            else:
                handed |= self._beside({key: value}, trace)
        return handed if field is None else handed | {"content": self._content(field, trace)}

    def _rendered(self, render: Render, trace: _Trace | None) -> str:
        messages = [self._handed(*pair, trace) for pair in zip(self._messages, self._fields, strict=True)]
        documents = []
        for number, field in zip(self._passages, self._documents, strict=False):
            passage = self.contents[number]
            title = self._beside(passage.title, trace) if isinstance(passage, Passage) else ""
            text = self._content(field, trace)
            documents.append(TemplateDocument({"title": title, "text": text} if title else {"text": text}))
        options = {
            name: value if name == "chat_template" else self._beside(value, trace)
            for name, value in self._options.items()
        }
        return self._letters.unescaped(render(messages, documents, options))

    def _traced(self, render: Render, read: Set[_Letter] = frozenset(), *, marked: bool = True) -> str | None:
        """With traces of all letters but those that are read; None if the template refuses them."""
        try:
            return self._rendered(render, self._trace(read, marked=marked))
        except InvalidInputError:
            return None

    def _same(self, traced: str | None, guarded: str) -> str | None:
        """The text with traces if it is the other one but for these."""
        return traced if traced is not None and self._letters.without_traces(traced) == guarded else None

    # ---- what the template reads ------------------------------------------------------------------------

    def _read(self, render: Render, guarded: str) -> Set[_Letter]:
        """Letters of the conversation that the template reads: with others in their place it does something else."""
        titles = (content.title for content in self.contents if isinstance(content, Passage))
        beside = chain(strings_in([self._messages, self._options]), titles)
        contents = (field.guarded for field in [*self._fields, *self._documents] if field)
        # Halves, and halves of these, of all letters; first those of no word, of which most special tokens have some.
        waiting = deque[list[_Letter]]()
        for texts, is_content in ((contents, True), (beside, False)):
            letters = sorted(self._guard.letters & set[str]().union(*texts))
            for is_word in (False, True):
                waiting.append([(is_content, letter) for letter in letters if letter.isalnum() == is_word])
        read = set(chain.from_iterable(waiting))
        tries = 0
        while waiting and tries < _TRIES:
            some = waiting.popleft()
            tries += 1
            if self._same(self._traced(render, read - {*some}, marked=False), guarded) is not None:
                read -= {*some}
            elif len(some) > 1:
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
        return read

    def _check_own(self, render: Render, guarded: str, traced: str, read: Set[_Letter]) -> None:
        """Raises `InvalidInputError` if a special token of which the template reads all letters may be made of the
        conversation's: with others in the place of any of its letters, other special tokens are rendered."""
        text, letters = self._letters.put_right(guarded), {letter for _, letter in read}
        own = [text[start:stop] for start, stop in self._own(text, traced)]

        def is_rendered_without(letter: str) -> bool:
            other = self._traced(render, read - {(True, letter), (False, letter)}, marked=False)
            found = self._letters.put_right(other or "")
            return own == [found[start:stop] for start, stop in self._own(found, other or "")]

        for token in {token for token in own if {*token} & self._guard.letters <= letters}:
            if not any(map(is_rendered_without, sorted({*token} & self._guard.letters))):
                raise InvalidInputError(
                    f"the chat template makes {token!r}, which is a special token, of texts that are none; leave out "
                    "of the messages what it takes away or replaces"
                )

    def _own(self, text: str, traced: str) -> Iterator[tuple[int, int]]:
        """Where special tokens are of which no letter is the conversation's."""
        found = (found.span() for found in self._guard.pattern.finditer(text))
        return ((start, stop) for start, stop in found if text[start:stop] == traced[start:stop])

    # ---- what it made of it -----------------------------------------------------------------------------

    def _has_all_documents(self, guarded: str, traced: str | None) -> bool:
        """Whether the template used each document: its marks are rendered, or its text if it has none."""
        text, numbers = self._letters.put_right(guarded), {number for number, _, _ in self._marks_in(traced or "")}
        marked = set[int]() if traced is None else {number for number, _ in self._marks.values()}
        return all(n in numbers if n in marked else _text(self.contents[n]) in text for n in self._passages)

    def _marks_in(self, marked: str) -> Iterator[tuple[int, int, int]]:
        """The marks of a text: a content's number, the place of its letter in it, and that in the text."""
        found = ((found[0], found.start()) for found in _MARK.finditer(marked))
        return ((*self._marks[letter], position) for letter, position in found if letter in self._marks)

    @staticmethod
    def _places(found: Iterable[Place]) -> tuple[Place, ...]:
        places: list[Place] = []
        for place in sorted(found, key=lambda place: (place.start, -place.stop)):
            if place.start < place.stop and (not places or place.start >= places[-1].stop):
                places.append(place)
        return tuple(places)

    def _marked_places(self, text: str, marked: str) -> Iterator[Place]:
        """The contents by their marks; text around these that is the content's, too, belongs to them."""
        seen: dict[int, list[tuple[int, int]]] = {}  # by content: (position in the text, place in the content)
        for number, place, position in self._marks_in(marked):
            seen.setdefault(number, []).append((position, place))
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
                yield Place(start - before, stop + 1 + behind_it, number)

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
                    yield Place(start, at, number)
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
            used.update(chr(int(digits, 16)) for digits in _PYTHON_ESCAPE.findall(text) if "\\U" in text)
            if "\\ud" in text:
                used.update(_of_escape(*found.groups()) for found in _ESCAPE.finditer(text))
                for found in _HALVES.finditer(text):
                    halves[str(found.lastgroup)].add(found[str(found.lastgroup)])
        used.update(_of_escape(high, low) for high in halves["high"] for low in halves["low"])
        planes = (range(0xF0000, _MARKS), chain(range(_MARKS, 0xFFFFE), range(0x100000, 0x10FFFE)))
        self._free, self._free_marks = ((c for c in map(chr, plane) if c not in used) for plane in planes)
        self._guards: dict[str, str] = {}  # by letter
        self._traces: dict[str, str] = {}
        self._guarded: dict[int, str] = {}  # what the guards stand for
        self._traced: dict[int, str] = {}  # what marks and traces stand for: a letter as it is guarded

    def guarded(self, text: str) -> str:
        """Letters for a special token's; the same for the same letters."""
        for letter in text:
            if letter not in self._guards:
                self._guards[letter] = self._next(self._free)
                self._guarded[ord(self._guards[letter])] = letter
        return "".join(self._guards[letter] for letter in text)

    def traced(self, letter: str) -> str:
        """A letter for one of which special tokens are made; the same for the same letter."""
        if letter not in self._traces:
            self._traces[letter] = self._stand_in(self._free, letter)
        return self._traces[letter]

    def mark(self, letter: str) -> str:
        """Another letter at each call, for one of a text or one that stands in for it."""
        return self._stand_in(self._free_marks, letter)

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

    def without_traces(self, text: str) -> str:
        """The text with what marks and traces stand for."""
        return text.translate(self._traced)

    def put_right(self, text: str) -> str:
        """The text with what all letters stand for."""
        return text.translate(self._traced).translate(self._guarded)

    def unescaped(self, text: str) -> str:
        """The text with these letters where JSON or Python has their escapes: templates may write ASCII only."""

        def letter_of(found: re.Match[str]) -> str:
            digits = found.groups()
            letter = _of_escape(*digits) if len(digits) == 2 else chr(int(digits[0], 16))
            return letter if ord(letter) in self._guarded or ord(letter) in self._traced else found[0]

        text = _PYTHON_ESCAPE.sub(letter_of, text) if "\\U" in text else text
        return _ESCAPE.sub(letter_of, text) if "\\ud" in text else text

    def _stand_in(self, free: Iterator[str], letter: str) -> str:
        other = self._next(free)
        self._traced[ord(other)] = letter
        return other

    @staticmethod
    def _next(free: Iterator[str]) -> str:
        letter = next(free, None)
        if letter is None:
            raise InvalidInputError("the messages have more than 60,000 contents, or as many letters for private use")
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


def _first_suited(guarded: str, text: str, places: Sequence[int], read: Set[str], traced: Set[str]) -> int | None:
    """The first of the places whose letter can be marked: a letter or digit if there is one."""
    other = None
    for at in places:
        if text[at] in read or text[at].isspace():
            continue
        if guarded[at] == text[at] and text[at].isalnum():
            return at
        if other is None and (guarded[at] != text[at] or text[at] in traced or text[at] not in _UNSUITED):
            other = at
    return other


def _common(one: str, other: str) -> int:
    """How many characters two texts begin alike with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def strings_in(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included, and its numbers as text: a template writes them out, too."""
    waiting = [value]  # no recursion: it may be nested deeply
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, Mapping):
            waiting += [*inner, *inner.values()]
        elif isinstance(inner, list | tuple):
            waiting += inner
        elif inner is not None:
            yield str(inner)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed, keys included."""
    top = [value]
    waiting: list[tuple[Any, Any]] = [(top, 0)]  # no recursion: it may be nested deeply
    while waiting:
        holder, key = waiting.pop()
        inner = holder[key]
        if isinstance(inner, str):
            holder[key] = change(inner)
        elif isinstance(inner, Mapping):
            holder[key] = copy = {change(k) if isinstance(k, str) else k: v for k, v in inner.items()}
            waiting += [(copy, k) for k in copy]
        elif isinstance(inner, list | tuple):
            holder[key] = items = list(inner)
            waiting += [(items, at) for at in range(len(items))]
    return top[0]
