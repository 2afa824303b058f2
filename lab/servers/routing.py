"""What it gains to send a request where its chunks are hot: servers on one Redis, each with memory in front of it.

round robin   requests go to the servers in turn
affinity      to the server that was sent most of the request's chunks before: what a router knows that hashes a key of
              the collection, or keeps what engines' events say

Chunks come in topics; a request has those of one topic, in a new order. A server's memory holds a share of all chunks.
With round robin each server sees all topics, and reads the rest from Redis; with affinity each sees its own.
"""

import os
import random
import shutil
import socket
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.model_loader import expected_layout
from cacheblend.engines.provenance import stamp
from lab.bench import AdvanceStage, silent
from lab.servers.clients import Prompts, saturate
from lab.servers.embedded_server import Asked, completing
from lab.servers.processes import free_port, running
from lab.servers.vllm_server import folder_of
from lab.settings import Routing

ROUND_ROBIN, AFFINITY = "round robin", "affinity"
POLICIES = (ROUND_ROBIN, AFFINITY)
FILL, WARM, MEASURE = "filling Redis", "filling memory", "requests"
STAGES = (FILL, WARM, MEASURE)
TURN, ANSWER_TOKENS = 8, 2
"""Requests of a policy before it is the other's turn; tokens of an answer."""


class Router:
    """Chooses a server for each request by one of `POLICIES`; safe to call from several threads."""

    def __init__(self, servers: int, policy: str) -> None:
        self._servers, self._policy = servers, policy
        self._lock = threading.Lock()
        self._sent: dict[int, int] = {}
        self._count = 0

    def choose(self, chunks: Sequence[int]) -> int:
        """The server for a request with these chunks; of several with as many of them, the one with fewest of all."""
        with self._lock:
            self._count += 1
            if self._policy == ROUND_ROBIN:
                return self._count % self._servers
            has = Counter(self._sent[chunk] for chunk in chunks if chunk in self._sent)
            load = Counter(self._sent.values())
            chosen = max(range(self._servers), key=lambda server: (has[server], -load[server]))
            self._sent |= dict.fromkeys(chunks, chosen)
            return chosen


def run(what: Routing, advance: AdvanceStage = silent) -> dict[str, Any]:
    """Fills a Redis, then measures both policies in turns, each with servers of its own.

    Returns:
        ``figures``: ``affinity_memory`` and ``round_robin_memory``, shares of the loaded tokens that came from a
        server's memory; ``ttft_gain`` and ``throughput_gain``, affinity by round robin.
    """
    with ExitStack() as stack:
        redis = stack.enter_context(_redis())
        folder, config = stack.enter_context(folder_of(what, what.seed)), what.config
        topics = [Prompts(what.prompt, what.seed + number, config.vocab_size) for number in range(what.topics)]
        a_token = expected_layout(config).block_bytes(256) / 256
        stored = int(a_token * what.topics * what.chunks * what.chunk_tokens)
        store = f"memory://?max_bytes={int(what.memory_share * stored)}, {redis}"
        with completing(folder, what.ratio, what.clients, store=store) as client:
            for number, topic in enumerate(topics, 1):
                client.store(topic.chunks)
                advance(FILL, number, what.topics)
        result = _measure(folder, store, topics, what, advance)
    first, other = result[ROUND_ROBIN], result[AFFINITY]
    return {
        "figures": {
            "round_robin_memory": first["memory_share"],
            "affinity_memory": other["memory_share"],
            "ttft_gain": first["median_ttft_s"] / other["median_ttft_s"],
            "throughput_gain": other["requests_per_s"] / first["requests_per_s"],
        },
        **result,
        "stored_bytes": stored,
        "model": what.called,
        "settings": what.described(answer_tokens=ANSWER_TOKENS),
        **stamp(),
    }


class _Arm:
    """A policy with servers of its own, and what came of its requests."""

    def __init__(self, stack: ExitStack, folder: Path, store: str, policy: str, what: Routing) -> None:
        self._clients = [
            stack.enter_context(completing(folder, what.ratio, what.clients, store=store)) for _ in range(what.servers)
        ]
        self._router, self._what = Router(what.servers, policy), what
        self.hits: list[dict[str, int]] = []
        self.ttft_s: list[float] = []
        self.seconds = 0.0

    def ask(self, topics: Sequence[Prompts], numbers: Sequence[int], clients: int) -> None:
        def one(number: int) -> float:
            each = self._what.chunks
            server = self._router.choose(range(number * each, (number + 1) * each))
            got = self._clients[server].ask(Asked(*topics[number].draw()), ANSWER_TOKENS, "blend")
            self.hits.append(got.report["hit_tokens"])
            return got.ttft_s

        found = saturate(one, numbers, clients)
        self.ttft_s += found["ttft_s"]
        self.seconds += found["seconds"]

    def result(self) -> dict[str, Any]:
        names = sorted({name for each in self.hits for name in each})
        loaded = {name: sum(each.get(name, 0) for each in self.hits) for name in names}
        return {
            "memory_share": loaded.get("memory", 0) / max(1, sum(loaded.values())),
            "median_ttft_s": statistics.median(self.ttft_s),
            "requests_per_s": len(self.ttft_s) / self.seconds,
            "loaded_tokens": loaded,
            "ttft_s": self.ttft_s,
        }


def _measure(
    folder: Path, store: str, topics: Sequence[Prompts], what: Routing, advance: AdvanceStage
) -> dict[str, Any]:
    """Saturates the servers of both policies in turns of some requests, so that a busy machine slows both."""
    rng = random.Random(what.seed)
    with ExitStack() as stack:
        arms = {policy: _Arm(stack, folder, store, policy, what) for policy in POLICIES}
        first = [topic for topic in range(what.topics) for _ in range(what.servers)]
        rng.shuffle(first)
        for arm in arms.values():
            arm.ask(topics, first, 1)
            arm.hits, arm.ttft_s, arm.seconds = [], [], 0.0  # these were to fill memory
        advance(WARM, 1, 1)
        asked = [rng.randrange(what.topics) for _ in range(what.requests)]
        for number, at in enumerate(range(0, what.requests, TURN)):
            for policy in POLICIES if number % 2 else POLICIES[::-1]:
                arms[policy].ask(topics, asked[at : at + TURN], what.clients)
            advance(MEASURE, min(at + TURN, what.requests), what.requests)
        return {policy: arm.result() for policy, arm in arms.items()}


@contextmanager
def _redis() -> Iterator[str]:
    """The URL of a Redis of this benchmark's own, in memory, on a free port."""
    if shutil.which("redis-server") is None or find_spec("redis") is None:
        raise InvalidInputError("bench routing needs redis-server, and redis-py: pip install 'cacheblend[redis]'")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        with running(command, os.environ, listens):
            yield f"redis://127.0.0.1:{port}/0"
