"""Prompts of random tokens for vLLM, and steps of `child.py` that ask them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.core.plan.prompt import Prompt, chunk, text

COUNT: dict[str, Any] = {"count": True}
FORGET: dict[str, Any] = {"forget": True}
CACHE: dict[str, Any] = {"cache": True}

NANO_VOCAB = 1200
"""Ids below it are of the shipped model's ordinary tokens."""


@dataclass(frozen=True)
class Asked:
    """A prompt and the spans of its passages."""

    ids: list[int]
    spans: list[list[int]]

    def __add__(self, other: "Asked") -> "Asked":
        return Asked(self.ids + other.ids, self.spans + other.behind(self.ids).spans)

    def behind(self, ids: list[int]) -> "Asked":
        """The same with text in front."""
        return Asked(ids + self.ids, [[start + len(ids), stop + len(ids)] for start, stop in self.spans])

    @property
    def prompt(self) -> Prompt:
        """As the core knows it."""
        parts, at = [], 0
        for start, stop in self.spans:
            parts += [text(self.ids[at:start]), chunk(self.ids[start:stop])]
            at = stop
        return Prompt.of([*parts, text(self.ids[at:])])


class Texts:
    """Random token ids: passages that recur, and what stands around them."""

    def __init__(self, seed: int, below: int = 2000) -> None:
        self.rng, self._below = random.Random(seed), below

    def ids(self, tokens: int) -> list[int]:
        return [self.rng.randrange(20, self._below) for _ in range(tokens)]

    def passages(self, count: int, fewest: int = 70, most: int = 150) -> list[list[int]]:
        return [self.ids(self.rng.randint(fewest, most)) for _ in range(count)]

    def prompt(self, passages: list[list[int]], front: int = 21, between: int = 2, question: int = 17) -> Asked:
        """Plain text, the passages in this order, a question."""
        made = Asked(self.ids(front), [])
        for passage in passages:
            made += Asked([*passage, *self.ids(between)], [[0, len(passage)]])
        return made + Asked(self.ids(question), [])


def prompts(seed: int, count: int, passages: int = 4, held: int = 6, below: int = 2000) -> list[Asked]:
    """Prompts of so many passages each, of those `held`."""
    texts = Texts(seed, below)
    known = texts.passages(held)
    return [texts.prompt(texts.rng.sample(known, passages)) for _ in range(count)]


def ask(asked: Sequence[Asked], plain: Sequence[Asked] = (), **more: Any) -> dict[str, Any]:
    """A step of `child.py`: all of them at once, with the spans of their passages; the plain ones name none."""
    ids, spans = [one.ids for one in (*asked, *plain)], [one.spans for one in asked]
    return {"ask": ids, "chunks": [*spans, *([] for _ in plain)], **more}


def rpc(method: str, *arguments: Any) -> dict[str, Any]:
    """A step of `child.py`: workers do something, see `injecting.py`."""
    return {"rpc": [method, *arguments]}
