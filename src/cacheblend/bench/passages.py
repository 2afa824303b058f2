"""Real passages as chunks of a given length."""

import hashlib
from pathlib import Path

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Segment, chunk
from cacheblend.data import read_passages
from cacheblend.engines.hf import BlendEngine


def read_chunks(path: Path, engine: BlendEngine, count: int, tokens: int) -> list[Segment]:
    """`count` different chunks of exactly `tokens` tokens, passages joined where one is too short.

    Without a tokenizer each word becomes one id; equal words get equal ids.

    Raises:
        InvalidInputError: the file cannot be read, or has too little text.
    """
    chunks: list[Segment] = []
    ids: list[int] = []
    for passage in dict.fromkeys(passage.text for passage in read_passages(path)):
        ids += engine.builder.encode(passage) if engine.builder else _word_ids(passage, engine.survey.vocab_size)
        while len(ids) >= tokens and len(chunks) < count:
            chunks.append(chunk(ids[:tokens]))
            ids = ids[tokens:]
        if len(chunks) == count:
            return chunks
    raise InvalidInputError(f"{path} gives {len(chunks)} chunks of {tokens} tokens, {count} are needed")


def _word_ids(passage: str, vocab: int) -> list[int]:
    return [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest()) % vocab for word in passage.split()]
