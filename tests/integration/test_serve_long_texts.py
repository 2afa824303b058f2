"""Texts and bodies that are too long or of too many values: refused early, within bounded memory and time."""

import contextlib
import socket
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cacheblend.serve.bodies import CONTAINERS, FREE, VALUES, BodyBudget, check_shape
from cacheblend.serve.errors import ApiError
from cacheblend.serve.settings import ServeSettings
from serving import running, shallow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(chunk_tokens=16, hosts=("server.example",), drain_s=5), model=shallow()) as address:
        yield address


@pytest.mark.parametrize("size", [100_000, 2_000_000, 15_600_000])
def test_a_long_text_is_refused_by_its_length(url: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.engines.tokens.builder import PromptBuilder

    tokenised: list[int] = []
    inner = PromptBuilder.encode
    monkeypatch.setattr(
        PromptBuilder, "encode", lambda self, text, *rest: (tokenised.append(len(text)), inner(self, text, *rest))[1]
    )
    text = "lamp " * (size // 5)
    chat = {"messages": [{"role": "user", "content": text}]}
    bodies = [("/v1/chat/completions", chat), ("/v1/completions", {"prompt": text})]
    bodies += [("/v1/chunks", {"chunks": [{"text": text}]})]
    bodies += [("/playground/explain", {"documents": [{"text": text}], "question": "Who?"})]
    for path, body in bodies:
        answer = httpx.post(url + path, json=body, timeout=60)
        assert answer.status_code in (400, 413), (path, answer.text)
        assert answer.json()["error"]["code"] == "too_long" and "at most" in answer.json()["error"]["message"]
    assert max(tokenised, default=0) < 100_000


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "x": ["lamp " * 40_000]}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "x": [int("7" * 4000)] * 60}}]},
        {"chat_template_kwargs": {"thinking": "lamp " * 40_000}},
        {},
    ],
)
def test_a_long_text_beside_the_messages_is_refused_too(url: str, more: dict[str, Any]) -> None:
    message = {"role": "user", "content": "lamp"} | ({} if more else {"name": {"lamp " * 40_000: 1}})
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = httpx.post(url + path, json={"messages": [message], **more}, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_long", (path, answer.text)


def test_text_that_is_long_for_its_tokens_is_counted_until_it_is_too_much(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "lamp " * 4000}, timeout=60)
    assert answer.status_code == 400 and "2,048" in answer.json()["error"]["message"].replace("2048", "2,048")


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b"[" + b"1," * VALUES + b"1]", True),
        (b"[" + b"1," * (VALUES + 1) + b"1]", False),
        (b"[" + b"[]," * CONTAINERS + b"1]", False),
        (b'{"a":"' + b"[,{" * (VALUES + 1) + b'"}', True),  # punctuation in a text is none
        (b'{"a":"\\"' + b"[," * (VALUES + 1) + b'"}', True),
        (b'{"a":"' + b"," * VALUES + b'", "b":[' + b"1," * (VALUES + 1) + b"1]}", False),
    ],
)
def test_bodies_of_too_many_values(body: bytes, is_taken: bool) -> None:
    with contextlib.nullcontext() if is_taken else pytest.raises(ApiError, match="at most"):
        check_shape(body)


def test_half_sent_bodies_share_a_bound() -> None:
    settings = ServeSettings(max_body_bytes=1_000_000, body_s=20)
    head = b"POST /v1/chunks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
    with running(settings, model=shallow()) as url, contextlib.ExitStack() as closing:
        port = int(url.rpartition(":")[2])
        for _ in range(4):
            half = closing.enter_context(socket.create_connection(("127.0.0.1", port)))
            half.sendall(head + b" " * 990_000)
        time.sleep(0.5)
        answer = httpx.post(f"{url}/v1/chunks", content=b" " * 900_000, timeout=30)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        short = {"prompt": "The boot was sold to Luden.", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=short, timeout=30).status_code == 200
    with running(settings, model=shallow()) as url:
        assert httpx.post(f"{url}/v1/chunks", content=b" " * 900_000, timeout=30).status_code == 400


def test_a_tenant_with_long_bodies_leaves_half_of_the_rest_to_each_other_one() -> None:
    budget, given = BodyBudget(64 << 20), contextlib.ExitStack()
    for tenant in ("many", "few", "last"):
        taken = 0
        with pytest.raises(ApiError, match="being read") as refused:
            while True:
                share = given.enter_context(budget.open(tenant))
                share.take(FREE + (1 << 20))
                taken += share.bytes
        assert refused.value.status == 503
        assert taken == {"many": 32, "few": 16, "last": 8}[tenant] << 20
    given.close()
    with budget.open("many") as share:
        share.take(FREE + (32 << 20))


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_text_that_nothing_ends_is_looked_at_once(end: bytes) -> None:
    """Each quote in it began another, and went to the end: 16,000 took a second, 160,000 minutes, without the lock."""
    check_shape(b'"' + b"," * (VALUES + 1) + b'\\"' * 1_000_000 + end)
    check_shape(b'{"a": "' + b"," * (VALUES + 1) + b'\\\\", "b": "' + b'\\"' * 1_000_000 + end)


@pytest.mark.parametrize("piece", [b"of the sea, ", b"a\\n,", b'\\",'])
def test_a_long_text_with_commas_is_looked_at_in_a_moment(piece: bytes) -> None:
    """Nothing is kept of each character: that took 130 bytes of each, and seconds without the interpreter's lock."""
    body = b'{"text":"' + piece * (4_000_000 // len(piece)) + b'"}'
    assert body.count(b",") > VALUES
    tracemalloc.start()
    try:
        check_shape(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
