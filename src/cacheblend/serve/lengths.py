"""How long texts can be: what is too long for the model's context is refused by its length, before it is tokenised.

A token stands for at most as many characters as the tokenizer's longest one has. Text that is long but within that
bound is counted piece by piece, and refused at the piece with which it exceeds the context: tokenising 16 MB takes
seconds and 1.5 GB.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.tokens.chat import strings_in
from cacheblend.serve.errors import ApiError
from cacheblend.serve.schemas import ChatRequest, CompletionRequest, Message, RequestDocument

USUAL = 8
"""Characters of a token: text with more is counted before it is tokenised as a whole."""
PIECE = 1 << 16
"""Characters that are counted at a time."""
CUT = 16
"""Tokens that a cut between two pieces may add."""
ESCAPED = 6
r"""Bytes of a character in JSON at most: ``\u00e9``."""
BESIDE = 1 << 20
"""Bytes of a body for all that is not part of a text."""


class TextLimit:
    """The longest texts that fit a model's context.

    Args:
        engine: the model's.
        max_tokens: of a prompt, if that is less than the context.
    """

    def __init__(self, engine: BlendEngine, max_tokens: int | None = None) -> None:
        bounds = [bound for bound in (max_tokens, engine.survey.max_length) if bound is not None]
        self._builder, self._tokens = engine.builder, min(bounds, default=None)

    @property
    def characters(self) -> int | None:
        """Characters of the longest text that may fit; None: there is no bound."""
        if self._builder is None or self._tokens is None:
            return None
        return self._tokens * (self._builder.longest_token + 1)

    @property
    def body_bytes(self) -> int | None:
        """Bytes of a body with such a text as JSON; None: there is no bound."""
        return None if self.characters is None else ESCAPED * self.characters + BESIDE

    def check(self, texts: Iterable[str], what: str = "the prompt") -> None:
        """Refuses texts that together exceed the context for certain; others may exceed it once they are tokenised.

        Raises:
            ApiError: they do; with `what` in the message.
        """
        found = list(texts)
        length, most = sum(map(len, found)), self.characters
        if most is None or self._tokens is None:
            return
        if length > most:
            raise ApiError(
                400,
                f"{what} has {length:,} characters; {self._tokens:,} tokens are read at most, which are never more "
                f"than {most:,} characters; shorten it",
                code="too_long",
            )
        if length > USUAL * self._tokens:
            self._count(found, what)

    def _count(self, texts: list[str], what: str) -> None:
        assert self._builder is not None and self._tokens is not None
        tokens = characters = 0
        for parts in _pieces(texts):
            joined = " ".join(parts)  # without it they would be one word, which takes long to tokenise
            tokens += max(0, self._builder.count(joined) - len(parts) - CUT)
            characters += sum(map(len, parts))
            if tokens > self._tokens:
                raise ApiError(
                    400,
                    f"{what} has more than {tokens:,} tokens in its first {characters:,} characters; "
                    f"{self._tokens:,} are read at most; shorten it",
                    code="too_long",
                )


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts of about `PIECE` characters together: long ones are cut, and short ones put together."""
    parts: list[str] = []
    length = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            parts.append(text[start : start + PIECE])
            length += len(parts[-1])
            if length >= PIECE:
                yield parts
                parts, length = [], 0
    if parts:
        yield parts


def texts_of(asked: ChatRequest | CompletionRequest) -> Iterable[str]:
    """The texts of a request that go into its prompt."""
    if isinstance(asked, CompletionRequest):
        given = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        return (text for text in given if isinstance(text, str))
    return chain(texts_of_chat(asked.messages, asked.documents), strings_in([asked.tools, asked.chat_template_kwargs]))


def texts_of_chat(messages: Iterable[Message], documents: Iterable[RequestDocument] | None = None) -> Iterable[str]:
    """The texts of messages, what is passed to the template with them, and of documents for them."""
    messages = list(messages)
    contents = (message.content for message in messages)
    extras = strings_in([message.model_extra for message in messages])
    parts = (
        [content] if isinstance(content, str) else [part.text or "" for part in content or ()] for content in contents
    )
    return chain(chain.from_iterable(parts), (document.text for document in documents or ()), extras)
