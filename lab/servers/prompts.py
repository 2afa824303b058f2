"""Prompts for benchmarks of servers: random token ids, chunks that recur in new orders."""

import random
from dataclasses import dataclass

LAST_ID = 3000
"""Random ids are below this: the tokenizer that ships has as many."""


@dataclass(frozen=True)
class PromptShape:
    """A prompt: plain text that no cache holds, stored chunks in shuffled order, a question.

    Attributes:
        chunks: number of chunks.
        chunk_tokens, question_tokens, plain_tokens: tokens of a chunk, of the question, of the plain text.
    """

    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    plain_tokens: int = 32

    @property
    def tokens(self) -> int:
        """Length of a prompt."""
        return self.plain_tokens + self.chunks * self.chunk_tokens + self.question_tokens


class Prompts:
    """Random ids: chunks that recur, and prompts of them.

    Args:
        shape: of the prompts.
        seed: of ids and orders.
        vocab_size: of the model.

    Attributes:
        chunks: token ids of each.
    """

    def __init__(self, shape: PromptShape, seed: int, vocab_size: int = LAST_ID) -> None:
        self._shape, self._rng, self._last = shape, random.Random(seed), min(LAST_ID, vocab_size)
        self.chunks = [self.ids(shape.chunk_tokens) for _ in range(shape.chunks)]

    def ids(self, count: int) -> list[int]:
        """Random ids that the tokenizer that ships can decode, so that any server can."""
        return [self._rng.randrange(300, self._last) for _ in range(count)]

    def draw(self) -> tuple[list[int], list[list[int]]]:
        """New plain text, the chunks in a new order, a new question; and the chunks' spans."""
        ids, spans = self.ids(self._shape.plain_tokens), []
        for chunk in self._rng.sample(self.chunks, len(self.chunks)):
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return ids + self.ids(self._shape.question_tokens), spans
