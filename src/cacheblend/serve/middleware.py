"""ASGI middleware in front of all routes: the request log, and limits on request bodies."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.serve.bodies import LARGE, VALUES, BodyBudget, BodyShare, check_shape
from cacheblend.serve.errors import ApiError, log_internal
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.log_lines import new_request_id, request_id
from cacheblend.serve.metrics import Metrics

BODIES = 8
"""Bodies of the longest kind that are in memory at a time; half of them, where there is one tenant."""
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
        asked = new_request_id()
        request_id.set(asked)  # each request is a task of its own

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = asked
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        except Exception as error:
            converted = log_internal(error)
            if not status:
                await converted.response()(scope, receive, noting_status)
        finally:
            self._metrics.request(status or 499)
            if scope["path"].startswith(("/v1/", "/tokenize", "/detokenize")):
                line = _line(scope, status, time.perf_counter() - started)
                requests_log.info(json.dumps(line), extra={"fields": line, "request_id": asked})


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
        check: called with the header ``authorization`` (None: missing) before a body is read; whose it is. Raises
            `ApiError` if it has no valid key.
        limit_of: bytes of a body to this path; at most `max_bytes`. What is longer is read and not kept, so that
            the client reads the refusal.
        values: see `check_shape`.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        seconds: float,
        check: Callable[[str | None], ApiKey],
        limit_of: Callable[[str], int],
        values: int = VALUES,
    ) -> None:
        self._app, self._max_bytes, self._seconds, self._check = app, max_bytes, seconds, check
        self._limit_of, self._values = limit_of, values
        self._budget = BodyBudget(BODIES * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        try:
            if not announced.isdecimal() or int(announced) > self._max_bytes:
                raise _refusal(self._max_bytes)
            has_body = announced != "0" or "transfer-encoding" in headers
            tenant = self._check(headers.get("authorization")).name if has_body else ""
            limit = min(self._max_bytes, self._limit_of(scope["path"]))
            with self._budget.open(tenant) as share:
                await self._serve(limit, share, scope, receive, send)
        except TimeoutError:
            refusal = ApiError(
                408, f"a request must be sent within {self._seconds:g} s (--body-timeout)", code="timeout"
            )
        except ApiError as error:
            refusal = error
        else:
            return
        await refusal.response()(scope, receive, send)

    async def _serve(self, limit: int, share: BodyShare, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on whose body is read and looked at; errors are raised before any of it is passed on."""
        whole = await asyncio.wait_for(self._read(receive, limit, share), self._seconds)
        if whole is None:
            return
        if len(whole) > LARGE:
            await run_in_threadpool(check_shape, whole, self._values)
        given = _replaying(whole, receive)
        del whole  # the app's own parts keep it, as long as they need it
        await self._app(scope, given, send)

    async def _read(self, receive: Receive, limit: int, share: BodyShare) -> bytes | None:
        """The whole body, since a chunked one announces no length; None: the client has disconnected.

        Raises:
            ApiError: the body is too long, or the server is reading too many.
        """
        parts: list[bytes] = []
        read = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            read += len(part)
            if read > self._max_bytes:
                raise _refusal(self._max_bytes)
            if read > limit:
                parts.clear()
            else:
                share.take(len(part))
                parts.append(part)
            if not message.get("more_body"):
                if read > limit:
                    raise _refusal(limit, ", which is more than any text that fits the model's context")
                return b"".join(parts)


def _refusal(limit: int, why: str = "") -> ApiError:
    return ApiError(413, f"a request may have at most {limit:,} bytes{why}", code="too_long")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then further messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Message:
        return left.pop() if left else await receive()

    return given
