"""Clients of a server: a fixed number that keeps it busy, or Poisson arrivals at a rate."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Prompt = TypeVar("Prompt")


def saturate(
    ask: Callable[[Prompt], float], prompts: Sequence[Prompt], clients: int, done: Callable[[int], None]
) -> dict[str, Any]:
    """Asks with a fixed number of clients; each sends its next request as soon as it has an answer.

    Args:
        ask: sends a prompt, waits for the answer, returns its time to first token.
        prompts: in order.
        clients: requests under way at once.
        done: called with the number of answers so far.
    """
    times: list[float] = []

    def one(prompt: Prompt) -> None:
        times.append(ask(prompt))
        done(len(times))

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, prompts))
    took = time.perf_counter() - started
    return {"requests_per_s": len(prompts) / took, "seconds": took, "ttft_s": times}


def poisson_times(rate: float, count: int, seed: str) -> list[float]:
    """Arrival times in seconds of a Poisson process.

    Args:
        rate: requests per second.
        count: of requests.
        seed: of the process.
    """
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
