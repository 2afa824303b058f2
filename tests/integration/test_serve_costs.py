"""What clients that mean ill make the server do, counted: calls, bytes that are parsed, slices, entries that are read.
It grows with what is sent and stored at most linearly; nothing here depends on a clock."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import chunk
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.prefiller import HfPrefill
from cacheblend.nano import model_path
from cacheblend.serve import connections
from cacheblend.serve.connections import SLICE, WatchedConnection
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import SLICE_TOKENS
from cacheblend.serve.keys import ANYONE
from cacheblend.serve.prompts import PARTS, chat_prompt, texts_of_chat
from cacheblend.serve.routes import chunks, openai, playground
from cacheblend.serve.routes.openai import LazyList
from cacheblend.serve.schemas import ChatRequest
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import ServerState
from serving import connected, keys_of, running, shallow


def calls_in(work: Callable[[], Any]) -> int:
    """Calls of functions, C's included, that work makes in this thread."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


# ---- connections ----------------------------------------------------------------------------------------------


class Transport:
    """Notes what is written, and whether it was closed."""

    def __init__(self) -> None:
        self.written, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Cycle:
    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.scope: dict[str, Any] = {"headers": headers}
        self.more_body, self.response_started, self.response_complete, self.disconnected = True, False, False, False
        self.message_event = asyncio.Event()


class Parser(asyncio.Protocol):
    """In place of uvicorn's protocol: counts what it is given."""

    def __init__(self) -> None:
        self.app, self.parsed, self.cycle = None, 0, None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connections.add(self)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parsed += len(data)


@pytest.fixture
def connect() -> Iterator[Callable[[], Any]]:
    """Opens connections of one server, of which 100 may be open."""
    own = {"most": 100, "open": set(), "waiting": {}, "connections": set(), "on_refused": staticmethod(lambda: None)}
    kind = type("Watched", (WatchedConnection, Parser), own)

    def connect() -> Any:
        made = kind()
        made.connection_made(Transport())
        return made

    async def inside() -> None: ...

    loop = asyncio.new_event_loop()
    asyncio.events._set_running_loop(loop)
    yield connect
    asyncio.events._set_running_loop(None)
    loop.close()


def test_a_connection_costs_the_same_however_many_are_open(connect: Callable[[], Any]) -> None:
    [connect() for _ in range(50)]
    costs = [calls_in(connect) for _ in range(300)]  # from the fiftieth on each ends the one that waited longest
    assert max(costs[100:]) <= max(costs[50:100])
    assert costs[299] < 200  # calls
    first, *_ = [connect() for _ in range(101)]
    assert b"503" in first.transport.written and first._refused


@pytest.mark.parametrize(
    ("piece", "is_taken"),
    [(b"1\r\nx\r\n", False), (b"8\r\nxxxxxxxx\r\n", False), (b"40\r\n" + b"x" * 64 + b"\r\n", True)],
)
def test_a_body_of_tiny_chunks_is_not_parsed_to_its_end(
    connect: Callable[[], Any], piece: bytes, is_taken: bool
) -> None:
    connection = connect()
    connection.cycle = Cycle((b"transfer-encoding", b"chunked"))
    body = piece * (1_000_000 // len(piece))
    for at in range(0, len(body), 1 << 18):
        connection.data_received(body[at : at + (1 << 18)])
    assert (connection.parsed == len(body)) == is_taken
    if not is_taken:
        assert connection.parsed <= 4 * SLICE and b"larger ones" in connection.transport.written
        assert connection.cycle.disconnected  # nobody goes on waiting for the rest


@pytest.mark.parametrize("size", [10, 16, 24])
def test_chunks_are_tiny_or_not_however_the_network_cuts_them(connect: Callable[[], Any], size: int) -> None:
    body = (b"%x\r\n" % size + b"x" * size + b"\r\n") * (60_000 // size)
    for piece in (1400, len(body)):
        connection = connect()
        connection.cycle = Cycle((b"transfer-encoding", b"chunked"))
        for at in range(0, len(body), piece):
            connection.data_received(body[at : at + piece])
        assert connection.parsed == len(body) and not connection.transport.written


def test_a_body_with_its_length_may_have_line_ends(connect: Callable[[], Any]) -> None:
    connection = connect()
    connection.cycle = Cycle((b"content-length", b"300000"))
    connection.data_received(b"1,\r\n" * 75_000)
    assert connection.parsed == 300_000 and not connection.transport.written


def test_no_more_of_endless_headers_is_parsed_than_a_head_may_have(connect: Callable[[], Any]) -> None:
    connection = connect()
    for _ in range(10):
        connection.data_received(b"a:b\r\n" * 14_000)
    assert connection.parsed <= 2 * SLICE and connection.transport.written.startswith(b"HTTP/1.1 431 ")


def test_what_is_refused_behind_a_request_that_is_answered_ends_it_without_an_error_amid_it(
    connect: Callable[[], Any],
) -> None:
    connection, queued = connect(), Cycle()

    class Answered(Cycle):
        async def send(self, message: Any) -> None: ...

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answered.response_started, connection.cycle = True, queued
        connection.refuse(ApiError(431, "too long"))

    connection._inner, answered = app, Answered()
    with suppress(StopIteration):
        connection._serve(answered.scope, None, answered.send).send(None)
    assert answered.disconnected and queued.disconnected and not connection.transport.written


def test_a_refused_body_is_neither_taken_in_nor_waited_for(tmp_path: Any) -> None:
    ring, _ = keys_of(tmp_path, "one")
    sent, block = 0, b"x" * (1 << 20)
    with running(ServeSettings(keys=ring), model=shallow()) as url, connected(url, 30) as stranger:
        stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n\r\n")
        with pytest.raises(OSError):
            while sent < 1 << 30:
                stranger.sendall(block)
                sent += len(block)
        assert sent <= connections.LINGER_BYTES + (16 << 20)  # the system's buffers
        with connected(url, 30) as stranger:
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n\r\n{")
            answer = b"".join(iter(lambda: stranger.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_api_key"


# ---- bodies: what they cost by their size ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(model_path(), store="memory") as opened:
        yield opened


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(number: int) -> dict[str, Any]:
    return {"id": str(number), "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "empty parts": lambda n: {"messages": [user([{"type": "text", "text": ""}] * n)]},
    "short parts": lambda n: {"messages": [user([{"type": "text", "text": "a lamp"}] * n)]},
    "special tokens": lambda n: {"messages": [user([{"type": "text", "text": "<|end|>"}] * n)]},
    "text": lambda n: {"messages": [user("a lamp <|end|>" * n)]},
    "messages": lambda n: {"messages": [user("a lamp"), {"role": "assistant", "content": "?"}] * (n // 2)},
    "fields": lambda n: {"messages": [user("a") | {f"x{number}": "<|end|>" for number in range(n)}]},
    "documents": lambda n: {"messages": [user("?")], "documents": [{"text": f"lamp {each}"} for each in range(n)]},
    "calls": lambda n: {"messages": [{"role": "assistant", "content": "", "tool_calls": list(map(call, range(n)))}]},
    "options": lambda n: {"messages": [user("?")], "chat_template_kwargs": {"tools": [{"a": "<|end|>"}] * n}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_body_costs_is_linear_in_its_size(engine: BlendEngine, kind: str) -> None:
    """Calls of functions, from JSON to a prompt: of four times as many fields at most four times as many."""

    def cost(count: int) -> int:
        body = json.dumps(KINDS[kind](count))

        def work() -> None:
            asked = ChatRequest.model_validate(json.loads(body))
            list(texts_of_chat(asked.messages, asked.documents))
            # Too long for the model, which is known when all is tokenised; or nothing that its template reads.
            with suppress(InvalidInputError, ApiError):
                chat_prompt(engine, asked, 64)

        return calls_in(work)

    cost(8)  # what is made once
    small, large = cost(250), cost(1000)
    assert large <= 4.4 * small  # an exponent of 1.07


def test_too_many_parts_are_refused_by_their_number(engine: BlendEngine) -> None:
    part = {"type": "text", "text": ""}
    asked = ChatRequest.model_validate({"messages": [user([part] * 4000)] * 12})
    found = list[ApiError]()

    def work() -> None:
        with pytest.raises(ApiError) as refused:
            chat_prompt(engine, asked, 64)
        found.append(refused.value)

    assert calls_in(work) < 200
    assert f"48,000 content parts; at most {PARTS:,}" in str(found[0]) and found[0].param == "messages"


# ---- answers, pages, explanations -----------------------------------------------------------------------------


def test_no_more_of_an_answer_is_made_than_is_sent() -> None:
    made = list[int]()
    items = LazyList(made.append(number) or {"token": number} for number in range(1000))
    parts = json.JSONEncoder().iterencode({"content": items})
    first = "".join(islice(parts, 50))
    assert 5 < len(made) < 50
    assert json.loads(first + "".join(parts))["content"] == [{"token": number} for number in range(1000)]


def test_log_probabilities_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, plain, loops = set[int](), openai.ChatFormat._token, set[int]()

    def noting(self: Any, token: int, logprob: float) -> Any:
        threads.add(threading.get_ident())
        return plain(self, token, logprob)

    whole = openai.whole_response

    async def answered(*arguments: Any) -> Any:
        loops.add(threading.get_ident())
        return await whole(*arguments)

    monkeypatch.setattr(openai.ChatFormat, "_token", noting)
    monkeypatch.setattr(openai, "whole_response", answered)
    asked = {"messages": [user("a lamp")], "n": 2, "max_tokens": 50, "ignore_eos": True}
    with running(ServeSettings(), model=shallow()) as url:
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=asked | {"logprobs": True, "top_logprobs": 20}, timeout=60
        )
        assert [len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]] == [50, 50]
        completion = {"prompt": "a lamp", "max_tokens": 9, "ignore_eos": True, "logprobs": 3}
        found = httpx.post(f"{url}/v1/completions", json=completion, timeout=60).json()["choices"][0]["logprobs"]
    assert {len(each) for each in found.values()} == {9}
    assert threads and loops and not threads & loops


def test_a_page_of_chunks_costs_a_page(engine: BlendEngine) -> None:
    """Calls of a page do not grow with what is stored, or with salts under which nothing is."""
    state = ServerState(engine, ServeSettings())
    app = FastAPI()
    chunks.add_routes(app, state)
    [listed] = [route.endpoint for route in app.routes if (route.path, route.methods) == ("/v1/chunks", {"GET"})]
    costs = list[int]()
    for count in (20, 400):
        engine.warm([chunk([300 + count // 300 + number % 7, 300 + number]) for number in range(count)])
        for number in range(count):
            state.tenants.remember_salt(ANYONE, f"{count} {number}")
        listed(ANYONE, 1, "")  # after a change the names are ordered once
        costs.append(calls_in(lambda: listed(ANYONE, 1, "")))
    state.scheduler.close()
    state.tenants.close()
    assert costs[1] <= costs[0] + 10 * 380  # of a salt some look-ups
    assert len(listed(ANYONE, 1000, "")["data"]) > 400


def test_an_explanation_is_computed_in_slices_and_ends_with_its_client(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, closed = ServerState(engine, ServeSettings()), list[bool]()
    text = " ".join(["A lamp stands in the harbour, and the bell rings at noon."] * 45)
    asked = playground.Explain(documents=[{"text": text}, {"text": text[9:]}], question="Where is the lamp?")
    computed, advance, close = [0], HfPrefill.advance, HfPrefill.close

    def advancing(self: HfPrefill, layers: int = 1) -> bool:
        computed[-1] += layers * self.active_rows
        return advance(self, layers)

    monkeypatch.setattr(HfPrefill, "advance", advancing)
    monkeypatch.setattr(HfPrefill, "close", lambda self: (closed.append(True), close(self))[1])
    slices = playground._explain(state, asked, ANYONE)
    for _ in slices:
        computed.append(0)
    rows = 2 * engine.runtime.builder.count(text) + 100  # type: ignore[union-attr]
    assert len(computed) > 5 and max(computed) <= max(rows, SLICE_TOKENS * engine.runtime.survey.num_layers)
    closed.clear()
    slices = playground._explain(state, asked, ANYONE)
    computed[-1] = 0
    while not computed[-1]:
        next(slices)
    assert not closed
    slices.close()
    assert closed
    state.scheduler.close()
    state.tenants.close()
