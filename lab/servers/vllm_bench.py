"""Blending in vLLM against vLLM with prefix caching: time to first token, and gaps between other requests' tokens; what
the shadow check takes of the throughput.

Both servers run at once and are asked alternately, so that noise of the machine affects both.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from lab.servers.prompts import Prompts, PromptShape
from lab.servers.shadow import WITH, WITHOUT, Arm, shadow_overhead
from lab.servers.vllm_server import Pair, Server, Streamed

Progress = Callable[[int, int], None]

DECODED = 256
"""Tokens of the request whose gaps are measured."""

ANSWERED = 16
"""Tokens of an answer where the shadow check is measured: as many as it compares."""

WAITING = "shadow_waiting"
SETTLE_S = 12.0
"""Seconds after which a server computes nothing: vLLM goes on with the check for 10 s after its last request."""

QUIET_S = 1.5
"""Pause before each timed request: vLLM's processes spin for a second after their last request, and on few cores they
would slow the other server down."""


def ttft(
    pair: Pair, shape: PromptShape, runs: int = 5, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Time to first token of both servers: prompts of stored chunks in shuffled order, and plain prompts.

    Args:
        pair: the servers.
        shape: of the prompts.
        runs: measured rounds, after one warm-up.
        seed: of tokens and orders.
        progress: called with (rounds done, rounds in all).

    Raises:
        InvalidInputError: vLLM is not installed here, or does not start.
    """
    prompts = Prompts(shape, seed)
    times: dict[str, list[float]] = {name: [] for name in ("vllm", "blend", "plain vllm", "plain blend")}
    with pair.serving(shape.tokens + 64) as (plain, blend):
        _fill(blend, prompts, shape)
        for number in range(runs + 1):
            ids, _ = prompts.draw()
            new = prompts.ids(len(ids))
            round_ = [
                ("vllm", plain, ids),
                ("blend", blend, ids),
                ("plain vllm", plain, new),
                ("plain blend", blend, new),
            ]
            for name, server, asked in round_ if number % 2 else round_[::-1]:
                time.sleep(QUIET_S)
                seconds = server.ask(asked, 2).ttft_s
                if number:
                    times[name].append(seconds)
            if progress is not None:
                progress(number + 1, runs + 1)
        counters = blend.counters()
    overheads = [b / a - 1 for a, b in zip(times["plain vllm"], times["plain blend"], strict=True)]
    figures = {
        "ttft_speedup": statistics.median(times["vllm"]) / statistics.median(times["blend"]),
        "plain_overhead": statistics.median(overheads),
    }
    found = {"figures": figures, "intervals": {"plain_overhead": median_interval(overheads, seed)}, "ttft_s": times}
    return {**found, "counters": counters, "prompt": vars(shape), **pair.described()}


def latency(
    pair: Pair, shape: PromptShape, runs: int = 5, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Gaps between tokens of a decoding request while another prompt is prefilled: blended, and plain.

    Args, raises: as `ttft`.
    """
    prompts = Prompts(shape, seed)
    gaps: dict[str, list[list[float]]] = {"blend": [], "plain": []}
    with pair.serving(shape.tokens + DECODED + 64) as (plain, blend):
        _fill(blend, prompts, shape)
        for number in range(runs + 1):
            for name, server in (("blend", blend), ("plain", plain)):
                ids, _ = prompts.draw()
                time.sleep(QUIET_S)
                found = _gaps_beside(server, prompts.ids(64), ids)
                if number:
                    gaps[name].append(found)
            if progress is not None:
                progress(number + 1, runs + 1)
    p99 = {name: _p99([gap for run in runs for gap in run]) for name, runs in gaps.items()}
    longest = {name: max(gap for run in runs for gap in run) for name, runs in gaps.items()}
    figures = {
        "itl_ratio": p99["blend"] / p99["plain"],
        "longest_gap_ratio": longest["blend"] / longest["plain"],
    }
    return {"figures": figures, "gaps_s": gaps, "p99_s": p99, "prompt": vars(shape), **pair.described()}


def shadow(
    pair: Pair,
    shape: PromptShape,
    runs: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    requests: int = 100,
    clients: int = 8,
) -> dict[str, Any]:
    """The share of throughput that the shadow check costs (`servers.shadow`): the same blended requests to both.

    A round in which few answers are drawn says little: with a share of 0.02, two of a hundred are. `shadow_compared`
    and `shadow_dropped` tell whether the check was at work.

    Args, raises: as `ttft`; the pair has a `shadow`.
        requests: of a round.
        clients: requests under way at once.
    """
    prompts = Prompts(shape, seed)
    with pair.serving(shape.tokens + ANSWERED) as servers:
        arms = {name: _arm(server, prompts, shape) for name, server in zip((WITHOUT, WITH), servers, strict=True)}
        found = shadow_overhead(
            arms,
            lambda: [prompts.draw() for _ in range(requests)],
            rounds=runs,
            clients=clients,
            done=lambda number: None if progress is None else progress(number, runs + 1),
        )
        counts = {name: servers[1].counted(name) for name in ("shadow", "shadow_dropped")}
        found |= {"share": pair.shadow, "requests": requests, "clients": clients, "counters": servers[1].counters()}
    interval = {"shadow_overhead": median_interval(found["by_round"], seed)}
    figures = {"shadow_overhead": found["overhead"]}
    figures |= {"shadow_compared": counts["shadow"], "shadow_dropped": counts["shadow_dropped"]}
    return {"figures": figures, "intervals": interval, "shadow": found, "prompt": vars(shape), **pair.described()}


def _arm(server: Server, prompts: Prompts, shape: PromptShape) -> Arm[tuple[list[int], list[list[int]]]]:
    """A server that has stored the chunks."""
    _fill(server, prompts, shape)
    return Arm(lambda asked: server.ask(asked[0], ANSWERED, asked[1]).ttft_s, lambda: _settle(server))


def _settle(server: Server) -> None:
    """Returns when no answer waits to be compared, or the server without requests has left the rest for later; then
    when its processes are quiet."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and server.shown(WAITING) > 0:
        time.sleep(0.2)
    time.sleep(QUIET_S)


def _gaps_beside(server: Server, decoding: list[int], prompt: list[int]) -> list[float]:
    """Gaps between a request's tokens from the arrival of another request to that one's first token."""
    found = Streamed()
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: found.times.extend(server.ask(decoding, DECODED, []).times))
    thread.start()
    time.sleep(1.0)
    came = time.perf_counter() - started
    first = came + server.ask(prompt, 1).ttft_s
    thread.join()
    return [b - a for a, b in pairwise(found.times) if b >= came and a <= first]


def _fill(server: Server, prompts: Prompts, shape: PromptShape) -> None:
    """Makes the server store the chunks, and waits until it has."""
    ids, spans = prompts.draw()
    server.ask(ids, 1, spans)
    server.wait_for_captures(shape.chunks * shape.chunk_tokens)


def median_interval(values: list[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile-bootstrap interval of a median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
