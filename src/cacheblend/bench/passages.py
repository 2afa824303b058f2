"""Real passages as chunks of a stated length."""

import hashlib
import json
from pathlib import Path

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.prompt import Segment, chunk
from cacheblend.engines.hf import BlendEngine


def read_passages(path: str) -> list[str]:
    """Texts of a file: JSON ``[{"ctxs": [{"title", "text"}]}]``, JSON lines ``{"text"}``, or text by paragraph.

    Raises:
        InvalidInputError: the file cannot be read or has another form; names file, row and field.
    """
    file = Path(path)
    try:
        content = file.read_text()
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if file.suffix == ".json":
            return [_text(ctx, path, row) for row, item in enumerate(json.loads(content), 1) for ctx in item["ctxs"]]
        if file.suffix == ".jsonl":
            lines = [line for line in content.splitlines() if line.strip()]
            return [_text(json.loads(line), path, row) for row, line in enumerate(lines, 1)]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{path} has not the form of its ending: {error!r}") from error
    return [paragraph for paragraph in content.split("\n\n") if paragraph.strip()]


def read_chunks(path: str, engine: BlendEngine, count: int, tokens: int) -> list[Segment]:
    """`count` different chunks of exactly `tokens` tokens, passages joined where one is too short.

    Without a tokenizer each word becomes one id, the same word the same id.

    Raises:
        InvalidInputError: the file has too little text.
    """
    chunks: list[Segment] = []
    ids: list[int] = []
    for passage in dict.fromkeys(read_passages(path)):
        ids += engine.builder.encode(passage) if engine.builder else _word_ids(passage, engine.survey.vocab_size)
        if len(ids) >= tokens:
            chunks.append(chunk(ids[:tokens]))
            ids = []
        if len(chunks) == count:
            return chunks
    raise InvalidInputError(f"{path} gives {len(chunks)} chunks of {tokens} tokens, {count} are needed")


def _word_ids(passage: str, vocab: int) -> list[int]:
    return [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest()) % vocab for word in passage.split()]


def _text(item: object, path: str, row: int) -> str:
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(f"{path}, row {row}: the field 'text' is missing or empty")
    return text
