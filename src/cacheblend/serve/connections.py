"""Runs a server: ends connections that only hold a place (half-sent headers, bodies that nobody waits for, answers that
nobody reads), and stops in order.

    open ── headers ──┬── a request runs ──┬── idle ...
    at most headers_s ┘  reading: unread_s └ at most headers_s

uvicorn closes a connection on which nothing more comes behind an answer, and no other. What a body may take is bounded
by `BodyLimit`; here, whichever parser uvicorn has, what is parsed: heads of a few kilobytes, chunks that are not tiny,
and nothing of a body whose request was answered without it.

Each takes a file descriptor, which the store needs, too. So there is a bound: one more than that ends the connection
that has waited longest without a request, or is refused where all have one. At the end requests may finish for a while;
streams that do not end with an error event, and posts that store with 503.
"""

import asyncio
import logging
import math
import resource
import signal
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from cacheblend.serve.errors import ApiError
from cacheblend.serve.state import ServerState

logger = logging.getLogger("cacheblend.serve")
MORE_S = 5  # seconds in which the last events are sent, once the time for requests is over
TICKS = 5  # of uvicorn's, ten a second, between two looks at the connections
BACKLOG = 256  # connections that are taken in a row, before others have their turn
SLICE, PIPELINED = 1 << 14, 1 << 19
"""Bytes that are parsed before they are counted, and those of a request's head, at most; in front of an answer."""
LINES, LINE_BYTES = 1024, 8  # line ends of a chunked body, which has two for each chunk, and bytes for each one more
LINGER_S, LINGER_BYTES = 1.0, 1 << 25  # in which a refused client may go on sending, so that it reads why


class WatchedConnection(asyncio.Protocol):
    """Mixed into uvicorn's protocols: knows since when a connection waits for its client. `open` and `waiting` are the
    server's: connections that are not refused, and those of them without a request, who waits longest first."""

    app: Any
    transport: asyncio.Transport
    cycle: Any  # uvicorn's, of the request that has come last; None: there was none
    connections: set[Any]
    most: int  # connections at a time
    on_refused: Callable[[], None]
    open: set[Any]
    waiting: dict[Any, None]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.running, self.since = 0, time.monotonic()  # requests; when it was opened, or its last one ended
        self.unread_since: float | None = None  # since when the client does not read; None: it does
        self._inner, self.app = self.app, self._serve
        self._answered: Any = None  # the cycle that runs, or ran last: behind it others may have come
        self._began = self._refused = False
        self._phase: Any = None  # the request that has come last, and whether its body comes, or the next one's head
        self._read = self._lines = self._dropped = 0  # bytes and line ends of it; bytes that are not parsed

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_cut = False

        async def sending(message: Message) -> None:
            """An answer to a request whose body has not come ends the connection: all of it would have to be parsed."""
            nonlocal is_cut
            if message["type"] == "http.response.start" and self.cycle.scope is scope and self.cycle.more_body:
                is_cut = True
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            elif is_cut and not message.get("more_body"):
                await send({**message, "more_body": True})
                self._drop()
                while not self.transport.is_closing() and time.monotonic() < self.since + self._linger_s:
                    await asyncio.sleep(LINGER_S / 20)
                message = {"type": "http.response.body"}
            await send(message)

        self.running += 1
        self._answered = getattr(send, "__self__", None)
        try:
            await self._inner(scope, receive, sending)
        finally:
            self.running -= 1
            self.since, self._began = time.monotonic(), False
            if self._is_waiting:
                self.waiting[self] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.open.add(self)
        self.waiting[self] = None
        if len(self.open) > self.most:
            self.on_refused()
            message = f"{self.most:,} connections are open (--connections); try again"
            next(iter(self.waiting)).refuse(ApiError(503, message, code="too_many_connections", retry_after_s=5))

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop()
        self._tell_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._began = True
        for at in range(0, len(data), SLICE):
            part = data[at : at + SLICE]
            if self._refused or self.transport.is_closing():
                self._dropped += len(data) - at
                if self._dropped > LINGER_BYTES:
                    self.transport.close()
                return
            is_body = self.cycle is not None and self.cycle.more_body
            if self._phase != (self.cycle, is_body):
                self._phase, self._read, self._lines = (self.cycle, is_body), 0, 0
            if is_body and any(name == b"transfer-encoding" for name, _ in self.cycle.scope["headers"]):
                self._lines += part.count(b"\r\n")
            if self._lines > LINES + (self._read + len(part)) // LINE_BYTES:
                message = "the body comes in tiny chunks; send it with a content-length, or in larger ones"
                self.refuse(ApiError(400, message, code="tiny_chunks"))
            elif not is_body and self._read >= (SLICE if self._is_waiting else PIPELINED):
                self.refuse(ApiError(431, f"headers may have at most {SLICE:,} bytes", code="too_long"))
            else:
                self._read += len(part)
                super().data_received(part)
        if not self._is_waiting:
            self.waiting.pop(self, None)

    @property
    def _is_waiting(self) -> bool:  # it has no request, not even one whose answer begins in a moment
        is_answered = self.cycle is None or self.cycle.response_complete
        return not self._refused and not self.running and is_answered

    @property
    def _linger_s(self) -> float:  # a flood of refused connections takes no files either
        return LINGER_S if len(self.connections) <= self.most + self.most // 4 + 8 else 0

    def _drop(self) -> None:
        """From now on nothing more is parsed of what comes."""
        self._refused, self.since = True, time.monotonic()
        self.open.discard(self)
        self.waiting.pop(self, None)

    def _tell_gone(self) -> list[Any]:
        """Tells the request that runs, and the last one, that their client is gone; those that are not answered."""
        cycles = [each for each in (self._answered, self.cycle) if each is not None and not each.response_complete]
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        return cycles

    def refuse(self, error: ApiError) -> None:
        """Ends the connection; with the error, unless it is amid an answer."""
        if not any(cycle.response_started for cycle in self._tell_gone()):
            response, phrase = error.response(), HTTPStatus(error.status).phrase
            lines = (f"HTTP/1.1 {error.status} {phrase}".encode(), *map(b": ".join, response.raw_headers))
            self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)]))
        asyncio.get_running_loop().call_later(self._linger_s, self.transport.close)
        self._drop()

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
            if not self._began or self.transport.is_closing():
                self.transport.close()
                return
            message = f"a request's headers must be sent within {headers_s:g} s (--header-timeout)"
            self.refuse(ApiError(408, message, code="timeout"))


class DrainingServer(uvicorn.Server):
    """A server that ends its requests before it cuts their connections; `state` is that of the app that it serves."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        config.timeout_graceful_shutdown = round(state.settings.drain_s) + MORE_S
        config.backlog = BACKLOG
        config.timeout_keep_alive = math.ceil(state.settings.headers_s)  # as long as for a connection's first request
        super().__init__(config)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The connections of uvicorn's protocol are watched; they take at most half of the process's files."""
        protocol, most = self.config.http_protocol_class, self._state.settings.connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        fitting = most if files == resource.RLIM_INFINITY else min(most, max(1, files // 2))
        named = f"WatchedConnection{protocol.__name__}"
        own = {"most": fitting, "open": set(), "waiting": {}}
        own |= {"on_refused": staticmethod(self._state.metrics.refused_connection)}
        self.config.http_protocol_class = type(named, (WatchedConnection, protocol), own)
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
