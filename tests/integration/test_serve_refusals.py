"""What the server refuses: names, methods, fields, spans, texts and bodies that are wrong or too long; connections that
only hold a place. And what its figures and log lines say of its store and errors."""

import contextlib
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cacheblend.engines.tokens.builder import PromptBuilder
from cacheblend.serve.errors import ApiError
from cacheblend.serve.log_lines import JsonLines
from cacheblend.serve.metrics import Metrics
from cacheblend.serve.middleware import CONTAINERS, FREE, VALUES, BodyBudget, check_shape
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import MemoryStore
from openai_asking import ask, messages
from random_words import words
from serving import connected, running, shallow
from small_llama import wait_until


@pytest.fixture
def url(shallow_url: str) -> str:
    return shallow_url


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost:8000", "127.0.0.1", "[::1]:80", "server.example:1", "SERVER.example.")),
        *((name, 403) for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example")),
    ],
)
def test_only_names_of_the_server_are_answered(url: str, host: str, status: int) -> None:
    for method, path in (("GET", "/v1/chunks"), ("GET", "/"), ("DELETE", "/v1/chunks/00"), ("GET", "/metrics")):
        answer = httpx.request(method, url + path, headers={"Host": host}, timeout=60)
        assert answer.status_code == (404 if method == "DELETE" and status == 200 else status)
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_methods_queries_hosts_models_and_routes(url: str) -> None:
    """HEAD is GET without a body."""
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/"):
        got, head = httpx.get(url + path), httpx.head(url + path)
        assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]

    # a wrong method is told the right ones, a wrong query its name
    answer = httpx.options(f"{url}/v1/chunks")
    assert answer.status_code == 405 and answer.headers["allow"]
    assert httpx.get(f"{url}/v1/chunks?limit=0").json()["error"]["param"] == "limit"

    # a probe without a host is answered, and an empty host is not
    for version, status in ((b"HTTP/1.0", b"200"), (b"HTTP/1.0\r\nHost: ", b"403")):
        with connected(url) as client:
            client.sendall(b"GET /health " + version + b"\r\n\r\n")
            assert client.recv(64).split()[1] == status

    # another route, another model, and no JSON
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="no model"):
        ask(url, model="gpt-4")
    broken = httpx.post(f"{url}/v1/chat/completions", content=b"{", headers=JSON)
    assert broken.status_code == 400 and broken.json()["error"]["message"]


def test_figures_and_readiness_say_whether_the_store_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ServeSettings(ready_needs_store=True), model=shallow()) as needing:
        assert httpx.get(f"{needing}/health").json() == {"status": "ok"}
        assert httpx.get(f"{needing}/ready").json() == {"status": "ready", "waiting": 0, "active": 0}
        httpx.post(f"{needing}/v1/completions", json={"prompt": "lamp", "max_tokens": 2}, timeout=60).raise_for_status()
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 1.0' in text and 'route="/v1/completions",status="200"}' in text
        assert "process_resident_memory_bytes" in text and "cacheblend_build_info{" in text
        counted = ("hit_tokens_total", "recomputed_tokens_total", "store_bytes", "requests_waiting")
        for name in ("ttft_seconds_bucket", "inter_token_seconds_bucket", *counted):
            assert f"cacheblend_{name}" in text

        def fails(_: object) -> None:
            raise OSError("it is gone")

        monkeypatch.setattr(MemoryStore, "stats", fails)
        answer = httpx.get(f"{needing}/ready")
        assert answer.status_code == 503 and "memory" in answer.text
        assert httpx.get(f"{url}/ready").status_code == 200  # it does not need one
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 0.0' in text
        assert float(text.partition('cacheblend_store_errors_total{tier="memory",what="answer"} ')[2].split()[0]) >= 1


def test_a_store_that_hangs_keeps_no_answer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapers have gone when it answers, and each scrape has a thread of those that write answers."""
    gate, real = threading.Event(), MemoryStore.stats

    def hangs(*arguments: Any) -> Any:
        gate.wait(120)
        return real(arguments[0])

    monkeypatch.setattr("cacheblend.serve.metrics.ANSWER_S", 0.05)
    monkeypatch.setattr("cacheblend.serve.tenants._COUNT_S", 0.05)
    monkeypatch.setattr("cacheblend.serve.tenants._COUNT_VALID_S", 0.0)
    try:
        with running(ServeSettings(store_bytes=1 << 30), model=shallow()) as url, httpx.Client(timeout=60) as http:
            monkeypatch.setattr(MemoryStore, "stats", hangs)
            monkeypatch.setattr(MemoryStore, "held", hangs)
            for _ in range(45):
                with contextlib.suppress(httpx.ReadTimeout):
                    httpx.get(f"{url}/metrics", timeout=0.02)
            for _ in range(6):
                body = {"prompt": "lamp", "max_tokens": 2}
                assert http.post(f"{url}/v1/completions", json=body).status_code == 200
            assert 'cacheblend_store_up{tier="memory"} 0.0' in http.get(f"{url}/metrics").text
            gate.set()  # one that is slow, and answers when nobody waits any more, is up

            def is_up() -> bool:
                return 'cacheblend_store_up{tier="memory"} 1.0' in http.get(f"{url}/metrics").text

            wait_until(is_up)
            slow = threading.Event()
            monkeypatch.setattr(MemoryStore, "stats", lambda self: (slow.wait(0.3), real(self))[1])
            assert is_up() and is_up()
    finally:
        gate.set()


def test_a_store_whose_folder_is_gone_is_down_until_it_is_back(tmp_path: Path) -> None:
    folder, aside = tmp_path / "store", tmp_path / "aside"
    with running(ServeSettings(ready_needs_store=True, drain_s=1), str(folder), model=shallow()) as url:

        def up() -> tuple[int, bool]:
            text = httpx.get(f"{url}/metrics", timeout=60).text
            return httpx.get(f"{url}/ready", timeout=60).status_code, 'cacheblend_store_up{tier="disk"} 1.0' in text

        ask = {"prompt": "lamp", "max_tokens": 2}
        assert up() == (200, True)
        folder.rename(aside)
        assert up() == (503, False)
        assert httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code == 200  # answers without it
        stored = httpx.post(f"{url}/v1/chunks", json={"chunks": [{"text": words(60)}]}, timeout=60)
        assert stored.status_code == 503 and not folder.exists()  # nothing is made where a disk may come back
        aside.rename(folder)
        assert up() == (200, True)
        assert httpx.post(f"{url}/v1/chunks", json={"chunks": [{"text": words(60)}]}, timeout=60).status_code == 200


@pytest.mark.may_fail("request")
def test_log_lines_have_a_time_and_the_requests_id(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> bytes:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Metrics, "text", fails)
    with caplog.at_level("INFO", "cacheblend.serve"):
        body = {"prompt": "lamp", "max_tokens": 2}
        answers = [httpx.get(f"{url}/metrics"), httpx.post(f"{url}/v1/completions", json=body, timeout=60)]
        time.sleep(0.1)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [503, 200] and len(set(ids)) == 2
    [error] = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == ids[0] and "on purpose" in error["error"] and error["time"].endswith("+00:00")
    [asked] = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (asked["request_id"], asked["status"], asked["key"]) == (ids[1], 200, "anyone")
    assert asked["prompt_tokens"] > 0 and asked["ttft_s"] > 0
    [message] = [record.message for record in caplog.records if record.name == "cacheblend.serve.requests"]
    assert json.loads(message)["path"] == "/v1/completions"  # one line of JSON, whatever the log's format


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n:"),
        ({"n": 9}, "at most 8 choices"),
        ({"top_logprobs": 3}, "logprobs: true"),
        ({"documents": ["lamp " * 9000]}, 'documents.0: must be an object with "text", and "title" if it has one'),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"cacheblend": {"selector": "best"}}, "selector"),
        ({"cacheblend": {"mode": "fast"}}, "mode"),
        ({"cacheblend": {"ratio": 0.3}}, "ratio"),
        ({"cacheblend": {"recompute_ratio": 2}}, "recompute_ratio"),
        ({"chat_template_kwargs": {"chat_template": "/etc/passwd"}}, "chat_template"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "tokens"),
    ],
)
def test_what_is_wrong_is_said_in_openais_form(url: str, change: dict[str, Any], message: str) -> None:
    body = {"model": "nano", "messages": messages(), "max_tokens": 2} | change
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and message in f"{error['param']} {error['message']}"
    assert len(error["message"]) < 500 and "lamp lamp" not in error["message"]


@pytest.mark.parametrize(
    ("prompt", "spans", "message"),
    [
        ([400, 401, 402], [[0, 9]], "lie in it"),
        ([400, 401, 402], [[1, 1]], "lie in it"),
        ([400, 401, 402], [[0, 2], [1, 3]], "do not overlap"),
        ("text", [[0, 2]], "token ids"),
        ([], None, "empty"),
        ([-1], None, "token ids must be in"),
        ([10**9], None, "token ids must be in"),
    ],
)
def test_spans_and_ids_that_cannot_be_meant(url: str, prompt: Any, spans: Any, message: str) -> None:
    body = {"model": "nano", "prompt": prompt, "max_tokens": 1, "cacheblend": {"chunks": spans}}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ("/v1/chat/completions", {"messages": [{"content": [{"text": "a\udfffb"}]}]}, "messages.0.content.0.text"),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [], "documents": [{"text": "\ud800"}]}, "documents.0.text"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": ["\ud800"]}, "prompt.0"),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}, "model"),
        ("/v1/completions", {"prompt": "a", "cacheblend": {"\ud800": 1}}, "cacheblend"),
        ("/v1/completions", {"prompt": "a", "stop": ["\ud800"]}, "stop.0"),
        ("/v1/chunks", {"chunks": [{"text": "\ud800"}]}, "chunks.0.text"),
        ("/v1/chunks", {"chunks": [{"text": "a", "title": "\ud800"}]}, "chunks.0.title"),
        ("/v1/chunks", {"chunks": [{"text": "a"}], "salt": "\ud800"}, "salt"),
        ("/playground/explain", {"documents": [{"text": "a"}], "question": "\ud800"}, "question"),
    ],
)
def test_text_that_is_not_valid_unicode(url: str, path: str, body: dict[str, Any], param: str) -> None:
    written = json.dumps(body)  # in ASCII, with the surrogate as an escape
    answer = httpx.post(f"{url}{path}", content=written, headers=JSON, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert error["param"] == param and "surrogate" in error["message"], answer.text


def test_a_surrogate_pair_is_a_character_half_of_one_is_none_and_long_text_is_counted(url: str) -> None:
    """These are not UTF-8, yet Python's JSON parser reads them."""
    for written, status in ((rb"\ud83d\ude00", 200), (b"bad \xed\xa0\x80 x", 400)):
        body = b'{"prompt": "' + written + b'", "max_tokens": 1}'
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=JSON)
        assert answer.status_code == status and ("surrogate" in answer.text) == (status == 400), answer.text

    # text that is long for its tokens is counted until it is too much
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "lamp " * 4000}, timeout=60)
    assert answer.status_code == 400 and "2,048" in answer.json()["error"]["message"].replace("2048", "2,048")


def test_a_request_that_asks_for_an_upgrade_is_told_why_it_has_no_body(url: str) -> None:
    asked = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"}
    error = httpx.post(f"{url}/v1/completions", json={"prompt": "lamp"}, headers=asked, timeout=60)
    assert error.status_code == 400
    assert "'h2c'" in error.text and "HTTP/1.1 without Upgrade" in error.text
    assert httpx.get(f"{url}/v1/models", headers=asked, timeout=60).status_code == 200  # it has no body


def test_bodies_that_are_too_long() -> None:
    with running(ServeSettings(max_body_bytes=1000), model=shallow()) as url:
        announced = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 2000})
        pieces = httpx.post(f"{url}/v1/completions", content=(b"x" * 100 for _ in range(30)))
        assert announced.status_code == pieces.status_code == 413
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("size", [100_000, 2_000_000, 15_600_000])
def test_a_long_text_is_refused_by_its_length(url: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def tool_with(value: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": value}}}]}


@pytest.mark.parametrize(
    "more",
    [
        tool_with(["lamp " * 40_000]),
        tool_with(["lamp"] * 40_000),
        tool_with([int("7" * 4000)] * 30),
        tool_with([10**40 + 7] * 40_000),
        tool_with([12345678] * 30_000),
        {"chat_template_kwargs": {"thinking": "lamp " * 40_000}},
        {},
    ],
    ids=lambda more: next(iter(more), "name"),
)
def test_a_long_text_beside_the_messages_is_refused_before_it_is_tokenised(
    url: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptBuilder, "chat", None)
    message = {"role": "user", "content": "lamp"} | ({} if more else {"name": {"lamp " * 40_000: 1}})
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = httpx.post(url + path, json={"messages": [message], **more}, timeout=60)
        assert answer.status_code in (400, 413) and answer.json()["error"]["code"] == "too_long", (path, answer.text)


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
        for _ in range(4):
            closing.enter_context(connected(url)).sendall(head + b" " * 990_000)
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
                given.enter_context(budget.open(tenant))(FREE + (1 << 20))
                taken += 1 << 20
        assert refused.value.status == 503
        assert taken == {"many": 32, "few": 16, "last": 8}[tenant] << 20
    given.close()
    with budget.open("many") as take:
        take(FREE + (32 << 20))


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


WITHIN_S = 0.4
HANG_S = 300.0
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = {"prompt": "The boot was sold to Luden.", "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    with running(ServeSettings(headers_s=WITHIN_S, body_s=WITHIN_S, drain_s=1), model=shallow()) as address:
        yield address


def opened(hasty: str) -> socket.socket:
    return connected(hasty, HANG_S)


def post(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {length or len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


def until_closed(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            read += part
    return read


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", []),
        (b"GET /hea", [408]),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: ", [408]),
        (GET, [200]),  # and nothing more
        (GET * 3, [200, 200, 200]),
        (post(b'{"prompt"', 100), [408]),
        (post(b"x", 10**9), [413]),  # the rest is not waited for
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),  # TLS
    ],
)
def test_a_connection_is_closed_on_which_nothing_more_comes(hasty: str, sent: bytes, answers: list[int]) -> None:
    with opened(hasty) as client:
        client.sendall(sent)
        read = until_closed(client)
        found = [int(part[:3]) for part in read.split(b"HTTP/1.1 ")[1:]]
        assert found == answers, read


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX: ", post(b'{"prompt": "', 10**6), post(b"x", 10**9)])
def test_byte_by_byte_is_not_more_time(hasty: str, start: bytes) -> None:
    with opened(hasty) as client, contextlib.suppress(ConnectionError):
        client.sendall(start)
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            client.sendall(b"x")
            time.sleep(0.02)
        pytest.fail("the server still reads")


def test_answers_that_are_not_read_are_not_kept(hasty: str) -> None:
    """Much more than the sockets hold, so that the server waits for its client."""
    with opened(hasty) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        with contextlib.suppress(ConnectionError):
            while True:  # a connection that is cut is told at the second try
                time.sleep(WITHIN_S / 4)
                client.send(b"x")
        assert until_closed(client).count(b"HTTP/1.1 200") < 1000


def test_a_long_request_is_not_cut_and_many_that_wait_leave_no_connection_behind(hasty: str) -> None:
    with opened(hasty) as client:
        client.sendall(GET)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /hea")
        assert until_closed(client).partition(b"HTTP/1.1 ")[2].startswith(b"408")
    with httpx.stream("POST", f"{hasty}/v1/completions", json=LONG | {"stream": True}, timeout=HANG_S) as stream:
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    with httpx.Client(base_url=hasty, timeout=HANG_S) as http:
        for _ in range(3):
            assert http.post("/v1/completions", json=LONG).status_code == 200

    # many that wait leave no connection behind
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(opened(hasty)) for _ in range(200)]
        for number, client in enumerate(clients):
            client.sendall((GET + post(b"{}", 50))[:number])
        assert httpx.get(f"{hasty}/health", timeout=HANG_S).status_code == 200
        for client in clients:
            until_closed(client)

    # there are no websockets
    lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13")
    with opened(hasty) as client:
        client.sendall("\r\n".join(["GET /v1/models HTTP/1.1", "Host: evil.example", *lines, "", ""]).encode())
        assert b"101 Switching" not in until_closed(client)


def test_one_connection_too_many_ends_the_one_that_waited_longest_or_is_told_why() -> None:
    with running(ServeSettings(connections=3, drain_s=1), model=shallow()) as url, contextlib.ExitStack() as closing:
        first, *others = [closing.enter_context(opened(url)) for _ in range(3)]
        httpx.get(f"{url}/health", timeout=HANG_S).raise_for_status()  # the fourth
        assert until_closed(first).startswith(b"HTTP/1.1 503")
        for client in others:
            client.sendall(GET)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")

    # where all have requests, the next one is told why
    with running(ServeSettings(connections=2, drain_s=1), model=shallow()) as url, contextlib.ExitStack() as closing:
        for _ in range(2):
            client = closing.enter_context(opened(url))
            client.sendall(post(b"", 100).replace(b"Host: here", b"Host: here\r\nExpect: 100-continue"))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 100")  # the server waits for the body
        answer = httpx.get(f"{url}/health", timeout=HANG_S)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "too_many_connections"
    with running(ServeSettings(connections=2, drain_s=1), model=shallow()) as url:
        for _ in range(5):  # places are given back
            assert httpx.get(f"{url}/health", timeout=HANG_S).status_code == 200
