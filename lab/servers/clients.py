"""Clients of a server: a fixed number that keeps it busy, Poisson arrivals at a rate; prompts."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lab.bench import Advance, silent
from lab.settings import PromptShape

Prompt = TypeVar("Prompt")


def saturate(
    ask: Callable[[Prompt], float], prompts: Sequence[Prompt], clients: int, advance: Advance = silent
) -> dict[str, Any]:
    """Asks with a fixed number of clients; each sends its next request as soon as it has an answer.

    `ask` sends a prompt, waits for the answer, and returns its time to first token.
    """
    times: list[float] = []

    def one(prompt: Prompt) -> None:
        times.append(ask(prompt))
        advance(len(times), len(prompts))

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, prompts))
    took = time.perf_counter() - started
    return {"requests_per_s": len(prompts) / took, "seconds": took, "ttft_s": times}


def poisson_times(rate: float, count: int, seed: str) -> list[float]:
    """Arrival times in seconds of a Poisson process of so many requests per second."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append(at)
    return found


def ask_at(ask: Callable[[Prompt], float], due: Sequence[tuple[float, Prompt]]) -> list[float]:
    """Time to first token of each prompt, counted from when it was due."""
    started = time.perf_counter()

    def one(at: float, prompt: Prompt) -> float:
        time.sleep(max(0.0, started + at - time.perf_counter()))
        late = time.perf_counter() - started - at
        return late + ask(prompt)

    with ThreadPoolExecutor(len(due)) as pool:
        return [each.result() for each in [pool.submit(one, at, prompt) for at, prompt in due]]


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
