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
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

from cacheblend.core.errors import InvalidInputError, shown
from cacheblend.engines.tokens.passage import Passage

Content = str | Passage
Message = dict[str, Any]
"""``{"role": ..., "content": ...}``; content is a string, or parts ``{"type": "text" | "chunk", "text": ...}``."""
Render = Callable[[list[Message], list["TemplateDocument"], dict[str, Any]], str]  # of messages, documents, options
_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
"""Letters for private use: those of them that a conversation does not have stand in for others."""
_ESCAPE = re.compile(r"\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")  # one of these letters as JSON writes it in ASCII
_PYTHON_ESCAPE = re.compile(r"\\U(000f[0-9a-f]{4}|0010[0-9a-f]{4})")  # as Python's `repr` does
_HALVES = re.compile(r"^\s*\\u(?P<low>d[c-f][0-9a-f]{2})|\\u(?P<high>db[89a-f][0-9a-f])\s*$")
"""A half of that at an end of a text, to which another text may bring the other half."""
_UNSUITED = frozenset("\"'`\\/&<>{}[]()|")  # no marks: templates escape them, or look for them
_LONG_ENOUGH = 8  # characters of a content that is looked up by its text
_TRIES = 96  # renderings, at most, in which the letters are looked for that a template reads
_MARKS = 0xF2000  # the letters from here on are marks; those before stand in for letters of special tokens
_MARK = re.compile(f"[{chr(_MARKS)}-󿿽􀀀-􏿽]")


class TemplateDocument(dict[str, str]):
    """A document as templates read it: ``text``, ``title`` if it has one; ``content`` and ``contents`` are the text."""

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
_NAME = re.compile(r"[\w .-]+")
_SPLITS = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix"}
)
"""Methods of texts that look for their argument."""


@dataclass(frozen=True)
class TemplateSource:
    """What a chat template's source says of what it writes and reads, which is not all that is in its code."""

    texts: str  # what it may write: the text between its tags, and its constants, one a line
    words: frozenset[str]  # its names, and constants that are like names: what it may look up, or compare with
    sought: frozenset[str]  # constants that it looks for in other texts (``'</think>' in content``)

    @staticmethod
    @lru_cache(8)
    def of(templates: tuple[str, ...]) -> "TemplateSource":
        """Of one or more templates; nothing of one that is not Jinja."""
        from jinja2 import Environment, TemplateSyntaxError

        lexer = Environment().lexer
        texts, words, sought = list[str](), set[str](), set[str]()
        for template in templates:
            try:
                tokens = list(lexer.tokenize(template))
            except TemplateSyntaxError:
                continue
            texts += [str(token.value) for token in tokens if token.type in ("data", "string")]
            names = {str(token.value) for token in tokens if token.type in ("name", "string")}
            words |= {name for name in names if _NAME.fullmatch(name)}
            for before, bracket, token, behind in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
                is_tested = behind.type == "name" and behind.value in ("in", "not")
                is_split = before.type == "name" and before.value in _SPLITS and bracket.type == "lparen"
                if token.type == "string" and (is_tested or is_split):
                    sought.add(str(token.value))
        return TemplateSource("\n".join(texts), frozenset(words), frozenset(sought))


class Guard:
    """Special tokens that no text of a conversation may become: `texts`, of the tokens and the template's own markers.
    What a model writes around its `thoughts` (``</think>``) stays as it is in earlier answers, where templates look for
    it. So do texts beside contents that are one of the `words` that a template looks up, or compares with, unless a
    special token is that word in brackets (``<tool_call>``), which a template may write around it."""

    def __init__(self, texts: Iterable[str], thoughts: Iterable[str] = (), words: Iterable[str] = ()) -> None:
        texts = self.texts = frozenset(texts)
        self.thoughts = frozenset(thoughts)
        self.words = frozenset(words) - {text.strip(_BRACKETS) for text in texts}
        self.roles = ROLES | frozenset(words)  # templates write them into special tokens (``<|user|>``)
        self.pattern, self.in_answers = _any_of(texts), _any_of(texts | self.thoughts)
        self.letters = frozenset(letter for text in texts for letter in text if not letter.isspace())


@dataclass(frozen=True)
class Place:
    """Where a content, or a part of it, is in a rendered text; contents are numbered from 0."""

    start: int
    stop: int
    content: int


@dataclass(frozen=True)
class Rendered:
    """What a template made of a conversation."""

    text: str  # as the template renders it without any stand-in
    traced: str  # the same, with other letters for those of the conversation that special tokens are made of
    places: tuple[Place, ...]  # of the contents, ascending, without overlap
    guarded: tuple[tuple[int, int], ...]  # (start, stop) of special tokens in texts of the conversation, ascending
    own: tuple[tuple[int, int], ...]  # of the template's special tokens and of thought markers in answers, ascending
    changed: int  # how many contents the text does not have exactly once as they are

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
        return self.places[first : bisect_left(self.places, stop, key=lambda place: place.start)]

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
    text: str
    guarded: str  # with other letters for special tokens
    left: list[tuple[int, int]]  # (start, stop) of thought markers, which stay as they are
    contents: list[tuple[int, int, int]]  # (number, start, stop) of each


_Letter = tuple[bool, str]  # a letter of contents (True), or of the texts beside them: roles, titles, names, tools


class _Trace(NamedTuple):
    """Letters that a template is handed in place of the conversation's own, by code point."""

    contents: Mapping[int, str]
    beside: Mapping[int, str]
    roles: Mapping[int, str]
    read: Set[str]  # letters of contents that stay as they are, and are not marked
    marked: bool  # whether the first and last letter of each content are marked


class Conversation:
    """Messages and documents, to be rendered by a template. `contents`: of the messages, then the documents. Raises
    `InvalidInputError`: a content part that is neither text nor chunk; or an unknown role that is a part of a special
    token, of which the template may make that token."""

    def __init__(
        self, messages: Sequence[Message], documents: Sequence[Passage], options: Mapping[str, Any], guard: Guard
    ) -> None:
        self.contents: list[Content] = []
        self._messages, self._options, self._guard = list(messages), dict(options), guard
        self._numbers = [self._number(message) for message in messages]  # of each one's contents; None: it has no text
        self._passages = list(range(len(self.contents), len(self.contents) + len(documents)))
        self.contents += documents
        titles = [document.title for document in documents]
        self._letters = _StandIns(chain(map(_text, self.contents), titles, strings_in([self._messages, self._options])))
        self._marks: dict[str, tuple[int, int]] = {}  # by letter: a content's number, and the place of its letter in it
        self._mark_of: dict[tuple[int, int], str] = {}  # the other way round
        # What the template is handed: of each message, None if it has no text; and of each document.
        self._fields = [None if found is None else self._field(at, found) for at, found in enumerate(self._numbers)]
        self._documents = [self._field(None, [number]) for number in self._passages]

    def render(self, render: Render) -> Rendered:
        """The conversation by a template. Documents that it does not use start the last user message. Raises
        `InvalidInputError`: as `render`; or the template makes a special token of what is none in the conversation, in
        a way in which it cannot be told from the template's own."""
        # Rendered twice: with special tokens guarded, and with all letters of which these are made traced as well.
        guarded, everywhere = self._rendered(render, None), self._traced(render)
        if self._documents and not self._uses_documents(guarded, everywhere):
            question = max((i for i, m in enumerate(self._messages) if m.get("role") == "user"), default=-1)
            self._fields[question] = self._field(question, [*self._passages, *(self._numbers[question] or ())])
            self._documents = []
            guarded, everywhere = self._rendered(render, None), self._traced(render)

        # Where traces changed what the template did, it reads letters of the conversation, which stay as they are.
        traced = marked = self._same(everywhere, guarded)
        if traced is None:
            read = self._read(render, guarded)
            traced = self._same(self._traced(render, read, marked=False), guarded)
            traced = guarded if traced is None else traced  # of a template that tells the time
            marked = self._same(self._traced(render, read), guarded)
            self._check_own(render, guarded, traced, read)

        # Contents are where their marks are, or else their texts.
        text = self._letters.put_right(guarded)
        places: list[Place] = []
        found = self._places_by_text(text) if marked is None else self._places_by_marks(text, marked)
        for place in sorted(found, key=lambda place: (place.start, -place.stop)):
            if place.start < place.stop and (not places or place.start >= places[-1].stop):
                places.append(place)
        times = Counter(place.content for place in places)
        once = (place for place in places if times[place.content] == 1)
        as_is = {p.content for p in once if text[p.start : p.stop] == _text(self.contents[p.content])}
        changed = {number for number, _ in self._marks.values()} - as_is  # of those that have a letter to be found by
        spans, own = tuple(self._letters.guards_in(guarded)), tuple(self._own(text, traced))
        return Rendered(text, traced, tuple(places), spans, own, len(changed))

    # ---- what the template is handed --------------------------------------------------------------------

    def _number(self, message: Message) -> list[int] | None:
        """Adds a message's contents; their numbers, None if it has no text."""
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and role not in self._guard.roles:  # its letters are not traced, see `_rendered`
            words = [word for word in re.findall(r"\w+", role) if len(word) > 1]
            token = next((token for token in sorted(self._guard.texts) if any(word in token for word in words)), None)
            if token is not None:
                raise InvalidInputError(
                    f"the role {role!r} is none of the template's, and a part of the special token {token!r}; use "
                    f"another one, as {', '.join(sorted(ROLES)[:4])}"
                )
        parts: list[Content] = [content] if isinstance(content, str) and content else []
        if isinstance(content, list):
            for part in content:
                kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
                if kind not in ("text", "chunk") or not isinstance(text, str):
                    what = "a content part is {'type': 'text' or 'chunk', 'text': ...}"
                    raise InvalidInputError(f"{what}, got {shown(part)}")
                parts.append(text if kind == "text" else Passage(text, part.get("title", "")))
        elif not parts:
            return None
        self.contents += parts
        return list(range(len(self.contents) - len(parts), len(self.contents)))

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

    def _rendered(self, render: Render, trace: _Trace | None) -> str:
        """What the template makes of the conversation, special tokens guarded, and traced unless `trace` is None."""
        messages, documents = list[Message](), list[TemplateDocument]()
        for message, field in zip(self._messages, self._fields, strict=True):
            content = None if field is None else self._content(field, trace)
            handed: Message = {}
            for key, value in message.items():  # in their order
                if key == "content" and content is not None:
                    handed[key] = content
                elif key == "role" and isinstance(value, str):
                    # Templates write roles into special tokens (``<|user|>``), those of harmless messages, too.
                    handed[key] = self._guarded(value).translate({} if trace is None else trace.roles)
                else:
                    handed |= self._beside({key: value}, trace)
            messages.append(handed if content is None else handed | {"content": content})
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
                if suited is None:
                    continue
                key = number, suited - start
                if key not in self._mark_of:
                    self._mark_of[key] = self._letters.mark(field.guarded[suited])
                    self._marks[self._mark_of[key]] = key
                letters[suited] = self._mark_of[key]
        return "".join(letters)

    def _beside(self, value: Any, trace: _Trace | None) -> Any:
        """A JSON value for the template; itself where nothing stands in for anything."""
        if trace is None:
            is_free = not any(map(self._guard.pattern.search, strings_in(value)))
            return value if is_free else _with_texts(value, self._guarded)

        def change(text: str) -> str:
            guarded = self._guarded(text)
            return guarded if text in self._guard.words else guarded.translate(trace.beside)

        return _with_texts(value, change)

    def _traced(self, render: Render, read: Set[_Letter] = frozenset(), *, marked: bool = True) -> str | None:
        """With traces of all letters of special tokens but those that are read; None if the template refuses them."""
        contents, beside = (
            {ord(letter): self._letters.traced(letter) for letter in self._guard.letters if (kind, letter) not in read}
            for kind in (True, False)
        )
        roles = {code: letter for code, letter in beside.items() if not chr(code).isalnum() and chr(code) != "_"}
        in_contents = {letter for is_content, letter in read if is_content}
        try:
            return self._rendered(render, _Trace(contents, beside, roles, in_contents, marked))
        except InvalidInputError:
            return None

    def _same(self, traced: str | None, guarded: str) -> str | None:
        return traced if traced is not None and self._letters.without_traces(traced) == guarded else None

    # ---- what it made of it -----------------------------------------------------------------------------

    def _own(self, text: str, traced: str) -> Iterator[tuple[int, int]]:
        found = (found.span() for found in self._guard.pattern.finditer(text))
        return ((start, stop) for start, stop in found if text[start:stop] == traced[start:stop])

    def _uses_documents(self, guarded: str, traced: str | None) -> bool:
        """Whether the template used each document: its marks are rendered, or its text if it has none."""
        text, numbers = self._letters.put_right(guarded), {number for number, _, _ in self._marks_in(traced or "")}
        marked = set[int]() if traced is None else {number for number, _ in self._marks.values()}
        return all(n in numbers if n in marked else _text(self.contents[n]) in text for n in self._passages)

    def _marks_in(self, marked: str) -> Iterator[tuple[int, int, int]]:
        """The marks of a text: a content's number, the place of its letter in it, and that in the text."""
        found = ((found[0], found.start()) for found in _MARK.finditer(marked))
        return ((*self._marks[letter], position) for letter, position in found if letter in self._marks)

    def _places_by_marks(self, text: str, marked: str) -> Iterator[Place]:
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

    # ---- where the template reads letters of the conversation -------------------------------------------

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


class _StandIns:
    """Letters that stand in for others, one for one; none of those of the texts that are rendered."""

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
            self._traces[letter] = self._next(self._free)
            self._traced[ord(self._traces[letter])] = letter
        return self._traces[letter]

    def mark(self, letter: str) -> str:
        """Another letter at each call, for one of a text or one that stands in for it."""
        other = self._next(self._free_marks)
        self._traced[ord(other)] = letter
        return other

    def guards_in(self, text: str) -> Iterator[tuple[int, int]]:
        """Where runs of letters that `guarded` returned are: (start, stop)."""
        runs = re.compile(f"[{''.join(self._guards.values())}]+" if self._guards else "(?!)")
        return (found.span() for found in runs.finditer(text))

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

    @staticmethod
    def _next(free: Iterator[str]) -> str:
        letter = next(free, None)
        if letter is None:
            raise InvalidInputError("the messages have more than 60,000 contents, or as many letters for private use")
        return letter


def _of_escape(high: str, low: str) -> str:
    return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)


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
