"""Splits a long text into passages of a given number of tokens, at sentence ends."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cacheblend.core.errors import InvalidInputError
from cacheblend.data.files import Text
from cacheblend.data.questions import QuestionRow

SHORTEST = 8
NEAR = 0.8
_SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]]*\s+|[。！？]+[”’」』）]*\s*|\n\s*")  # noqa: RUF001

CountTokens = Callable[[str], int]


def split_contexts(rows: Sequence[QuestionRow], count: CountTokens, tokens: int) -> list[QuestionRow]:
    """The rows with every whole context split into passages; other rows are unchanged."""
    return [
        replace(row, passages=tuple(Text(part, "") for part in split_text(row.passages[0].text, count, tokens)))
        if row.is_context
        else row
        for row in rows
    ]


def split_text(text: str, count: CountTokens, tokens: int) -> list[str]:
    """Passages of at most `tokens` tokens, each with as many whole sentences as fit, stripped of white space.

    A sentence that is too long is cut between words, and a word that is too long between characters.

    Args:
        text: text that is not blank.
        count: counts the tokens of a text.
        tokens: most tokens of a passage.

    Raises:
        InvalidInputError: `tokens` is below `SHORTEST`.
    """
    if tokens < SHORTEST:
        raise InvalidInputError(f"a passage must allow at least {SHORTEST} tokens, got {tokens}")
    parts: list[str] = []
    held, held_tokens = "", 0
    for sentence in _sentences(text):
        for piece in _pieces(sentence, count, tokens):
            size = count(piece)
            sum_ = held_tokens + size
            # The sum of the parts may be lower than the count of the whole, so count the whole near the limit.
            if held and (sum_ > tokens or (sum_ > NEAR * tokens and count((held + piece).strip()) > tokens)):
                parts.append(held)
                held, held_tokens = "", 0
            held, held_tokens = held + piece, held_tokens + size
    return [part for part in (part.strip() for part in [*parts, held]) if part]


def _sentences(text: str) -> Iterator[str]:
    """The sentences of the text, each with the white space that follows it."""
    start = 0
    for end in _SENTENCE_END.finditer(text):
        yield text[start : end.end()]
        start = end.end()
    if start < len(text):
        yield text[start:]


def _pieces(sentence: str, count: CountTokens, tokens: int) -> Iterator[str]:
    while count(sentence) > tokens:
        cut = _longest_start(sentence, count, tokens)
        yield sentence[:cut]
        sentence = sentence[cut:]
    if sentence:
        yield sentence


def _longest_start(text: str, count: CountTokens, tokens: int) -> int:
    """Length of the longest start of `text` that fits, cut after a space if it has one; at least 1."""
    fits, too_long = 1, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count(text[:middle]) <= tokens:
            fits = middle
        else:
            too_long = middle
    return text.rfind(" ", 0, fits) + 1 or fits
