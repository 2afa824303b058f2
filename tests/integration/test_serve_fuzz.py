"""Whatever clients send: never an error that is the server's own, never a hang, and the next answer is right.

2,000 cases of schemathesis by the server's own OpenAPI schema (a share of them; half are always the same, and take
turns), 600 bodies that are damaged in some way (a share, half of it the same in every run), clients that are slow or
vanish.
"""

import copy
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from cacheblend.serve.settings import ServeSettings
from campaign import SEED, rotating, share
from serving import connected, running, shallow

schemathesis = pytest.importorskip("schemathesis")

CASES = share(2000)
BODIES = share(600)
HANG_S = 600.0
PROMPT = "The boot was sold to Luden. Who has the boot?"
QUESTION = {"model": "nano", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    own = ServeSettings(timeout_s=2, max_tokens=4, chunk_tokens=16, drain_s=1, active=4, waiting=16)
    with running(own, model=shallow()) as address:
        yield address


def answered(url: str) -> Any:
    """The answer to the question; asked again where a busy machine makes it too late."""
    end = time.monotonic() + HANG_S
    while (answer := httpx.post(f"{url}/v1/completions", json=QUESTION, timeout=HANG_S)).status_code == 503:
        assert time.monotonic() < end, answer.text
    return answer.json()["choices"]


@pytest.fixture(autouse=True)
def answers_as_before(url: str) -> Iterator[None]:
    """Behind each test the server still gives the answer that it gave before."""
    before = answered(url)
    yield
    end = time.monotonic() + HANG_S
    while httpx.get(f"{url}/ready", timeout=HANG_S).json()["active"] and time.monotonic() < end:
        time.sleep(0.05)
    assert answered(url) == before


def check(status: int, body: str, what: Any) -> None:
    """No internal error: 503 only after a timeout, 429 only where the queue is full."""
    assert status < 500 or status == 503, (what, body)
    if status == 503:
        assert json.loads(body)["error"]["code"] in {"timeout", "store"}, (what, body)
    if 400 <= status < 500 and body:
        assert json.loads(body)["error"]["message"], (what, body)


def as_meant(body: Any) -> None:
    """A body by the schema gets past what the schema cannot say: the model's name, roles, kinds of parts, what the chat
    template reads and the context holds."""
    if isinstance(body, dict):
        for name in (
            "model",
            "tools",
            "reasoning_effort",
            "chat_template_kwargs",
            "max_completion_tokens",
            "min_tokens",
        ):
            body.pop(name, None)
        body |= {name: 4 for name in ("max_tokens", "max_output_tokens") if body.get(name)}
        if not body.get("stream"):
            body.pop("stream_options", None)
        for message in body.get("messages") or ():
            for name in message.keys() - {"role", "content"}:
                del message[name]
            message["role"] = "user"
            message["content"] = message.get("content") or "Who has the boot?"
            for part in message["content"] if isinstance(message["content"], list) else ():
                part |= {"type": "text", "text": part.get("text") or "The boot was sold to Luden."}
        if not body.get("prompt", True):
            body["prompt"] = [300]
        if isinstance(body.get("input"), list):
            body["input"] = [{"role": "user", "content": "Who has the boot?"}, *body["input"]]


@pytest.mark.parametrize("is_core", rotating([False, True], core=[False]), ids=["drawn now", "always the same"])
def test_cases_by_the_servers_own_schema(url: str, is_core: bool) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    runs = [
        (operation, mode)
        for operation in operations
        for mode in schemathesis.GenerationMode
        if len(operation.body) or (len(operation.path_parameters) and mode.is_positive)  # any path is a string
    ]
    seen: Counter[tuple[str, int]] = Counter()

    def ask(case: Any) -> None:
        if case.meta is not None and case.meta.generation.mode.is_positive:
            as_meant(case.body)
        answer = case.call(timeout=HANG_S)
        check(answer.status_code, answer.text, case.as_curl_command())
        seen[case.operation.label, answer.status_code] += 1

    for operation, mode in runs:
        of_them = given(case=operation.as_strategy(generation_mode=mode))(ask)
        settings(
            max_examples=-(-CASES // len(runs) // 2),
            phases=[Phase.generate],
            deadline=None,
            derandomize=is_core,
            suppress_health_check=list(HealthCheck),
        )(of_them)()
    for operation in operations:
        ask(operation.Case(path_parameters={"chunk_id": "00", "document_id": "00", "model_id": "nano"}))
    for (label, status), count in sorted(seen.items()):
        print(f"{label:40} {status} {count:5}")
    assert seen.total() >= CASES // 2


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "nano",
        "prompt": [300, 301, 302, 303, 304, 305],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 1,
        "stop": ["x"],
        "logprobs": 2,
        "stream": False,
        "cacheblend": {"chunks": [[1, 3], [3, 5]], "mode": "blend", "recompute_ratio": 0.2, "salt": "s"},
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": [{"type": "text", "text": "The boot was sold to Luden. " * 4}] * 2},
        ],
        "documents": [{"title": "one", "text": "The lamp went to Tairn."}],
        "max_tokens": 2,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cacheblend": {"selector": "hkvd", "recompute_ratio": 0.3},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "The boot was sold to Luden. " * 4}] * 2}
        ],
        "instructions": "Answer.",
        "max_output_tokens": 2,
        "temperature": 0.5,
        "stream": True,
        "store": False,
        "text": {"format": {"type": "text"}},
    },
    "/tokenize": {
        "messages": [{"role": "user", "content": "Who has the boot?"}],
        "documents": [{"title": "one", "text": "The lamp went to Tairn."}],
        "return_token_strs": True,
        "add_special_tokens": False,
    },
    "/detokenize": {"model": "nano", "tokens": [300, 301, 302]},
    "/v1/chunks": {"chunks": [{"text": "The lamp went to Tairn.", "title": "one"}], "pin": True, "salt": "s"},
    "/v1/documents": {"documents": [{"id": "a", "text": "The lamp went to Tairn.", "title": "one"}], "salt": "s"},
    "/playground/explain": {
        "documents": [{"title": "one", "text": "The lamp went to Tairn. The road was cold."}],
        "question": "Who has the lamp?",
        "recompute_ratio": 0.2,
        "selector": "hkvd",
    },
}
ODD: list[Any] = [
    None, True, -1, 0, 1e-300, 1e308, 2**63, 2**200, "", "\x00", "\ud800", "\u202e", "x" * 5000, [], {}, [[]], [None],
    {"a": {"b": []}}, "NaN", float("nan"), float("inf"), "../../etc/passwd", "file:///etc/passwd", -(2**63), 3.5,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that lies in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def damaged(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body with something wrong in it: a value, a key, or its bytes."""
    value: Any = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 2, 4))):
        *path, key = rng.choice(list(places(value)) or [("x",)])
        inside = value
        for step in path:
            inside = inside[step]
        what, odd = rng.randrange(4), copy.deepcopy(rng.choice(ODD))  # or a list could be put into itself
        if what == 0 and isinstance(inside, dict):
            inside.pop(key, None)
        elif what == 1 and isinstance(inside, dict):
            inside[rng.choice(["", "a", "\ud800", "x" * 300])] = odd
        else:
            inside[key] = odd
    raw = bytearray(json.dumps(value).encode())
    for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 5))):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw))]
    if rng.random() < 0.03:
        raw = bytearray(rng.choice((b"[", b'{"messages":', b'{"a":[')) * 20_000)
    return bytes(raw)


def test_damaged_bodies(url: str) -> None:
    core, drawn, seen = random.Random(6), random.Random(SEED), Counter[int]()
    with httpx.Client(base_url=url, timeout=HANG_S) as http:
        for number in range(BODIES):
            rng = drawn if number % 2 else core
            path = rng.choice(list(WHOLE))
            raw = damaged(rng, WHOLE[path])
            kind = rng.choice(["application/json"] * 8 + ["text/plain", "application/octet-stream"])
            answer = http.post(path, content=raw, headers={"Content-Type": kind})
            check(answer.status_code, answer.text, (number, path, raw[:2000]))
            seen[answer.status_code] += 1
    print(dict(seen))
    assert seen[200] and seen[400]


def head(length: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_clients_that_vanish(shallow_url: str) -> None:  # whose requests may take ten minutes
    rng, threads = random.Random(7), threading.active_count()
    body = json.dumps(QUESTION | {"max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    for number in range(60):
        with connected(shallow_url, HANG_S) as client:
            if number % 2:  # without a word of parting
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            whole = head(len(body)) + body
            client.sendall(whole[: rng.choice((3, len(whole) - 5, len(whole)))])
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.05)
    end = time.monotonic() + HANG_S
    while (state := httpx.get(f"{shallow_url}/ready").json())["active"] + state["waiting"] and time.monotonic() < end:
        time.sleep(0.05)
    assert state["active"] == state["waiting"] == 0
    assert threading.active_count() <= threads + 8


def test_a_client_that_does_not_read_delays_no_other(url: str) -> None:
    body = json.dumps(QUESTION | {"max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
    with connected(url, HANG_S) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(head(len(body)) + body)
        for _ in range(5):
            assert httpx.post(f"{url}/v1/completions", json=QUESTION, timeout=HANG_S).status_code == 200
        end = time.monotonic() + HANG_S
        while httpx.get(f"{url}/ready").json()["active"] and time.monotonic() < end:
            time.sleep(0.05)
        assert httpx.get(f"{url}/ready").json()["active"] == 0
