"""Tokenises documents and cuts them into chunks, a part of a long one at a time.

Knows an engine's tokenizer and its sentence ends; knows no store.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import TokenIds, as_token_ids, join_ids
from cacheblend.engines.documents import Document
from cacheblend.engines.tokens.chunker import Cutting

if TYPE_CHECKING:
    from cacheblend.engines.hf.engine import BlendEngine

ENCODED_AT_ONCE = 1 << 17
"""Characters of a part, which take about a tenth of a second; a tokenizer keeps 400 bytes for each of its tokens."""


def is_long(document: Document) -> bool:
    """Whether it has more than one part."""
    return len(document.text) > ENCODED_AT_ONCE


@dataclass(frozen=True)
class Cutter:
    """Cuts documents; `encode`, `cutting` and `ends`: of their model."""

    encode: Callable[[str], list[int]]
    cutting: Cutting
    ends: npt.NDArray[Any] | None

    def steps(self, document: Document) -> Generator[None, None, list[TokenIds]]:
        """Returns a document's chunks; yields between the parts of a long one."""
        if not document.text.strip():
            return []
        ids: list[TokenIds] = []
        for part in _parts(document.text):
            if ids:
                yield
            ids.append(as_token_ids(self.encode(part)))
        return self.cutting.cut(join_ids(ids), self.ends)


def cutter(engine: "BlendEngine", cutting: Cutting, anchor_tokens: int) -> tuple[Cutter, str]:
    """What cuts an engine's documents, and the rules by which it does.

    Raises:
        InvalidInputError: the engine has no tokenizer.
    """
    builder = engine.builder
    if builder is None:
        raise InvalidInputError("documents are texts, and this engine has no tokenizer: open it with one")
    longest = engine.survey.max_length
    most = cutting.most if longest is None else min(cutting.most, longest - anchor_tokens)
    fitted = Cutting(most, min(cutting.least, max(1, most // 2)))
    return Cutter(builder.encode, fitted, engine.sentence_end_ids()), f"1 {fitted.most} {fitted.least}"


def cut_whole(cutter: Cutter, document: Document) -> list[TokenIds]:
    """A document's chunks."""
    steps = cutter.steps(document)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            pieces: list[TokenIds] = ended.value
            return pieces


def _parts(text: str) -> Iterator[str]:
    """A text in parts of at most `ENCODED_AT_ONCE` characters, cut in front of a space."""
    at = 0
    while len(text) - at > ENCODED_AT_ONCE:
        stop = text.rfind(" ", at + 1, at + ENCODED_AT_ONCE)
        stop = stop if stop > at else at + ENCODED_AT_ONCE
        yield text[at:stop]
        at = stop
    yield text[at:]
