"""What a client's stream notices of clients that mean ill, and what memory they take.

At the same time: half-open connections, chats of 16 MB, posts of many chunks, of which half the clients leave at once.
Afterwards documents of 15 MB, whose clients give up. Streams are read before and meanwhile; the longest time between
two of their events counts.
"""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from cacheblend.engines.provenance import stamp
from lab.bench import AdvanceStage
from lab.nano.questions import draw_questions
from lab.servers.embedded_server import serving

CHAT_BYTES, DOCUMENT_BYTES = 16_000_000, 15_000_000
GIVE_UP_S = 10.0  # of a document's client; of every second post's 1
WARM_CHUNKS = 60
STAGES = ("at rest", "attacked", "long documents")
CHATS, POSTS, CHUNKS, DOCUMENTS, SOCKETS = 3, 2, 700, 1, 500
"""In each round; of a post its chunks. Chats have 16 MB, documents 15 MB, sockets send half a request."""
ANSWER_TOKENS = 200  # of each stream


def run(model: str, rounds: int, seed: int, advance: AdvanceStage) -> dict[str, Any]:
    """Runs so many rounds of each stage on a model folder, or ``nano``: ``figures`` and the raw numbers."""
    rng, kinds = random.Random(seed), list[dict[str, int]]()
    stalls: dict[str, list[float]] = {stage: [] for stage in STAGES}
    words = [word for text in draw_questions(seed, 1)[0].passages for word in text.text.split()]
    with serving(model, "memory://?max_bytes=16MiB") as (url, _):
        _longest_gap(url)  # so that what the server fills by itself is full: its store, its caches of kernels
        chunks = [{"text": " ".join(rng.choices(words, k=100))} for _ in range(WARM_CHUNKS)]
        _post(f"{url}/v1/chunks", {"chunks": chunks}).close()
        before = _resident_bytes(url)
        most = dict.fromkeys(STAGES, before)
        for stage in STAGES:
            for number in range(rounds):
                with _attacks(url, words, rng, stage) as kind:
                    while not stalls[stage][number:] or any(thread.is_alive() for thread in kind.threads):
                        stalls[stage].append(_longest_gap(url))
                        most[stage] = max(most[stage], _resident_bytes(url))
                kinds.append(kind.statuses)
                advance(stage, number + 1, rounds)
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
        "settings": {
            "model": model,
            "rounds": rounds,
            "seed": seed,
            "answer_tokens": ANSWER_TOKENS,
            "chats": CHATS,
            "posts": POSTS,
            "chunks": CHUNKS,
            "documents": DOCUMENTS,
            "sockets": SOCKETS,
        },
        **stamp(),
    }


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


def _longest_gap(url: str) -> float:
    """The longest time in seconds between two events of a stream."""
    body = {"prompt": "lamp", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    gap, last = 0.0, None
    with _post(f"{url}/v1/completions", body) as response:
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

    def start(self, kind: str, path: str, body: dict[str, Any], timeout: float) -> None:
        """Sends a body from a thread of its own; a client that leaves after `timeout` seconds counts as gone."""
        sent = json.dumps(body).encode()
        thread = threading.Thread(target=self._post, args=(kind, path, sent, timeout), daemon=True)
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


@contextlib.contextmanager
def _attacks(url: str, words: list[str], rng: random.Random, stage: str) -> Iterator[_Attack]:
    attack, passage = _Attack(url), " ".join(words) + ". "
    with contextlib.ExitStack() as closing:
        if stage == STAGES[1]:
            for _ in range(SOCKETS):
                closing.enter_context(attack.half_open())
            chat = {"messages": [{"role": "user", "content": passage * (CHAT_BYTES // len(passage))}]}
            for _ in range(CHATS):
                attack.start("chat", "/v1/chat/completions", chat, 600)
            for number in range(POSTS):
                chunks = [{"text": " ".join(rng.choices(words, k=100))} for _ in range(CHUNKS)]
                attack.start("post", "/v1/chunks", {"chunks": chunks}, 1 if number % 2 else 600)
        elif stage == STAGES[2]:
            for number in range(DOCUMENTS):
                text = passage * (DOCUMENT_BYTES // len(passage))
                document = {"documents": [{"id": f"long {number}", "text": text}]}
                attack.start("document", "/v1/documents", document, GIVE_UP_S)
        yield attack
        for thread in attack.threads:
            thread.join()
