"""What stands in front of all routes."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.serve.errors import ApiError, log_internal
from cacheblend.serve.metrics import Metrics

requests_log = logging.getLogger("cacheblend.serve.requests")


class RequestLog:
    """One line of JSON a request, one more in the counters; tells a client of errors that nobody else caught.

    Args:
        app: behind it.
        metrics: of the server.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            told = log_internal(error)
            if not status:
                await told.response()(scope, receive, noting)
        finally:
            self._metrics.request(status or 499)
            if scope["path"].startswith("/v1/"):
                requests_log.info(json.dumps(_line(scope, status, time.perf_counter() - started)))


def _line(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    state = scope.get("state", {})
    line = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "key": state.get("key"),
    }
    report = getattr(state.get("answering"), "report", None)
    if report is not None:
        line |= {
            "prompt_tokens": report.prompt_tokens,
            "hit_tokens": report.hit_tokens,
            "recomputed_tokens": report.recomputed_tokens,
            "generated_tokens": report.generated_tokens,
            "ttft_s": round(report.ttft_s, 4),
        }
    return line


class BodyLimit:
    """Refuses bodies that are too long, without keeping them, those that take too long to come, and strangers'.

    Args:
        app: behind it.
        max_bytes: of a body.
        seconds: from its first to its last byte.
        check: raises `ApiError` for the value of a header ``authorization`` (None: there is none) that opens nothing;
            asked before a body is read.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, check: Callable[[str | None], Any]) -> None:
        self._app, self._max_bytes, self._seconds, self._check = app, max_bytes, seconds, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        told = headers.get("content-length", "0")
        try:
            if not told.isdecimal() or int(told) > self._max_bytes:
                raise self._refusal()
            if told != "0" or "transfer-encoding" in headers:
                self._check(headers.get("authorization"))
            whole = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            refusal = ApiError(408, f"a request is sent within {self._seconds:g} s", code="timeout")
        except ApiError as error:
            refusal = error
        else:
            if whole is not None:
                await self._app(scope, _replaying(whole, receive), send)
            return
        await refusal.response()(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, held until all of it is here: pieces have no length that is told ahead; None: the client has gone.

        Raises:
            ApiError: it is too long.
        """
        parts: list[bytes] = []
        read = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            if read > self._max_bytes:
                raise self._refusal()
            if not message.get("more_body"):
                return b"".join(parts)

    def _refusal(self) -> ApiError:
        return ApiError(413, f"a request may have {self._max_bytes} bytes", code="too_long")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Gives the body first, then what else comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Message:
        return left.pop() if left else await receive()

    return given
