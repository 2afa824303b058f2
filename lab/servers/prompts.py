"""Prompts for benchmarks of servers: random token ids, chunks that recur in new orders."""

import random

from lab.settings import PromptShape

LAST_ID = 3000
"""Random ids are below this: the tokenizer that ships has as many."""


def random_ids(seed: str, count: int) -> list[int]:
    """[count] token ids, always the same for one seed."""
    return random.Random(seed).choices(range(300, LAST_ID), k=count)


class Prompts:
    """Random ids: `chunks` that recur, and prompts of them."""

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
