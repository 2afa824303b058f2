"""The FastAPI app: middleware, error handlers, routes, and what happens at start and stop.

Knows which parts the server has; what they do is in `routes` and `state`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.errors import add_error_handlers
from cacheblend.serve.memory import trim_heap_periodically
from cacheblend.serve.middleware import BodyLimit, HostGuard, RequestLog
from cacheblend.serve.routes import chunks, documents, health, openai, playground, responses, tokens
from cacheblend.serve.schemas import ErrorAnswer
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import ServerState


def create_app(engine: BlendEngine, settings: ServeSettings | None = None) -> FastAPI:
    """The app over an engine, which stays open after the app has stopped."""
    settings = settings or ServeSettings()
    state = ServerState(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        trimming = asyncio.create_task(trim_heap_periodically())
        yield
        trimming.cancel()
        state.close()
        await run_in_threadpool(state.scheduler.close, settings.drain_s)
        await run_in_threadpool(engine.flush, settings.drain_s)
        state.tenants.close()

    errors: dict[int | str, dict[str, Any]] = {code: {"model": ErrorAnswer} for code in ("4XX", 503)}
    app = FastAPI(title="CacheBlend", lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors)
    app.add_middleware(BodyLimit, state=state)
    app.state.server = state
    app.add_middleware(HostGuard, hosts=None if settings.keys.keys else settings.hosts)
    app.add_middleware(RequestLog, metrics=state.metrics)
    add_error_handlers(app)
    for routes in (openai, responses, tokens, health, chunks, documents):
        routes.add_routes(app, state)
    if settings.playground:
        playground.add_routes(app, state)
    return app
