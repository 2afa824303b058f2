"""Runs a server: ends connections that only hold a place, and stops in order.

Requests may finish for a while. Streams that do not end with an error event, and posts that store with 503.
"""

import asyncio
import socket

import uvicorn

from cacheblend.serve.connections import end_overdue, watched
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import ServerState

MORE_S = 5
"""Seconds in which the last events are sent, once the time for requests is over."""
TICKS = 5
"""Of uvicorn's, ten a second, between two looks at the connections."""


class DrainingServer(uvicorn.Server):
    """A server that ends its requests before it cuts their connections.

    Args:
        config: its ``timeout_graceful_shutdown`` is set.
        state: of the app that it serves: its ``state.server``.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        config.timeout_graceful_shutdown = grace_s(state.settings)
        super().__init__(config)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self.config.http_protocol_class = watched(self.config.http_protocol_class, self._state.settings.connections)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn."""
        if counter % TICKS == 0:
            settings = self._state.settings
            end_overdue(self.server_state.connections, settings.headers_s, settings.body_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. Takes no more requests, and ends those that run after ``drain_s``."""
        closing = asyncio.to_thread(self._state.scheduler.close, self._state.settings.drain_s)
        drained = asyncio.create_task(closing)
        ending = asyncio.get_running_loop().call_later(self._state.settings.drain_s, self._state.end_queues)
        await super().shutdown(sockets)
        ending.cancel()
        await drained


def grace_s(settings: ServeSettings) -> int:
    """Seconds after which connections are cut."""
    return round(settings.drain_s) + MORE_S
