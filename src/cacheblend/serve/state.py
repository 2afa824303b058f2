"""What a server's routes share: engine, scheduler, metrics, tenants and settings, and who a request is from.

Knows no route: routes and the app import it.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.background import run_apart
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.watching import watch
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.metrics import Metrics
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.tenants import Tenants

T = TypeVar("T")


class ServerState:
    """State of one server. Methods may be called from any thread, coroutines on the server's loop.

    Args:
        engine: stays open after the server has stopped; its owner closes it.
        settings: of the server.

    Attributes:
        engine, settings: the same.
        scheduler: runs the requests.
        metrics: counters for Prometheus.
        tenants: what each key has stored.
    """

    def __init__(self, engine: BlendEngine, settings: ServeSettings) -> None:
        self.engine, self.settings = engine, settings
        if settings.shadow_settings is not None:
            watch(engine, settings.shadow_settings)
        self.scheduler = Scheduler(engine, settings.limits)
        self.metrics = Metrics(
            engine.store,
            lambda: self.scheduler.waiting,
            lambda: self.scheduler.active,
            lambda: engine.background.given_up,
            engine.shadow,
        )
        self.tenants = Tenants(engine, settings.store_bytes, settings.pin_bytes)
        self._serial = asyncio.Lock()
        self._serial_waiting = 0

    async def run_serially(self, request: Request, work: Callable[[], T]) -> T:
        """Runs work that does not go through the scheduler (storing, explaining), one such request at a time.

        Raises:
            ApiError: the queue is full, or the client has disconnected while it waited.
        """
        if self._serial_waiting >= self.settings.limits.waiting:
            raise ApiError(429, f"{self._serial_waiting} requests wait", code="queue_full", retry_after_s=5)
        self._serial_waiting += 1
        try:
            async with self._serial:  # waits here, so as not to occupy one of the few threads that requests share
                if await request.is_disconnected():
                    raise ApiError(499, "the client has disconnected")
                return await run_in_threadpool(run_apart, work)
        finally:
            self._serial_waiting -= 1

    async def authenticate(self, request: Request) -> ApiKey:
        """The key that a request is made with; noted for the log.

        Raises:
            ApiError: it has none, or an unknown one.
        """
        key = self.key_of_header(request.headers.get("authorization"))
        request.state.key = key.name
        return key

    def key_of_header(self, authorization: str | None) -> ApiKey:
        """The key in an ``Authorization`` header; raises as `authenticate`."""
        key = self.settings.keys.find(authorization)
        if key is None:
            raise ApiError(401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")
        return key

    def check_size(self, prompt: Prompt) -> None:
        """Raises `ApiError` if a prompt has more tokens or more chunks than the settings allow."""
        max_tokens, max_chunks = self.settings.max_prompt_tokens, self.settings.max_chunks
        if max_tokens is not None and len(prompt) > max_tokens:
            raise ApiError(400, f"the prompt has {len(prompt)} tokens; at most {max_tokens} are read", code="too_long")
        if len(prompt.chunks) > max_chunks:
            raise ApiError(400, f"the prompt has {len(prompt.chunks)} chunks; at most {max_chunks} are allowed")

    def token_text(self, token: int) -> str:
        """Text of one token; empty for a special token."""
        return self.engine.builder.decode([token]) if self.engine.builder else str(token)

    def token_label(self, token: int) -> str:
        """Text of one token; the name of a special token."""
        return self.token_text(token) or str(self.engine.tokenizer.convert_ids_to_tokens(token))
