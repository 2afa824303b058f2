"""What a client's stream notices of clients that mean ill, what memory they take, and what their bodies cost.

Each kind of attack in turn, then all of them together; afterwards documents of 15 MB, whose clients give up. Streams
are read before and meanwhile; the longest time between two of their events counts, and what one token of another client
waits. At last, by kind of field, the server's processor time for bodies of doubling size.
"""

import contextlib
import http.client
import json
import math
import random
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from cacheblend.engines.provenance import stamp
from lab.bench import AdvanceStage
from lab.nano.questions import draw_questions
from lab.servers.embedded_server import serving

CHAT_BYTES, DOCUMENT_BYTES = 16_000_000, 15_000_000
GIVE_UP_S = 10.0  # of a document's client; of every second post's 1
WARM_CHUNKS = 60
CHATS, POSTS, CHUNKS, DOCUMENTS, SOCKETS = 3, 2, 700, 1, 500
"""In each round; of a post its chunks. Chats have 16 MB, documents 15 MB, sockets send half a request."""
ANSWER_TOKENS = 200  # of each stream
FLOOD, PIECES_BYTES, PARTS, SALTS, LISTED, LISTINGS = 10_000, 4_000_000, 46_000, 4_000, 3_000, 60
HEADERS, REFUSED_BYTES, ANSWERS, PROMPTS, LOGPROB_TOKENS, EXPLAINED = 14_000, 550_000_000, 7, 32, 1500, 1_200
JSON = {"Content-Type": "application/json"}
START = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
REST, DOCUMENT, TOGETHER = "at rest", "long documents", "together"
FIELDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "text": ("/tokenize", lambda size: {"prompt": "lamp " * size}),
    "parts": ("/tokenize", lambda size: {"messages": [_user([{"type": "text", "text": ""}] * (size // 4))]}),
    "short parts": (
        "/tokenize",
        lambda size: {"messages": [_user([{"type": "text", "text": "a lamp"}] * (size // 4))]},
    ),
    "messages": ("/tokenize", lambda size: {"messages": [_user("a lamp")] * (size // 4)}),
    "documents": (
        "/tokenize",
        lambda size: {"messages": [_user("?")], "documents": [{"text": f"lamp {n}"} for n in range(size // 8)]},
    ),
    "message fields": ("/tokenize", lambda size: {"messages": [_user("?") | {f"x{n}": "y" for n in range(size)}]}),
    "tools": (
        "/tokenize",
        lambda size: {
            "messages": [_user("?")],
            "tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(size // 8)],
        },
    ),
    "token ids": ("/detokenize", lambda size: {"tokens": [300] * min(size, 2000)}),
    "stop texts": ("/v1/completions", lambda size: {"prompt": "a", "max_tokens": 1, "bad_words": ["b"] * (size // 64)}),
    "biases": (
        "/v1/completions",
        lambda size: {"prompt": "a", "max_tokens": 1, "logit_bias": {str(n): 1 for n in range(size // 16)}},
    ),
}
"""Where a kind of field is sent, and a body in which it has about so many words."""
SIZES = (2048, 4096, 8192, 16384)
COST_S, LEAST_ASKED, MOST_ASKED = 0.5, 5, 200


def run(model: str, rounds: int, seed: int, advance: AdvanceStage) -> dict[str, Any]:
    """Runs so many rounds of each stage on a model folder, or ``nano``: ``figures`` and the raw numbers."""
    rng, kinds = random.Random(seed), dict[str, list[dict[str, int]]]()
    stalls: dict[str, list[float]] = {stage: [] for stage in STAGES}
    waits: dict[str, list[float]] = {stage: [] for stage in STAGES}
    wrong = 0
    words = [word for text in draw_questions(seed, 1)[0].passages for word in text.text.split()]
    with serving(model, "memory://?max_bytes=16MiB") as (url, process):
        _, expected = _stream(url)  # so that what the server fills by itself is full: its store, its caches of kernels
        chunks = [{"text": " ".join(rng.choices(words, k=100))} for _ in range(WARM_CHUNKS)]
        _post(f"{url}/v1/chunks", {"chunks": chunks}).close()
        most = {REST: _resident_bytes(url)}
        for stage in STAGES:
            most.setdefault(stage, 0)
            for number in range(rounds):
                with _attacks(url, words, rng, stage) as attack:
                    waiting = _Waiting(url)
                    while len(stalls[stage]) <= number or any(thread.is_alive() for thread in attack.threads):
                        gap, answer = _stream(url)
                        stalls[stage].append(gap)
                        wrong += answer != expected
                        most[stage] = max(most[stage], _resident_bytes(url))
                    waits[stage].append(waiting.longest())
                kinds.setdefault(stage, []).append(attack.statuses)
                advance(stage, number + 1, rounds)
        costs = {name: [_cost(url, process.pid, *FIELDS[name], size) for size in SIZES] for name in FIELDS}
    attacked = [max(stalls[stage]) for stage in (*KINDS, TOGETHER) if stage != "flood"]
    return {
        "figures": {
            "hostile_stall_ms": 1e3 * max(attacked),
            "flood_stall_ms": 1e3 * max(stalls["flood"]),
            "hostile_rss": max(most[stage] for stage in (*KINDS, TOGETHER)) / most[REST],
            "token_wait_s": max(max(waits[stage]) for stage in (*KINDS, TOGETHER)),
            "document_stall_ms": 1e3 * max(stalls[DOCUMENT]),
            "document_rss": most[DOCUMENT] / most[REST],
            "quiet_stall_ms": 1e3 * max(stalls[REST]),
            "wrong_answers": wrong,
            "linear": max(exponent(cost) for cost in costs.values()),
        },
        "by_kind_ms": {stage: 1e3 * max(stalls[stage]) for stage in STAGES},
        "wait_s": waits,
        "stall_s": stalls,
        "processor_s": costs,
        "exponents": {name: exponent(cost) for name, cost in costs.items()},
        "resident_bytes": most,
        "statuses": kinds,
        "settings": {
            "model": model,
            "rounds": rounds,
            "seed": seed,
            "answer_tokens": ANSWER_TOKENS,
            "chats": CHATS,
            "prompts": PROMPTS,
            "posts": POSTS,
            "chunks": CHUNKS,
            "documents": DOCUMENTS,
            "sockets": SOCKETS,
            "connections": FLOOD,
            "sizes": SIZES,
        },
        **stamp(),
    }


def exponent(costs: list[float]) -> float:
    """By which power of a body's size its cost grows: between the two largest of `SIZES`."""
    return math.log2(costs[-1] / costs[-2])


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), JSON)
    return urllib.request.urlopen(request, timeout=600)


def _stream(url: str) -> tuple[float, str]:
    """The longest time in seconds between two events of a stream, and its text."""
    body = {"prompt": "lamp", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    gap, last, answer = 0.0, None, ""
    with _post(f"{url}/v1/completions", body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                gap, last = max(gap, now - last if last is not None else 0.0), now
                answer += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return gap, answer


class _Waiting:
    """Asks for one token, and stores a chunk, again and again in a thread until it is asked how long that took."""

    def __init__(self, url: str) -> None:
        self._url, self._ended, self._found = url, threading.Event(), 0.0
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ended.wait(0.2):
            began = time.perf_counter()
            for path, body in (
                ("completions", {"prompt": "lamp", "max_tokens": 1}),
                ("chunks", {"chunks": [{"text": "one lamp"}]}),
            ):
                with contextlib.suppress(OSError):
                    _post(f"{self._url}/v1/{path}", body).close()
                self._found = max(self._found, time.perf_counter() - began)

    def longest(self) -> float:
        self._ended.set()
        self._thread.join()
        return self._found


def _resident_bytes(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=600) as response:
        [line] = [line for line in response.read().decode().splitlines() if line.startswith("process_resident_memory")]
    return float(line.split()[1])


def _cost(url: str, process: int, path: str, body: Callable[[int], dict[str, Any]], size: int) -> float:
    """The server's processor time in seconds for a body, answered or refused: the median of as many as take `COST_S`,
    by Linux's clock of another process, which has nanoseconds; /metrics has hundredths of a second."""
    clock, sent, costs = (~process << 3) | 2, json.dumps(body(size)).encode(), list[float]()
    while len(costs) < LEAST_ASKED or (sum(costs) < COST_S and len(costs) < MOST_ASKED):
        before = time.clock_gettime(clock)
        request = urllib.request.Request(f"{url}{path}", sent, JSON)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=600).close()
        costs.append(time.clock_gettime(clock) - before)
    return statistics.median(costs)


class _Attack:
    """Attackers' threads, and how often each kind was answered with which status."""

    def __init__(self, url: str, words: list[str], rng: random.Random) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), int(parts.port or 80))
        self.words, self.rng = words, rng
        self.threads: list[threading.Thread] = []
        self.statuses: dict[str, int] = {}
        self._lock = threading.Lock()

    def run(self, work: Callable[[], object]) -> None:
        """Runs work in a thread of its own."""
        thread = threading.Thread(target=work, daemon=True)
        self.threads.append(thread)
        thread.start()

    def start(self, kind: str, path: str, body: dict[str, Any], timeout: float = 600) -> None:
        """Sends a body from a thread of its own; a client that leaves after `timeout` seconds counts as gone."""
        sent = json.dumps(body).encode()
        self.run(lambda: self.ask(kind, "POST", path, sent, timeout))

    def ask(self, kind: str, method: str, path: str, body: bytes | None = None, timeout: float = 600) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=timeout)
        try:
            connection.request(method, path, body, JSON)
            answer = connection.getresponse()
            answer.read()
            outcome = str(answer.status)
        except TimeoutError:
            outcome = "gone"
        except (OSError, http.client.HTTPException) as error:
            outcome = type(error).__name__
        finally:
            connection.close()
        self.count(kind, outcome)

    def count(self, kind: str, outcome: str) -> None:
        with self._lock:
            self.statuses[f"{kind}: {outcome}"] = self.statuses.get(f"{kind}: {outcome}", 0) + 1

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=60)

    def send(self, kind: str, head: str, block: bytes, times: int) -> None:
        """Sends a request's head, then a block again and again, whatever is answered; notes the answer."""
        with self.connect() as connection:
            try:
                connection.sendall(head.encode())
                for _ in range(times):
                    connection.sendall(block)
            except OSError:
                self.count(f"{kind}, cut", "yes")
            try:
                self.count(kind, connection.recv(64)[9:12].decode() or "nothing")
            except OSError as error:
                self.count(kind, type(error).__name__)

    def half_open(self) -> socket.socket:
        """A connection that has sent half a request."""
        half = self.connect()
        half.sendall(f"{START}Content-Length: 1000\r\n\r\n{{".encode())
        return half


# ---- kinds of attack ------------------------------------------------------------------------------------------


def _long_bodies(attack: _Attack) -> None:
    passage = " ".join(attack.words) + ". "
    chat = {"messages": [_user(passage * (CHAT_BYTES // len(passage)))]}
    for _ in range(CHATS):
        attack.start("chat", "/v1/chat/completions", chat)
    for number in range(POSTS):
        chunks = [{"text": " ".join(attack.rng.choices(attack.words, k=100))} for _ in range(CHUNKS)]
        attack.start("post", "/v1/chunks", {"chunks": chunks}, 1 if number % 2 else 600)


def _flood(attack: _Attack) -> None:
    def connect() -> None:
        with contextlib.ExitStack() as closing:
            for _ in range(FLOOD):
                try:
                    closing.enter_context(attack.connect())
                except OSError as error:
                    attack.count("connection", type(error).__name__)
            time.sleep(1)

    attack.run(connect)


def _pieces(attack: _Attack) -> None:
    block = b"1\r\nx\r\n" * 10_000
    head = f"{START}Transfer-Encoding: chunked\r\n\r\n"
    for _ in range(4):
        attack.run(lambda: attack.send("pieces", head, block, PIECES_BYTES // len(block)))


def _parts(attack: _Attack) -> None:
    part = {"type": "text", "text": ""}
    messages = [_user([part] * 4000) for _ in range(PARTS // 4000)]
    attack.start("parts", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def _choices(attack: _Attack) -> None:
    attack.start("choices", "/v1/completions", {"prompt": "lamp", "n": 8, "max_tokens": 400, "ignore_eos": True})


def _prompts(attack: _Attack) -> None:
    asked = {"prompt": ["lamp"] * PROMPTS, "max_tokens": 100, "ignore_eos": True}
    attack.start("prompts", "/v1/completions", asked)


def _logprobs(attack: _Attack) -> None:
    asked = {"n": ANSWERS, "max_tokens": LOGPROB_TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    attack.start("log-probabilities", "/v1/chat/completions", {"messages": [_user("lamp")], **asked})


def _listings(attack: _Attack) -> None:
    chunks = [{"token_ids": [300 + number // 900, 300 + number % 900]} for number in range(LISTED)]
    attack.ask("post", "POST", "/v1/chunks", json.dumps({"chunks": chunks}).encode())
    for _ in range(LISTINGS):
        attack.run(lambda: attack.ask("listing", "GET", "/v1/chunks?limit=1"))


def _salts(attack: _Attack) -> None:
    def use() -> None:
        for number in range(SALTS):
            body = {"documents": [{"id": "empty", "text": ""}], "salt": f"salt {number}"}
            attack.ask("salt", "POST", "/v1/documents", json.dumps(body).encode())
        for _ in range(8):
            attack.ask("listing", "GET", "/v1/chunks?limit=1")

    attack.run(use)


def _explained(attack: _Attack) -> None:
    text = " ".join(attack.rng.choices(attack.words, k=EXPLAINED // 2))
    body = {"documents": [{"text": text}], "question": "Where is the lamp?"}
    attack.start("explained", "/playground/explain", body, 0.5)


def _headers(attack: _Attack) -> None:
    block = b"a:b\r\n" * HEADERS
    for _ in range(8):
        attack.run(lambda: attack.send("headers", START, block + b"\r\n", 1))


def _refused(attack: _Attack) -> None:
    block, head = b"x" * 1_000_000, f"{START}Content-Length: {REFUSED_BYTES}\r\n\r\n"
    for _ in range(8):
        attack.run(lambda: attack.send("refused", head, block, REFUSED_BYTES // len(block)))


KINDS: dict[str, Callable[[_Attack], None]] = {
    "long bodies": _long_bodies,
    "flood": _flood,
    "pieces": _pieces,
    "parts": _parts,
    "choices": _choices,
    "prompts": _prompts,
    "log-probabilities": _logprobs,
    "listings": _listings,
    "salts": _salts,
    "explained": _explained,
    "headers": _headers,
    "refused": _refused,
}
STAGES = (REST, *KINDS, TOGETHER, DOCUMENT)


@contextlib.contextmanager
def _attacks(url: str, words: list[str], rng: random.Random, stage: str) -> Iterator[_Attack]:
    attack = _Attack(url, words, rng)
    with contextlib.ExitStack() as closing:
        if stage == "long bodies":
            for _ in range(SOCKETS):
                closing.enter_context(attack.half_open())
        for kind in KINDS if stage == TOGETHER else [stage] if stage in KINDS else []:
            KINDS[kind](attack)
        if stage == DOCUMENT:
            passage = " ".join(words) + ". "
            for number in range(DOCUMENTS):
                document = {"id": f"long {number}", "text": passage * (DOCUMENT_BYTES // len(passage))}
                attack.start("document", "/v1/documents", {"documents": [document]}, GIVE_UP_S)
        yield attack
        for thread in attack.threads:
            thread.join()
