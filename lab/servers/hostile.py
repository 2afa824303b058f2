"""What a client's stream notices of clients that mean ill, and what memory they take.

At the same time: half-open connections, chats of 16 MB, posts of many chunks, of which half the clients leave at once.
Afterwards documents of 15 MB, whose clients give up. Streams are read before and meanwhile; the longest time between
two of their events counts.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from cacheblend.bench.stamp import stamp
from lab.nano.questions import draw_questions
from lab.servers.processes import answers, free_port, running

CHAT_BYTES, DOCUMENT_BYTES = 16_000_000, 15_000_000
GIVE_UP_S = 10.0  # of a document's client; of every second post's 1
WARM_CHUNKS = 60
STAGES = ("at rest", "attacked", "long documents")


@dataclass(frozen=True)
class Hostile:
    """What is measured.

    Attributes:
        model: a model folder, or ``nano``.
        rounds: of each stage.
        chats: of 16 MB in each round.
        posts, chunks: posts in each round, and chunks of each.
        documents: of 15 MB in each round, with a comma behind each word.
        sockets: connections that send half a request.
        answer_tokens: of each stream.
        seed: of everything drawn.
    """

    model: str = "nano"
    rounds: int = 3
    chats: int = 3
    posts: int = 2
    chunks: int = 700
    documents: int = 1
    sockets: int = 500
    answer_tokens: int = 200
    seed: int = 0


def run(what: Hostile, advance: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Runs all rounds: ``figures`` and the raw numbers.

    Raises:
        InvalidInputError: the server does not start.
    """
    rng, kinds = random.Random(what.seed), []
    stalls: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with _serving(what.model) as url:
        _use(url, what, rng)
        before = _resident_bytes(url)
        most = dict.fromkeys(STAGES, before)
        for stage in STAGES:
            for number in range(what.rounds):
                with _attacks(url, what, rng, stage) as kind:
                    while not stalls[stage][number:] or any(thread.is_alive() for thread in kind.threads):
                        stalls[stage].append(_longest_gap(url, what.answer_tokens))
                        most[stage] = max(most[stage], _resident_bytes(url))
                kinds.append(kind.statuses)
                advance(stage, number + 1, what.rounds)
    quiet, attacked, documents = STAGES
    return {
        "figures": {
            "hostile_stall_ms": 1e3 * max(stalls[attacked]),
            "hostile_rss": most[attacked] / before,
            "document_stall_ms": 1e3 * max(stalls[documents]),
            "document_rss": most[documents] / before,
            "quiet_stall_ms": 1e3 * max(stalls[quiet]),
        },
        "stall_s": stalls,
        "resident_bytes": {"before": before, **most},
        "statuses": kinds,
        "settings": asdict(what),
        **stamp(),
    }


def table(result: dict[str, Any]) -> str:
    """A line for each figure."""
    return "\n".join(f"{name}: {value:.3f}" for name, value in result["figures"].items())


@contextlib.contextmanager
def _serving(model: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-c", "from cacheblend.cli import main; main()", "serve", "--model", model]
    command += ["--port", str(port), "--store", "memory://?max_bytes=16MiB", "--drain", "1"]
    url = f"http://127.0.0.1:{port}"
    with running(command, os.environ, lambda: answers(f"{url}/v1/models")):
        yield url


def _use(url: str, what: Hostile, rng: random.Random) -> None:
    """Uses the server as others do, so that what it fills by itself is full: its store, its caches of kernels."""
    _longest_gap(url, what.answer_tokens)
    chunks = [{"text": " ".join(rng.choices(_words(what), k=100))} for _ in range(WARM_CHUNKS)]
    body = json.dumps({"chunks": chunks}).encode()
    request = urllib.request.Request(f"{url}/v1/chunks", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=600).close()


def _words(what: Hostile) -> list[str]:
    return [word for text in draw_questions(what.seed, 1)[0].passages for word in text.text.split()]


def _longest_gap(url: str, tokens: int) -> float:
    """The longest time in seconds between two events of a stream."""
    body = {"prompt": "lamp", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    gap, last = 0.0, None
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                gap, last = max(gap, now - last if last is not None else 0.0), now
    return gap


def _resident_bytes(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=600) as response:
        [line] = [line for line in response.read().decode().splitlines() if line.startswith("process_resident_memory")]
    return float(line.split()[1])


class _Attack:
    """Attackers' threads, and how often each kind was answered with which status."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), int(parts.port or 80))
        self.threads: list[threading.Thread] = []
        self.statuses: dict[str, int] = {}
        self._lock = threading.Lock()

    def start(self, kind: str, path: str, body: bytes, timeout: float) -> None:
        """Sends a body from a thread of its own; a client that leaves after `timeout` seconds counts as gone."""
        thread = threading.Thread(target=self._post, args=(kind, path, body, timeout), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _post(self, kind: str, path: str, body: bytes, timeout: float) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=timeout)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            outcome = str(connection.getresponse().status)
        except TimeoutError:
            outcome = "gone"
        except OSError as error:
            outcome = type(error).__name__
        finally:
            connection.close()
        with self._lock:
            self.statuses[f"{kind}: {outcome}"] = self.statuses.get(f"{kind}: {outcome}", 0) + 1

    def half_open(self) -> socket.socket:
        """A connection that has sent half a request."""
        half = socket.create_connection(self._address)
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{")
        return half


def _long_document(words: list[str], number: int) -> bytes:
    listed = ", ".join(words) + ". "
    text = listed * (DOCUMENT_BYTES // len(listed))
    return json.dumps({"documents": [{"id": f"long {number}", "text": text}]}).encode()


@contextlib.contextmanager
def _attacks(url: str, what: Hostile, rng: random.Random, stage: str) -> Iterator[_Attack]:
    attack = _Attack(url)
    with contextlib.ExitStack() as closing:
        if stage == STAGES[1]:
            for _ in range(what.sockets):
                closing.enter_context(attack.half_open())
            _send_chats_and_posts(attack, what, rng)
        elif stage == STAGES[2]:
            for number in range(what.documents):
                attack.start("document", "/v1/documents", _long_document(_words(what), number), GIVE_UP_S)
        yield attack
        for thread in attack.threads:
            thread.join()


def _send_chats_and_posts(attack: _Attack, what: Hostile, rng: random.Random) -> None:
    words = _words(what)
    passage = " ".join(words) + " "
    content = passage * (CHAT_BYTES // len(passage))
    chat = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    for _ in range(what.chats):
        attack.start("chat", "/v1/chat/completions", chat, 600)
    for number in range(what.posts):
        chunks = [{"text": " ".join(rng.choices(words, k=100))} for _ in range(what.chunks)]
        attack.start("post", "/v1/chunks", json.dumps({"chunks": chunks}).encode(), 1 if number % 2 else 600)
