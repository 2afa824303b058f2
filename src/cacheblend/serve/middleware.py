"""ASGI middleware in front of all routes: the request log, and limits on request bodies."""

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
    """Logs one line of JSON per request and counts it; turns uncaught errors into responses.

    Args:
        app: the next ASGI app.
        metrics: of the server.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        except Exception as error:
            converted = log_internal(error)
            if not status:
                await converted.response()(scope, receive, noting_status)
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
    report = getattr(state.get("running"), "report", None)
    if report is not None:
        line |= {
            "prompt_tokens": report.prompt_tokens,
            "hit_tokens": report.hit_tokens,
            "recomputed_tokens": report.recomputed_tokens,
            "recompute_ratio": report.recompute_ratio,
            "generated_tokens": report.generated_tokens,
            "ttft_s": round(report.ttft_s, 4),
        }
    return line


class BodyLimit:
    """Refuses bodies that are too long, without keeping them, or too slow, or sent without a valid key.

    Args:
        app: the next ASGI app.
        max_bytes: bytes of a body.
        seconds: time from a body's first to its last byte.
        check: called with the header ``authorization`` (None: missing) before a body is read; raises `ApiError` if it
            has no valid key.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, check: Callable[[str | None], Any]) -> None:
        self._app, self._max_bytes, self._seconds, self._check = app, max_bytes, seconds, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        try:
            if not announced.isdecimal() or int(announced) > self._max_bytes:
                raise self._refusal()
            if announced != "0" or "transfer-encoding" in headers:
                self._check(headers.get("authorization"))
            whole = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            refusal = ApiError(408, f"a request must be sent within {self._seconds:g} s", code="timeout")
        except ApiError as error:
            refusal = error
        else:
            if whole is not None:
                await self._app(scope, _replaying(whole, receive), send)
            return
        await refusal.response()(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, since a chunked one announces no length; None: the client has disconnected.

        Raises:
            ApiError: the body is too long.
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
        return ApiError(413, f"a request may have at most {self._max_bytes} bytes", code="too_long")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then further messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Message:
        return left.pop() if left else await receive()

    return given
