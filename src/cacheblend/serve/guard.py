"""Who may be asked for under which name, and what a browser may do with an answer.

Where no keys are set, anyone who reaches the server may ask, and a foreign page reaches it through its visitor's
browser, by a name of its own that it has pointed at this machine (DNS rebinding). So the header ``Host`` must name the
server. Browsers always send it; probes of load balancers, by HTTP/1.0, do not.
"""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.serve.errors import ApiError

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
"""Of every answer: no type but the given one, and no frame in another page."""


class HostGuard:
    """Refuses requests to a foreign name, adds `HEADERS`, and answers HEAD as GET without the body.

    Args:
        app: the next ASGI app.
        hosts: names that the server has, besides ``localhost`` and addresses; ``*``: any. None: it is not checked.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else {"localhost", *(name.lower() for name in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
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
        host = name_in(named or "")
        if self._hosts is not None and named is not None and not (host in self._hosts or _is_address(host)):
            refusal = ApiError(
                403,
                f"this server is not called {host[:80]!r}; start it with --allowed-host NAME if it is",
                code="host_not_allowed",
            )
            await refusal.response()(scope, receive, sending)
            return
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, sending)


def name_in(host: str) -> str:
    """The name in a ``Host`` header, without its port and in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(host: str) -> bool:
    """Whether it is an IP address: nobody can point those elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
