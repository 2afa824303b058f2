"""The requests that every way gets: a head, the same passages in a new order, a question."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cacheblend.core.plan.prompt import Prompt, Segment, text


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        head, question: plain text; the head is the same in all requests.
        passages: in the order of the request.
    """

    head: Segment
    passages: tuple[Segment, ...]
    question: Segment

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        return list(map(int, self.prompt.token_ids))

    @property
    def prompt(self) -> Prompt:
        """With the passages as chunks."""
        return Prompt.of([self.head, *self.passages, self.question])

    def ordered(self, order: Sequence[int]) -> "Request":
        """The request with its passages in another order: numbers of `passages`."""
        return replace(self, passages=tuple(self.passages[number] for number in order))


def shuffled(chunks: Sequence[Segment], count: int, question_tokens: int, vocab: int, seed: int) -> list[Request]:
    """`count` requests of the chunks, each in an order of its own, with random questions.

    Args:
        chunks: the passages.
        count: of requests.
        question_tokens: tokens of the head and of each question.
        vocab: size of the model's vocabulary.
        seed: of orders and plain text.
    """
    rng = random.Random(seed)

    def plain() -> Segment:
        return text([rng.randrange(vocab) for _ in range(question_tokens)])

    head = plain()
    return [Request(head, tuple(rng.sample(list(chunks), len(chunks))), plain()) for _ in range(count)]
