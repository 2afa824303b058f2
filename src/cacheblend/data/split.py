"""Splits a long text into passages of a given number of tokens, at sentence ends."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

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

    A sentence that is too long is cut between words, and a word that is too long between characters. `count`: of a
    text's tokens. Raises `InvalidInputError` if `tokens` is below `SHORTEST`.
    """
    if tokens < SHORTEST:
        raise InvalidInputError(f"a passage must allow at least {SHORTEST} tokens, got {tokens}")
    parts: list[str] = []
    held, held_tokens = "", 0
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(text)), len(text)]
    for sentence in (text[start:end] for start, end in pairwise(ends)):  # each with the white space that follows it
        for piece in _pieces(sentence, count, tokens):
            size = count(piece)
            sum_ = held_tokens + size
            # The sum of the parts may be lower than the count of the whole, so count the whole near the limit.
            if held and (sum_ > tokens or (sum_ > NEAR * tokens and count((held + piece).strip()) > tokens)):
                parts.append(held)
                held, held_tokens = "", 0
            held, held_tokens = held + piece, held_tokens + size
    return [part for part in (part.strip() for part in [*parts, held]) if part]


def _pieces(sentence: str, count: CountTokens, tokens: int) -> Iterator[str]:
    """A sentence in pieces that fit, each the longest, cut behind a space if it has one; of a character at least."""
    while count(sentence) > tokens:
        fits, too_long = 1, len(sentence)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if count(sentence[:middle]) <= tokens else (fits, middle)
        cut = sentence.rfind(" ", 0, fits) + 1 or fits
        yield sentence[:cut]
        sentence = sentence[cut:]
    if sentence:
        yield sentence
