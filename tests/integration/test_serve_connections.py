"""Connections that only hold a place: nothing is sent, or half of it, byte by byte, or the answer is not read.

The others: requests that take long, connections that are used again, requests sent without waiting for the answers.
"""

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from cacheblend.serve.settings import ServeSettings
from serving import connected, running, shallow

WITHIN_S = 0.4
HANG_S = 300.0
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = {"prompt": "The boot was sold to Luden.", "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(headers_s=WITHIN_S, body_s=WITHIN_S, drain_s=1), model=shallow()) as address:
        yield address


def opened(url: str) -> socket.socket:
    return connected(url, HANG_S)


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
def test_a_connection_is_closed_on_which_nothing_more_comes(url: str, sent: bytes, answers: list[int]) -> None:
    with opened(url) as client:
        client.sendall(sent)
        read = until_closed(client)
        found = [int(part[:3]) for part in read.split(b"HTTP/1.1 ")[1:]]
        assert found == answers, read


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX: ", post(b'{"prompt": "', 10**6), post(b"x", 10**9)])
def test_byte_by_byte_is_not_more_time(url: str, start: bytes) -> None:
    with opened(url) as client, contextlib.suppress(ConnectionError):
        client.sendall(start)
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            client.sendall(b"x")
            time.sleep(0.02)
        pytest.fail("the server still reads")


def test_answers_that_are_not_read_are_not_kept(url: str) -> None:
    """Much more than the sockets hold, so that the server waits for its client."""
    with opened(url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        with contextlib.suppress(ConnectionError):
            while True:  # a connection that is cut is told at the second try
                time.sleep(WITHIN_S / 4)
                client.send(b"x")
        assert until_closed(client).count(b"HTTP/1.1 200") < 1000


def test_a_request_that_takes_long_is_not_cut_and_the_next_on_a_connection_has_its_time_too(url: str) -> None:
    with opened(url) as client:
        client.sendall(GET)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /hea")
        assert until_closed(client).partition(b"HTTP/1.1 ")[2].startswith(b"408")
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=HANG_S) as stream:
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    with httpx.Client(base_url=url, timeout=HANG_S) as http:
        for _ in range(3):
            assert http.post("/v1/completions", json=LONG).status_code == 200


def test_many_that_wait_leave_no_connection_behind(url: str) -> None:
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(opened(url)) for _ in range(200)]
        for number, client in enumerate(clients):
            client.sendall((GET + post(b"{}", 50))[:number])
        assert httpx.get(f"{url}/health", timeout=HANG_S).status_code == 200
        for client in clients:
            until_closed(client)


def test_one_more_connection_ends_the_one_that_has_waited_longest() -> None:
    with running(ServeSettings(connections=3, drain_s=1), model=shallow()) as url, contextlib.ExitStack() as closing:
        first, *others = [closing.enter_context(opened(url)) for _ in range(3)]
        httpx.get(f"{url}/health", timeout=HANG_S).raise_for_status()  # the fourth
        assert until_closed(first).startswith(b"HTTP/1.1 503")
        for client in others:
            client.sendall(GET)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_where_all_connections_have_requests_the_next_is_told_why() -> None:
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


def test_there_are_no_websockets(url: str) -> None:
    lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13")
    with opened(url) as client:
        client.sendall("\r\n".join(["GET /v1/models HTTP/1.1", "Host: evil.example", *lines, "", ""]).encode())
        assert b"101 Switching" not in until_closed(client)
