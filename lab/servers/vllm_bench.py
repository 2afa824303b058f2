"""Blending in vLLM against vLLM with prefix caching: time to first token, and gaps between other requests' tokens.

Both servers run at once and are asked alternately. All functions raise `InvalidInputError` where vLLM is not installed,
or does not start.
"""

import statistics
import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

from cacheblend.cli.bench import RoundOptions
from lab.bench import Advance, alternating, median_interval, silent
from lab.servers.clients import Prompts
from lab.servers.vllm_server import Pair, Server, Streamed
from lab.settings import PromptShape

DECODED = 256
"""Tokens of the request whose gaps are measured."""

QUIET_S = 1.5
"""Pause before each timed request: vLLM's processes spin for a second after their last request, and on few cores they
would slow the other server down."""


def ttft(pair: Pair, shape: PromptShape, rounds: RoundOptions, advance: Advance = silent) -> dict[str, Any]:
    """Time to first token of both servers: prompts of stored chunks in shuffled order, and plain prompts."""
    prompts = Prompts(shape, rounds.seed)

    def draw() -> tuple[list[int], list[int]]:
        ids, _ = prompts.draw()
        return ids, prompts.ids(len(ids))

    def seconds(server: Server, which: int, drawn: tuple[list[int], list[int]]) -> float:
        time.sleep(QUIET_S)
        return server.ask(drawn[which], 2).ttft_s

    with pair.serving(shape.tokens + 64) as (plain, blend):
        _fill(blend, prompts, shape)
        arms = {"vllm": (plain, 0), "blend": (blend, 0), "plain vllm": (plain, 1), "plain blend": (blend, 1)}
        times = alternating({name: partial(seconds, *arm) for name, arm in arms.items()}, draw, rounds.runs, advance)
        counters = blend.counters()
    overheads = [b / a - 1 for a, b in zip(times["plain vllm"], times["plain blend"], strict=True)]
    figures = {
        "ttft_speedup": statistics.median(times["vllm"]) / statistics.median(times["blend"]),
        "plain_overhead": statistics.median(overheads),
    }
    found = {
        "figures": figures,
        "intervals": {"plain_overhead": median_interval(overheads, rounds.seed)},
        "ttft_s": times,
    }
    return {**found, "counters": counters, "prompt": vars(shape), **pair.facts()}


def latency(pair: Pair, shape: PromptShape, rounds: RoundOptions, advance: Advance = silent) -> dict[str, Any]:
    """Gaps between tokens of a decoding request while another prompt is prefilled: blended, and plain."""
    prompts = Prompts(shape, rounds.seed)

    def gaps_of(server: Server, _: None) -> list[float]:
        """Gaps between a request's tokens from the arrival of another request to that one's first token."""
        (asked, _spans), found = prompts.draw(), Streamed()
        time.sleep(QUIET_S)
        decoding, started = prompts.ids(64), time.perf_counter()
        thread = threading.Thread(target=lambda: found.times.extend(server.ask(decoding, DECODED, []).times))
        thread.start()
        time.sleep(1.0)
        came = time.perf_counter() - started
        first = came + server.ask(asked, 1).ttft_s
        thread.join()
        return [b - a for a, b in pairwise(found.times) if b >= came and a <= first]

    with pair.serving(shape.tokens + DECODED + 64) as (plain, blend):
        _fill(blend, prompts, shape)
        arms = {name: partial(gaps_of, server) for name, server in (("blend", blend), ("plain", plain))}
        gaps = alternating(arms, lambda: None, rounds.runs, advance, swaps=False)
    ordered = {name: sorted(gap for run in runs for gap in run) for name, runs in gaps.items()}
    p99 = {name: found[min(len(found) - 1, int(0.99 * len(found)))] for name, found in ordered.items()}
    figures = {
        "itl_ratio": p99["blend"] / p99["plain"],
        "longest_gap_ratio": ordered["blend"][-1] / ordered["plain"][-1],
    }
    return {"figures": figures, "gaps_s": gaps, "p99_s": p99, "prompt": vars(shape), **pair.facts()}


def _fill(server: Server, prompts: Prompts, shape: PromptShape) -> None:
    """Makes the server store the chunks, and waits until it has."""
    ids, spans = prompts.draw()
    server.ask(ids, 1, spans)
    server.wait_for_captures(shape.chunks * shape.chunk_tokens)
