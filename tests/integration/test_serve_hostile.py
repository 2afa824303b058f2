"""Clients that mean ill, and what the others notice of them: real sockets against a server in this process."""

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.tickets import Limits, QueueFullError, TooLateError
from cacheblend.nano.questions import draw_questions
from cacheblend.serve.bodies import CONTAINERS, FREE, VALUES, BodyBudget, check_shape
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import FairQueue
from cacheblend.serve.keys import KeyRing, add_key, read_keys, remove_key
from cacheblend.serve.settings import ServeSettings
from serving import running

WORDS = [word for text in draw_questions(5, 1)[0].passages for word in text.text.split()]
RNG = random.Random(23)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(chunk_tokens=16, hosts=("server.example",), drain_s=5)) as address:
        yield address


def words(count: int) -> str:
    return " ".join(RNG.choices(WORDS, k=count))


# ---- long texts ---------------------------------------------------------------------------------------------


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
    with running(settings) as url, contextlib.ExitStack() as closing:
        port = int(url.rpartition(":")[2])
        for _ in range(4):
            half = closing.enter_context(socket.create_connection(("127.0.0.1", port)))
            half.sendall(head + b" " * 990_000)
        time.sleep(0.5)
        answer = httpx.post(f"{url}/v1/chunks", content=b" " * 900_000, timeout=30)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        short = {"prompt": "The boot was sold to Luden.", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=short, timeout=30).status_code == 200
    with running(settings) as url:
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


# ---- many chunks --------------------------------------------------------------------------------------------


def test_a_short_post_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    many, few = ({"Authorization": f"Bearer {add_key(file, name)}"} for name in ("many", "few"))
    ended: list[str] = []
    with running(ServeSettings(keys=KeyRing(read_keys(file)), drain_s=5)) as url:

        def post(who: str, count: int, key: dict[str, str]) -> None:
            chunks = [{"text": words(60)} for _ in range(count)]
            assert httpx.post(f"{url}/v1/chunks", json={"chunks": chunks}, headers=key, timeout=300).status_code == 200
            ended.append(who)

        long = threading.Thread(target=post, args=("many", 300, many))
        long.start()
        time.sleep(0.3)
        post("few", 1, few)
        long.join()
    assert ended == ["few", "many"]


def test_work_for_a_client_that_is_gone_is_not_done(url: str) -> None:
    before = len(httpx.get(f"{url}/v1/chunks", timeout=60).json()["data"])
    chunks = [{"text": words(60)} for _ in range(300)]
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(f"{url}/v1/chunks", json={"chunks": chunks}, timeout=0.5)
    assert httpx.post(f"{url}/v1/chunks", json={"chunks": [{"text": words(60)}]}, timeout=300).status_code == 200
    assert len(httpx.get(f"{url}/v1/chunks", timeout=60).json()["data"]) < before + 300


def sliced(log: list[str], name: str, count: int) -> Callable[[], Any]:
    def work() -> Iterator[None]:
        for _ in range(count):
            log.append(name)
            time.sleep(0.005)
            yield
        return

    return work


def test_tenants_take_turns_whatever_they_ask_for() -> None:
    log: list[str] = []

    async def go() -> None:
        queue, end = FairQueue(1, 100), time.monotonic() + 60
        many = [asyncio.create_task(queue.run("a", sliced(log, "a", 10), end)) for _ in range(3)]
        await asyncio.sleep(0.01)
        one = asyncio.create_task(queue.run("b", sliced(log, "b", 5), end))
        await asyncio.gather(one, *many)
        queue.close()

    asyncio.run(go())
    first, last = log.index("b"), len(log) - log[::-1].index("b")
    assert log.count("a") == 30 and log[first:last].count("a") <= 6


def test_the_queue_is_bounded_and_who_has_most_gives_way() -> None:
    async def go() -> None:
        queue, end = FairQueue(1, 3), time.monotonic() + 60
        log: list[str] = []
        many = [asyncio.create_task(queue.run("a", sliced(log, str(n), 3), end)) for n in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await queue.run("a", sliced(log, "too many", 1), end)
        await queue.run("b", sliced(log, "b", 1), end)
        ended = await asyncio.gather(*many, return_exceptions=True)
        assert [isinstance(each, QueueFullError) for each in ended] == [False, False, False, True]
        assert "too many" not in log and "3" not in log and queue.waiting == 0
        assert await queue.run("a", lambda: 7, end) == 7  # all places are free again
        queue.close()

    asyncio.run(go())


@pytest.mark.parametrize("seed", range(5))
def test_places_are_given_back_however_work_ends(seed: int) -> None:
    rng = random.Random(seed)

    def fails() -> None:
        raise ValueError("it fails")

    async def gone() -> bool:
        return rng.random() < 0.3

    async def go() -> None:
        queue, tasks = FairQueue(2, 50), []
        for _ in range(40):
            work = rng.choice([fails, lambda: 1, sliced([], "x", 3)])
            end = time.monotonic() + rng.choice([-1, 0.02, 60])
            tasks.append(asyncio.create_task(queue.run(rng.choice("abc"), work, end, gone)))
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = (ValueError, TooLateError, ApiError, asyncio.CancelledError)
        assert all(each in (1, None) or isinstance(each, kinds) for each in ended)
        assert await queue.run("a", lambda: 7, time.monotonic() + 60) == 7
        await asyncio.sleep(0.05)
        assert queue.waiting == 0 and queue._running == 0
        queue.close()

    asyncio.run(go())


# ---- names, headers and methods -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("server.example:8000", 200),
        ("SERVER.example.", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_only_names_of_the_server_are_answered(url: str, host: str, status: int) -> None:
    for method, path in (("GET", "/v1/chunks"), ("GET", "/"), ("DELETE", "/v1/chunks/00"), ("GET", "/metrics")):
        answer = httpx.request(method, url + path, headers={"Host": host}, timeout=60)
        assert answer.status_code == (404 if method == "DELETE" and status == 200 else status)
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_a_probe_without_a_host_is_answered_and_an_empty_host_is_not(url: str) -> None:
    for head, status in ((b"HTTP/1.0", b"200"), (b"HTTP/1.0\r\nHost: ", b"403")):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
            client.sendall(b"GET /health " + head + b"\r\n\r\n")
            assert client.recv(64).split()[1] == status


def test_head_is_get_without_a_body(url: str) -> None:
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/"):
        got, head = httpx.get(url + path), httpx.head(url + path)
        assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]


def test_half_of_a_surrogate_pair_is_the_clients_mistake(url: str) -> None:
    for body in ('{"prompt": "\\ud800"}', '{"chunks": [{"text": "a\\udfff"}]}', '{"messages": [{"role": "\\ud800"}]}'):
        for path in ("/v1/completions", "/v1/chunks", "/v1/chat/completions", "/playground/explain"):
            answer = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (path, body, answer.text)


# ---- keys and figures ---------------------------------------------------------------------------------------


def test_a_key_that_is_removed_or_added_is_so_in_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend.serve.keys.LOOK_S", 0.0)
    file, figures = tmp_path / "keys.json", tmp_path / "metrics.json"
    old, reader = add_key(file, "old"), add_key(figures, "prometheus")
    settings = ServeSettings(keys=KeyRing(read_keys(file), file), metrics_keys=KeyRing(read_keys(figures), figures))
    with running(settings) as url:

        def status(key: str, path: str = "/v1/models") -> int:
            return httpx.get(url + path, headers={"Authorization": f"Bearer {key}"}).status_code

        assert status(old) == 200 and status(reader) == 401
        assert status(old, "/metrics") == 401 and status(reader, "/metrics") == 200
        new = add_key(file, "new")
        assert status(new) == 200
        remove_key(file, "old")
        assert status(old) == 401 and status(new) == 200
        file.write_text("{")
        assert status(new) == 200  # what cannot be read changes nothing
        file.unlink()
        assert status(new) == 401  # and no key lets nobody in


def test_figures_and_readiness_say_whether_the_store_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.store import MemoryStore

    with running(ServeSettings(ready_needs_store=True)) as needing:
        assert httpx.get(f"{needing}/ready").status_code == 200
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 1.0' in text
        assert "process_resident_memory_bytes" in text and "cacheblend_build_info{" in text

        def fails(_: object) -> None:
            raise OSError("it is gone")

        monkeypatch.setattr(MemoryStore, "stats", fails)
        answer = httpx.get(f"{needing}/ready")
        assert answer.status_code == 503 and "memory" in answer.text
        assert httpx.get(f"{url}/ready").status_code == 200  # it does not need one
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 0.0' in text
        [errors] = [
            line for line in text.splitlines() if line.startswith("cacheblend_store_errors_total{") and "answer" in line
        ]
        assert float(errors.split()[-1]) >= 1


def test_a_store_whose_folder_is_gone_is_down_until_it_is_back(tmp_path: Path) -> None:
    folder, aside = tmp_path / "store", tmp_path / "aside"
    with running(ServeSettings(ready_needs_store=True, drain_s=1), str(folder)) as url:

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


def test_log_lines_have_a_time_and_the_requests_id(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend.serve.log_lines import JsonLines
    from cacheblend.serve.metrics import Metrics

    def fails(_: object) -> bytes:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Metrics, "text", fails)
    with caplog.at_level("INFO", "cacheblend.serve"):
        answers = [httpx.get(f"{url}/metrics"), httpx.get(f"{url}/v1/models")]
        time.sleep(0.1)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [503, 200] and len(set(ids)) == 2
    [error] = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == ids[0] and "on purpose" in error["error"] and error["time"].endswith("+00:00")
    [asked] = [line for line in lines if line.get("path") == "/v1/models"]
    assert asked["request_id"] == ids[1] and asked["status"] == 200


def test_a_full_queue_is_told_before_a_text_is_tokenised() -> None:
    with running(ServeSettings(limits=Limits(active=1, waiting=0))) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "lamp"})
        assert answer.status_code == 429 and answer.headers["retry-after"]


def test_a_stream_that_a_drain_cuts_ends_with_an_error() -> None:
    events: list[str] = []
    with running(ServeSettings(drain_s=0)) as url:
        began = threading.Event()

        def read() -> None:
            body = {"prompt": "lamp", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    began.set()
                    events.append(line)

        reader = threading.Thread(target=read)
        reader.start()
        began.wait(30)
    reader.join(30)
    told = [line for line in events if line]
    assert told[-1] == "data: [DONE]" and json.loads(told[-2][6:])["error"]["code"] == "shutting_down"


def test_a_post_that_a_drain_cuts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = BlendEngine.warm

    def slowly(engine: BlendEngine, *given: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return warm(engine, *given, **options)

    monkeypatch.setattr(BlendEngine, "warm", slowly)
    chunks, found = [{"text": words(600)} for _ in range(60)], list[httpx.Response]()
    with running(ServeSettings(drain_s=0.5)) as url:
        client = threading.Thread(
            target=lambda: found.append(httpx.post(f"{url}/v1/chunks", json={"chunks": chunks}, timeout=300))
        )
        client.start()
        while not httpx.get(f"{url}/v1/chunks", timeout=300).json()["data"]:
            time.sleep(0.05)
    client.join(60)
    assert [answer.status_code for answer in found] == [503]
    assert found[0].json()["error"]["code"] == "shutting_down"


def test_a_wrong_method_is_told_the_right_ones_and_a_wrong_query_its_name(url: str) -> None:
    answer = httpx.options(f"{url}/v1/chunks")
    assert answer.status_code == 405 and answer.headers["allow"]
    assert httpx.get(f"{url}/v1/chunks?limit=0").json()["error"]["param"] == "limit"
