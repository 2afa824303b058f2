"""A text that is reused as a unit, in whatever form callers have it. Knows the forms, not the libraries."""

from collections.abc import Mapping
from dataclasses import dataclass

from cacheblend.core.errors import InvalidInputError, shown

_FORMS = (
    'a Passage, a text, {"text": ..., "title": ...}, or a document of LangChain, LlamaIndex or Haystack (page_content, '
    "get_content, content)"
)
_TEXT_KEYS = ("text", "content", "contents", "page_content")


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
                raise InvalidInputError(f"a passage's {name} must be a text, got {shown(getattr(self, name))}")

    @staticmethod
    def of(value: object, where: str = "") -> "Passage":
        """A passage of what callers have: a passage; a text; a mapping with the text as ``text``, ``content``,
        ``contents`` or ``page_content``, and maybe a ``title``; a document of LangChain (`page_content`) or Haystack
        (`content`); a node of LlamaIndex, with or without a score, as LlamaIndex shows it to a model (`get_content`);
        any object with a `text`. A title is taken from the metadata, too (``title`` or ``source``). `where` names its
        place for messages. Raises `InvalidInputError`: it is none of these, or a message of a chat."""
        if isinstance(value, Passage):
            return value
        if isinstance(value, str):
            return Passage(value)
        text, title = _text_and_title(value)
        if isinstance(text, str):
            return Passage(text, title)
        if (isinstance(value, Mapping) and "role" in value) or hasattr(value, "role"):
            why = f"not a message, {shown(value)}"
        elif isinstance(value, Mapping) and sum(isinstance(value.get(key), str) for key in _TEXT_KEYS) > 1:
            why = f"with one text, not several under text, content, contents and page_content: {shown(value)}"
        else:
            why = f"got {shown(value)}"
        raise InvalidInputError(f"{where}{': ' if where else ''}a passage is {_FORMS}, {why}")

    @staticmethod
    def is_like(value: object) -> bool:
        """Whether `of` makes a passage of it."""
        return isinstance(value, Passage | str) or isinstance(_text_and_title(value)[0], str)


def _text_and_title(value: object) -> tuple[object, str]:
    """What a mapping or a document of another library has as text, None if nothing, and as title. A message has none:
    it has a role, or LangChain's and LlamaIndex's `additional_kwargs`."""
    text: object = None
    if isinstance(value, Mapping):
        texts = [value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)]
        text = texts[0] if len(texts) == 1 and "role" not in value else None
        metadata = value.get("metadata") or value.get("meta")
        title = value.get("title")
    else:
        is_message = isinstance(value, type) or hasattr(value, "role") or hasattr(value, "additional_kwargs")
        for name in () if is_message else ("page_content", "get_content", "content", "text"):
            found = getattr(value, name, None)
            if name == "get_content" and callable(found):
                try:
                    found = found(metadata_mode="llm")
                except (TypeError, ValueError):
                    found = found()
            if isinstance(found, str):
                text = found
                break
        metadata = getattr(value, "metadata", None) or getattr(value, "meta", None)
        title = getattr(value, "title", None)
    if not title and isinstance(metadata, Mapping):
        title = metadata.get("title") or metadata.get("source")
        title = title if isinstance(title, str) else ""
    return text, title or ""
