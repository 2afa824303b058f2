"""What the shadow check costs: throughput of two saturated servers, with it and without, in turn.

Each round both are asked the same prompts, one after the other, in alternating order. A server that has been measured
first finishes what it has put off, so that it does not compute beside the other. Knows no server.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lab.servers.clients import saturate

Prompt = TypeVar("Prompt")
WITHOUT, WITH = "without", "with"


@dataclass(frozen=True)
class Arm(Generic[Prompt]):
    """A server.

    Attributes:
        ask: sends a prompt, waits for the answer, returns its time to first token.
        settle: returns when the server has nothing left to compute.
    """

    ask: Callable[[Prompt], float]
    settle: Callable[[], None]


def shadow_overhead(
    arms: dict[str, Arm[Prompt]],
    draw: Callable[[], Sequence[Prompt]],
    *,
    rounds: int,
    clients: int,
    done: Callable[[int], None],
) -> dict[str, Any]:
    """`overhead`: the share of throughput that the check costs, the median of the rounds; and each round's figures.

    Args:
        arms: by `WITHOUT` and `WITH`.
        draw: the prompts of a round.
        rounds: measured, after one that warms up.
        clients: requests under way at once.
        done: called with the number of rounds so far.
    """
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        prompts = draw()
        for name in list(arms) if number % 2 else reversed(list(arms)):
            found = saturate(arms[name].ask, prompts, clients, lambda count: None)
            arms[name].settle()
            if number:
                rates[name].append(found["requests_per_s"])
        done(number + 1)
    shares = [1 - with_it / without for with_it, without in zip(rates[WITH], rates[WITHOUT], strict=True)]
    return {"overhead": statistics.median(shares), "by_round": shares, "requests_per_s": rates}
