"""The FastAPI app: middleware, error handlers, routes, those for operators, and what happens at start and stop.

GET /health (alive)   GET /ready (requests are worked off)   GET /metrics (Prometheus)
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from cacheblend.core.load.threads import time_left
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.errors import ApiError, add_error_handlers
from cacheblend.serve.memory import trim_heap_periodically
from cacheblend.serve.metrics import CONTENT_TYPE
from cacheblend.serve.middleware import BodyLimit, HostGuard, RequestLog
from cacheblend.serve.routes import chunks, openai, playground, responses
from cacheblend.serve.schemas import ErrorAnswer
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import ServerState, authenticate


def create_app(engine: BlendEngine, settings: ServeSettings | None = None) -> FastAPI:
    """The app over an engine, which stays open after the app has stopped."""
    settings = settings or ServeSettings()
    state = ServerState(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        beside = [asyncio.create_task(each) for each in (trim_heap_periodically(), state.metrics.watch_loop())]
        yield
        for task in beside:
            task.cancel()
        for queue in state.queues:
            queue.close()
        left = time_left(settings.drain_s)
        await run_in_threadpool(state.scheduler.close, settings.drain_s)
        await run_in_threadpool(engine.flush, left())
        state.tenants.close()

    errors: dict[int | str, dict[str, Any]] = {code: {"model": ErrorAnswer} for code in ("4XX", 503)}
    app = FastAPI(title="CacheBlend", lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors)
    app.add_middleware(BodyLimit, state=state)
    app.state.server = state
    app.add_middleware(HostGuard, hosts=None if settings.keys.needs_key else settings.hosts)
    app.add_middleware(RequestLog, metrics=state.metrics)
    add_error_handlers(app)
    for routes in (openai, responses, chunks, *([playground] if settings.playground else [])):
        routes.add_routes(app, state)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        if not state.scheduler.is_alive:
            return JSONResponse({"status": "the scheduler has stopped; restart the server"}, 503)
        down = await run_in_threadpool(state.metrics.store.down) if settings.ready_needs_store else []
        if down:
            return JSONResponse({"status": f"the store does not answer: {', '.join(down)}"}, 503)
        return JSONResponse({"status": "ready", "waiting": state.scheduler.waiting, "active": state.scheduler.active})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not settings.metrics_keys.needs_key:
            await authenticate(request)
        elif settings.metrics_keys.find(request.headers.get("authorization")) is None:
            raise ApiError(401, "/metrics has keys of its own: Authorization: Bearer KEY", code="invalid_api_key")
        return Response(await run_in_threadpool(state.metrics.text), media_type=CONTENT_TYPE)

    return app
