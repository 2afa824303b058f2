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

from cacheblend.core.errors import InvalidInputError


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
    def of(value: object) -> "Passage":
        """A passage of what callers have: a passage, a text, or ``{"text": ..., "title": ...}``.

        Raises:
            InvalidInputError: it is none of these.
        """
        if isinstance(value, Passage):
            return value
        if isinstance(value, str):
            return Passage(value)
        if isinstance(value, Mapping) and "text" in value:
            return Passage(value["text"], value.get("title") or "")
        raise InvalidInputError(
            f'a passage is a Passage, a text or {{"text": ..., "title": ...}}, not {type(value).__name__}'
        )


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
