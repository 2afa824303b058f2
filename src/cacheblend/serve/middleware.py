"""ASGI middleware in front of all routes, outermost first: the request log, the check of ``Host``, limits on bodies."""

import asyncio
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.serve.errors import ApiError, api_error
from cacheblend.serve.log_lines import request_id
from cacheblend.serve.metrics import Metrics
from cacheblend.serve.state import ServerState

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
"""Of every answer: no type but the given one, and no frame in another page."""
ASKED = ("/v1/", "/tokenize", "/detokenize", "/playground/explain")
"""Paths whose requests are counted and logged: no probe's, no scrape's, not those of the page's files."""
BODIES = 8  # bodies of the longest kind that are in memory at a time; half of them, where there is one tenant
LARGE = 1 << 16  # bytes from which on a body is looked at before it is parsed
VALUES, CONTAINERS = 1 << 18, 1 << 14
"""Values, and lists and objects, of a body: these are parsed and checked in a tenth of a second."""
FREE = 1 << 16  # bytes of every body that count against no bound: short requests are read whatever long ones there are
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Keeps no way back: texts may have 16 MB. One that nothing ends goes to the end: or each quote in it began one."""
requests_log = logging.getLogger("cacheblend.serve.requests")
LOGGED = (
    "prompt_tokens",
    "hit_tokens",
    "missed_tokens",
    "near_miss_tokens",
    "recomputed_tokens",
    "recompute_ratio",
    "generated_tokens",
)
"""What the log says of each answer's report."""


class RequestLog:
    """Logs one line of JSON per request and counts it; turns uncaught errors into responses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        asked = uuid.uuid4().hex  # nothing can be learnt from it
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
            converted = api_error(error)
            if not status:
                await converted.response()(scope, receive, noting_status)
        finally:
            path, state = scope["path"], scope.get("state", {})
            status = getattr(state.get("running"), "failed", None) or status
            if path.startswith(ASKED):
                paths = (route.path for route in scope["app"].routes)
                self._metrics.request(
                    scope["route"].path if "route" in scope else path if path in paths else "other", status or 499
                )
                seconds = round(time.perf_counter() - started, 4)
                line = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
                line["key"] = state.get("key")
                reports = filter(None, getattr(state.get("running"), "reports", {}).values())
                told = [{name: getattr(r, name) for name in LOGGED} | {"ttft_s": round(r.ttft_s, 4)} for r in reports]
                line |= told[0] if len(told) == 1 else {"prompts": told} if told else {}
                requests_log.info(json.dumps(line), extra={"fields": line, "request_id": asked})


class HostGuard:
    """Refuses requests to a foreign name, adds `HEADERS`, and answers HEAD as GET without the body. Where no keys are
    set, anyone who reaches the server may ask, and a foreign page reaches it through its visitor's browser, by a name
    of its own that it points at this machine (DNS rebinding). So ``Host`` must name the server: `hosts`, ``localhost``
    or an address; unchecked if None, or with ``*``. Browsers send it; load balancers' probes, by HTTP/1.0, do not."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else {"localhost", *(name.lower() for name in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        named = Headers(scope=scope).get("host")
        if self._hosts is not None and named is not None:
            is_ipv6 = named.startswith("[")
            host = (named[1:].partition("]")[0] if is_ipv6 else named.partition(":")[0].rstrip(".")).lower()
            try:
                ipaddress.ip_address(host)  # nobody can point those elsewhere
            except ValueError:
                if host not in self._hosts:
                    message = f"this server is not called {host[:80]!r}; start it with --allowed-host NAME if it is"
                    await ApiError(403, message, code="host_not_allowed").response()(scope, receive, sending)
                    return
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, sending)


class BodyLimit:
    """Refuses bodies that are too long, for the server or their path (`ServerState.body_bytes`), too slow, or without a
    valid key."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state, self._max_bytes = app, state, state.settings.max_body_bytes
        self._values = max(VALUES, 2 * (state.engine.runtime.survey.max_length or 0))
        self._budget = BodyBudget(BODIES * self._max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, seconds = Headers(scope=scope), self._state.settings.body_s
        announced = headers.get("content-length", "0")
        try:
            if not announced.isdecimal() or int(announced) > self._max_bytes:
                raise _refusal(self._max_bytes)
            has_body = announced != "0" or "transfer-encoding" in headers
            tenant = self._state.key_of_header(headers.get("authorization")).name if has_body else ""
            limit = self._state.body_bytes(scope["path"])
            with self._budget.open(tenant) as take:
                try:
                    whole = await asyncio.wait_for(self._read(receive, limit, take), seconds)
                except TimeoutError:
                    message = f"a request must be sent within {seconds:g} s (--body-timeout)"
                    raise ApiError(408, message, code="timeout") from None
                if whole is None:
                    return
                if not whole and has_body and "upgrade" in headers:  # httptools ends the request in front of its body
                    way_out = "send HTTP/1.1 without Upgrade (Java: HttpClient.Version.HTTP_1_1)"
                    raise ApiError(400, f"Upgrade is {headers['upgrade'][:80]!r}, so no body was read; {way_out}")
                if len(whole) > LARGE:
                    await run_in_threadpool(check_shape, whole, self._values)
                left: list[Message] = [{"type": "http.request", "body": whole, "more_body": False}]
                del whole  # the app's own parts keep it, as long as they need it

                async def replaying() -> Message:
                    return left.pop() if left else await receive()

                await self._app(scope, replaying, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _read(self, receive: Receive, limit: int, take: Callable[[int], None]) -> bytes | None:
        """The whole body, since a chunked one announces no length; None: the client has disconnected."""
        parts: list[bytes] = []
        read = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            if read > limit:
                why = ", which is more than any text that fits the model's context" if limit < self._max_bytes else ""
                raise _refusal(limit, why)
            take(len(parts[-1]))
            if not message.get("more_body"):
                return b"".join(parts)


def _refusal(limit: int, why: str = "") -> ApiError:
    return ApiError(413, f"a request may have at most {limit:,} bytes{why}", code="too_long")


def check_shape(body: bytes, values: int = VALUES) -> None:
    """Refuses JSON of more than so many values, or more lists and objects, than are parsed in a moment: 413. Parsing
    and checking JSON holds up every other request. Text is quick; millions of numbers or empty lists are not. Only the
    body's punctuation is looked at, whether it is JSON or not."""
    found, nested = body.count(b","), body.count(b"[") + body.count(b"{")
    if found <= values and nested <= CONTAINERS:
        return
    found = nested = at = 0
    texts = ((match.start(), match.end()) for match in _STRING.finditer(body))
    for start, end in chain(texts, [(len(body), 0)]):  # the same outside of texts
        found += body.count(b",", at, start)
        nested += body.count(b"[", at, start) + body.count(b"{", at, start)
        at = end
    for count, most, what in ((found, values, "values"), (nested, CONTAINERS, "lists and objects")):
        if count > most:
            message = f"the body has {count:,} {what}; at most {most:,} are read; send several requests"
            raise ApiError(413, message, code="too_long")


class BodyBudget:
    """Bytes of all bodies that are in memory at a time, since many connections may send a part of a long one. A tenant
    takes at most half of what the others leave, so that there is always something left for one more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[str, int] = {}

    @contextmanager
    def open(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """One body of a tenant: a function that takes so many bytes more; all are given back in the end. Its first
        `FREE` bytes do not count. The function raises `ApiError`, 503, where other bodies have the bytes."""
        read = counted = 0

        def take(count: int) -> None:
            nonlocal read, counted
            read += count
            more = max(0, read - FREE) - counted
            taken, own = sum(self._taken.values()), self._taken.get(tenant, 0)
            if more > 0 and own + more > (self._limit - (taken - own)) // 2:
                message = f"{taken:,} bytes of other requests are being read, {own:,} of this key's own"
                raise ApiError(503, message, code="overloaded", retry_after_s=5)
            counted += more
            self._taken[tenant] = own + more

        try:
            yield take
        finally:
            self._taken[tenant] = self._taken.get(tenant, 0) - counted
            if not self._taken[tenant]:
                del self._taken[tenant]
