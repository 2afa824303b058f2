"""Connections that only hold a place: half-sent headers, bodies that nobody waits for, answers that nobody reads.

    open ── headers ──┬── a request runs ──┬── idle ...
    at most headers_s ┘  reading: unread_s └ at most headers_s

uvicorn closes a connection on which nothing more comes behind an answer, and no other. What a body may take is bounded
by `BodyLimit`.
"""

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from cacheblend.serve.errors import ApiError


class Watched(asyncio.Protocol):
    """Mixed into uvicorn's protocols: knows since when a connection waits for its client.

    Attributes:
        running: requests of the connection that are being answered.
        since: when it was opened, or its last request ended (`time.monotonic`).
        unread_since: since when the client does not read what was sent; None: it does.
    """

    app: Any
    transport: asyncio.Transport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.running, self.since = 0, time.monotonic()
        self.unread_since: float | None = None
        self._inner, self.app = self.app, self._serve
        self._began = False

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await self._inner(scope, receive, send)
        finally:
            self.running -= 1
            self.since, self._began = time.monotonic(), False

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._began = True
        super().data_received(data)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.unread_since = None
        super().resume_writing()

    def end_if_overdue(self, headers_s: float, unread_s: float) -> None:
        """Closes the connection if its client keeps it waiting; with 408 if a request has begun.

        Args:
            headers_s: seconds without a request, at most.
            unread_s: seconds in which the client reads nothing, at most.
        """
        now = time.monotonic()
        if self.unread_since is not None:
            if now > self.unread_since + unread_s:
                self.transport.abort()  # closing would wait for the client to read
        elif not self.running and now > self.since + headers_s:
            if self._began and not self.transport.is_closing():
                self.transport.write(_refusal(headers_s))
            self.transport.close()


def _refusal(seconds: float) -> bytes:
    error = ApiError(408, f"a request's headers must be sent within {seconds:g} s (--header-timeout)", code="timeout")
    body = json.dumps(error.body()).encode()
    lines = ("HTTP/1.1 408 Request Timeout", "Content-Type: application/json", "Connection: close")
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def watched(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """One of uvicorn's protocols whose connections `end_overdue` looks at."""
    return type(f"Watched{protocol.__name__}", (Watched, protocol), {})


def end_overdue(connections: Iterable[object], headers_s: float, unread_s: float) -> None:
    """Closes connections that keep the server waiting; see `Watched.end_if_overdue`."""
    for each in list(connections):
        if isinstance(each, Watched):
            each.end_if_overdue(headers_s, unread_s)
