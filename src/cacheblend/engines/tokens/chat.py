"""The contents of chat messages, kept apart from the text that a chat template puts around them.

    messages   {"role": "user", "content": [text "Read:", chunk A]}        contents 0, 1
    marked     {"role": "user", "content": "<0><1>"}                       <n>: a placeholder that no text contains
    rendered   "<|im_start|>user\\n<0><1><|im_end|>\\n"                      by the template
    pieces     ("<|im_start|>user\\n", text "Read:")  ("", chunk A)  ("<|im_end|>\\n", None)

Knows strings. Does not know tokenizers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend.core.errors import InvalidInputError, shown


@dataclass(frozen=True)
class Passage:
    """A text that is reused as a unit at any position.

    Attributes:
        text: what the model reads.
        title: a name for people; not read by the model.
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


class MarkedContents:
    """Contents that placeholders stand for while a template renders messages."""

    def __init__(self) -> None:
        self._contents: list[Content] = []

    def mark(self, content: Content) -> str:
        """The placeholder of one more content."""
        self._contents.append(content)
        return _placeholder(len(self._contents) - 1)

    def mark_message(self, message: Message) -> Message:
        """The message with placeholders for its content.

        Raises:
            InvalidInputError: a content part that is neither text nor chunk.
        """
        content = message.get("content")
        if isinstance(content, list):
            parts = [_content_part(part) for part in content]
            return {**message, "content": "".join(self.mark(part) for part in parts)}
        return {**message, "content": self.mark(content)} if isinstance(content, str) and content else message

    def pieces(self, rendered: str) -> Iterator[tuple[str, int, Content | None]]:
        """The template's own text and the content after it with its number from 1, in the order of the rendered text;
        the last text has no content after it.

        Raises:
            InvalidInputError: the template dropped or repeated a content.
        """
        rest = rendered
        for index in self._order(rendered):
            frame, _, rest = rest.partition(_placeholder(index))
            yield frame, index + 1, self._contents[index]
        yield rest, len(self._contents) + 1, None

    def _order(self, rendered: str) -> list[int]:
        """The contents in the order in which the template put them; each must occur once."""
        count = len(self._contents)
        for index in range(count):
            found = rendered.count(_placeholder(index))
            if found != 1:
                raise InvalidInputError(
                    f"the chat template used content {index + 1} of the messages {found} times, not once"
                )
        return sorted(range(count), key=lambda index: rendered.index(_placeholder(index)))


def put_before_question(messages: list[Message], documents: list[str]) -> list[Message]:
    """The messages with documents at the start of the last user message."""
    last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=len(messages) - 1)
    question = messages[last_user]
    moved = {**question, "content": "".join(documents) + (question.get("content") or "")}
    return [*messages[:last_user], moved, *messages[last_user + 1 :]]


def _content_part(part: Any) -> Content:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind not in ("text", "chunk") or not isinstance(text, str):
        raise InvalidInputError(f"a content part is {{'type': 'text' or 'chunk', 'text': ...}}, got {part!r}")
    return text if kind == "text" else Passage(text, part.get("title", ""))


def _placeholder(index: int) -> str:
    # Private-use characters: templates do not look for them, and a prompt's own texts are never rendered with them.
    return f"\ue0c0{index}\ue0c1"
