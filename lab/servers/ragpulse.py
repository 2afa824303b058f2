"""Reads a RAGPulse trace: real RAG requests; of their texts only ids and lengths are known, tokens are random.

The folder is the data set's (flashserve/RAGPulse): `0_trace.jsonl` has the requests in order of arrival, the other
files have the length of each text.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError

REQUESTS = "0_trace.jsonl"
LENGTHS = {
    "sys_prompt": "1_sys_prompt.jsonl",
    "passages_ids": "2_passages.jsonl",
    "history": "3_history.jsonl",
    "user_input": "4_user_input.jsonl",
    "web_search": "5_web_search.jsonl",
}


@dataclass(frozen=True)
class TraceText:
    """A text of the trace: id, and length in tokens."""

    id: int
    tokens: int

    def token_ids(self) -> list[int]:
        """Random ids of the tokenizer that ships; always the same for one text."""
        return random_ids(f"text {self.id}", self.tokens)


@dataclass(frozen=True)
class TraceRequest:
    """One request; each part in order."""

    system: tuple[TraceText, ...]
    passages: tuple[TraceText, ...]
    history: tuple[TraceText, ...]
    question: tuple[TraceText, ...]
    web_search: tuple[TraceText, ...]


def random_ids(seed: str, count: int) -> list[int]:
    """[count] token ids, always the same for one seed."""
    return random.Random(seed).choices(range(300, 3000), k=count)


def tokens_of(texts: Iterable[TraceText]) -> int:
    """Tokens of all texts."""
    return sum(text.tokens for text in texts)


def read_trace(folder: Path) -> list[TraceRequest]:
    """The requests in order of arrival.

    Raises:
        InvalidInputError: a file is missing, or a line is not what it should be; names file, line and field.
    """
    lengths: dict[int, int] = {}
    for file in LENGTHS.values():
        for line, row in _rows(folder / file):
            try:
                name = next(key for key in row if key.endswith("_id"))
                lengths[int(row[name])] = int(row["token_length"])
            except (StopIteration, KeyError, TypeError, ValueError):
                raise InvalidInputError(f"{folder / file}, line {line}: no id and token_length in {row!r}") from None
    return [_request(folder, line, row, lengths) for line, row in _rows(folder / REQUESTS)]


def _request(folder: Path, line: int, row: Mapping[str, Any], lengths: Mapping[int, int]) -> TraceRequest:
    def texts(name: str) -> tuple[TraceText, ...]:
        try:
            return tuple(TraceText(int(each), lengths[int(each)]) for each in row["hash_ids"][name])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{folder / REQUESTS}, line {line}: hash_ids.{name} is missing, or names a text whose length "
                f"{LENGTHS[name]} does not have ({error})"
            ) from None

    return TraceRequest(
        *(texts(name) for name in ("sys_prompt", "passages_ids", "history", "user_input", "web_search"))
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}; a RAGPulse folder has {REQUESTS} and lengths") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInputError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise InvalidInputError(f"{path}, line {number}: a row is an object, got {type(row).__name__}")
        yield number, row
