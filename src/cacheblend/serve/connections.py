"""Runs a server: ends connections that only hold a place (half-sent headers, bodies that nobody waits for, answers that
nobody reads), and stops in order.

    open ── headers ──┬── a request runs ──┬── idle ...
    at most headers_s ┘  reading: unread_s └ at most headers_s

uvicorn closes a connection on which nothing more comes behind an answer, and no other. What a body may take is bounded
by `BodyLimit`.

Each takes a file descriptor, which the store needs, too. So there is a bound: one more than that ends the connection
that has waited longest without a request, or is refused where all have one. At the end requests may finish for a while;
streams that do not end with an error event, and posts that store with 503.
"""

import asyncio
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from cacheblend.serve.errors import ApiError
from cacheblend.serve.state import ServerState

logger = logging.getLogger("cacheblend.serve")
MORE_S = 5  # seconds in which the last events are sent, once the time for requests is over
TICKS = 5  # of uvicorn's, ten a second, between two looks at the connections


class WatchedConnection(asyncio.Protocol):
    """Mixed into uvicorn's protocols: knows since when a connection waits for its client."""

    app: Any
    transport: asyncio.Transport
    connections: set[Any]
    most: int  # connections at a time
    on_refused: Callable[[], None]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.running, self.since = 0, time.monotonic()  # requests; when it was opened, or its last one ended
        self.unread_since: float | None = None  # since when the client does not read; None: it does
        self._inner, self.app = self.app, self._serve
        self._began = self._refused = False

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await self._inner(scope, receive, send)
        finally:
            self.running -= 1
            self.since, self._began = time.monotonic(), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        watched = [each for each in self.connections if isinstance(each, WatchedConnection)]
        open_ones = [each for each in watched if not each._refused and not each.transport.is_closing()]
        if len(open_ones) > self.most:
            waiting = [each for each in open_ones if each.is_waiting and each is not self]
            min(waiting, key=lambda each: each.since, default=self).refuse()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._began = True
            super().data_received(data)

    @property
    def is_waiting(self) -> bool:
        """It has no request, not even one whose answer begins in a moment (uvicorn's ``cycle``)."""
        cycle = getattr(self, "cycle", None)
        return not self.running and (cycle is None or cycle.response_complete)

    def refuse(self) -> None:
        """Ends the connection with 503, since there are too many."""
        self._refused = True
        self.on_refused()
        message = f"{self.most:,} connections are open (--connections); try again"
        error = ApiError(503, message, code="too_many_connections")
        self.transport.write(_answer("503 Service Unavailable", error, "Retry-After: 5"))
        stays = len(self.connections) <= self.most + self.most // 4 + 8  # a flood of refused ones takes no files either
        # For a second: so that its client reads why, and is not cut while it sends.
        asyncio.get_running_loop().call_later(1.0 if stays else 0, self.transport.close)

    def pause_writing(self) -> None:
        self.unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        super().resume_writing()

    def end_if_overdue(self, headers_s: float, unread_s: float) -> None:
        """Closes the connection if it has no request, or its client reads nothing, so long; with 408 if one began."""
        now = time.monotonic()
        if self.unread_since is not None:
            if now > self.unread_since + unread_s:
                self.transport.abort()  # closing would wait for the client to read
        elif not self._refused and not self.running and now > self.since + headers_s:
            if self._began and not self.transport.is_closing():
                message = f"a request's headers must be sent within {headers_s:g} s (--header-timeout)"
                self.transport.write(_answer("408 Request Timeout", ApiError(408, message, code="timeout")))
            self.transport.close()


def _answer(status: str, error: ApiError, *headers: str) -> bytes:
    body = json.dumps(error.body()).encode()
    lines = (f"HTTP/1.1 {status}", "Content-Type: application/json", "Connection: close", *headers)
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class DrainingServer(uvicorn.Server):
    """A server that ends its requests before it cuts their connections; `state` is that of the app that it serves."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        config.timeout_graceful_shutdown = round(state.settings.drain_s) + MORE_S
        super().__init__(config)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The connections of uvicorn's protocol are watched; they take at most half of the process's files."""
        protocol, most = self.config.http_protocol_class, self._state.settings.connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        fitting = most if files == resource.RLIM_INFINITY else min(most, max(1, files // 2))
        named = f"WatchedConnection{protocol.__name__}"
        watched = {"most": fitting, "on_refused": staticmethod(self._state.metrics.refused_connection)}
        self.config.http_protocol_class = type(named, (WatchedConnection, protocol), watched)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            for each in list(self.server_state.connections):
                if isinstance(each, WatchedConnection):
                    each.end_if_overdue(self._state.settings.headers_s, self._state.settings.body_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and ends those that run after ``drain_s``."""
        state, drain_s = self._state, self._state.settings.drain_s
        told = ", ".join(signal.Signals(number).name for number in self._captured_signals) or "asked to stop"
        logger.warning("%s: no more requests are taken; those that run have %g s (--drain)", told, drain_s)
        drained = asyncio.create_task(asyncio.to_thread(state.scheduler.close, drain_s))
        loop = asyncio.get_running_loop()
        endings = [loop.call_later(drain_s, queue.end) for queue in state.queues]
        await super().shutdown(sockets)
        for ending in endings:
            ending.cancel()
        await drained
        self._captured_signals.clear()  # uvicorn would raise them again, and they would end the process
