"""Routes for operators: GET /health (alive), GET /ready (requests are worked off), GET /metrics (Prometheus)."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from cacheblend.serve.metrics import CONTENT_TYPE
from cacheblend.serve.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        if not state.scheduler.is_alive:
            return JSONResponse({"status": "the scheduler has stopped; restart the server"}, 503)
        down = await run_in_threadpool(state.metrics.store.down) if state.settings.ready_needs_store else []
        if down:
            return JSONResponse({"status": f"the store does not answer: {', '.join(down)}"}, 503)
        return JSONResponse({"status": "ready", "waiting": state.scheduler.waiting, "active": state.scheduler.active})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        await state.authenticate_for_metrics(request)
        return Response(await run_in_threadpool(state.metrics.text), media_type=CONTENT_TYPE)
