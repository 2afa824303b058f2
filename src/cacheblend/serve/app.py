"""The app: OpenAI's routes, chunks, health, metrics, the page. Reads top to bottom; the work is in its neighbours.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models
POST, GET, DELETE /v1/chunks   POST, DELETE /v1/chunks/{id}/pin
GET /health   GET /ready   GET /metrics   GET /
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.background import run_apart
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask
from cacheblend.serve import chunks, playground
from cacheblend.serve.answers import Answering
from cacheblend.serve.errors import ApiError, api_error
from cacheblend.serve.forms import ChatForm, CompletionForm, Form, stream, whole
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.memory import give_back_now_and_then
from cacheblend.serve.metrics import CONTENT_TYPE, Metrics
from cacheblend.serve.middleware import BodyLimit, RequestLog
from cacheblend.serve.prompts import Read, chat_prompt, completion_prompt
from cacheblend.serve.schemas import ChatRequest, CompletionRequest, ErrorAnswer, Extras, Sampling
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.tenants import Tenants, tenant_of

Found = TypeVar("Found")


class Server:
    """What the routes share.

    Args:
        engine: closed by its owner, behind the app.
        settings: of the server.
    """

    def __init__(self, engine: BlendEngine, settings: ServeSettings) -> None:
        self.engine, self.settings = engine, settings
        self.scheduler = Scheduler(engine, settings.limits)
        self.metrics = Metrics(
            engine.store,
            lambda: self.scheduler.waiting,
            lambda: self.scheduler.active,
            lambda: engine.captures_given_up,
        )
        self.tenants = Tenants(engine, settings.store_bytes, settings.pin_bytes)
        self._beside = asyncio.Lock()
        self._waiting_beside = 0

    async def beside(self, request: Request, work: Callable[[], Found]) -> Found:
        """Computing that somebody asked for beside the answers, one such request after the other.

        Raises:
            ApiError: as many wait as may, or the client has gone meanwhile.
        """
        if self._waiting_beside >= self.settings.limits.waiting:
            raise ApiError(429, f"{self._waiting_beside} requests wait", code="queue_full", retry_after_s=5)
        self._waiting_beside += 1
        try:
            async with self._beside:  # waits here, not in one of the few threads that all requests share
                if await request.is_disconnected():
                    raise ApiError(499, "the client has gone")
                return await run_in_threadpool(run_apart, work)
        finally:
            self._waiting_beside -= 1

    async def key_of(self, request: Request) -> ApiKey:
        """Whose request it is.

        Raises:
            ApiError: nobody's.
        """
        key = self.key_by(request.headers.get("authorization"))
        request.state.key = key.name
        return key

    def key_by(self, header: str | None) -> ApiKey:
        """By the header ``authorization``; raises as `key_of`."""
        key = self.settings.keys.find(header)
        if key is None:
            raise ApiError(401, "this server wants an API key: Authorization: Bearer KEY", code="invalid_api_key")
        return key

    def token_text(self, token: int) -> str:
        """Of one token, for log-probabilities."""
        return self.engine.builder.decode([token]) if self.engine.builder else str(token)

    def shown(self, token: int) -> str:
        """Of one token, special ones by their names."""
        return self.token_text(token) or str(self.engine.tokenizer.convert_ids_to_tokens(token))

    async def answer(self, request: Request, asked: Sampling, key: ApiKey, make: Callable[[], Read], form: Form) -> Any:
        """An answer, whole or as a stream."""
        self._check_model(asked.model)
        ask = await run_in_threadpool(self._ask, asked, key, make)
        answering = Answering(ask, self.scheduler, self.metrics)
        request.state.answering = answering
        answering.start()
        if asked.stream:
            with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
            events = stream(answering, form, self.engine.name, with_usage=with_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return JSONResponse(await _unless_gone(request, answering, whole(answering, form, self.engine.name)))

    def _check_model(self, name: str) -> None:
        if name and name != self.engine.name:
            raise ApiError(404, f"there is no model {name!r} here but {self.engine.name!r}", code="model_not_found")

    def _ask(self, asked: Sampling, key: ApiKey, make: Callable[[], Read]) -> Ask:
        settings, extras = self.settings, asked.cacheblend or Extras()
        if asked.n > settings.max_choices:
            raise ApiError(400, f"n is {asked.n}, at most {settings.max_choices} choices are given", param="n")
        prompt, keep_text = make()
        self.check_size(prompt)
        remembered = self.tenants.seen(key, extras.salt)
        self.tenants.count(key)
        return Ask(
            prompt,
            self._params(asked, prompt),
            choices=asked.n,
            mode=extras.mode,
            ratio=None if extras.selector else extras.recompute_ratio,
            selector=self._selector(extras),
            deadline=time.monotonic() + settings.timeout_s,
            logprobs=_logprobs(asked),
            tenant=tenant_of(key, extras.salt),
            may_keep=lambda tokens: remembered and self.tenants.take_room(key, tokens),
            keep_text=keep_text and settings.store_bytes is None,  # it belongs to no chunk: nobody would count it
        )

    def check_size(self, prompt: Prompt) -> None:
        """Raises `ApiError` where a prompt is longer than may be, or has more chunks."""
        limit, most = self.settings.max_prompt_tokens, self.settings.max_chunks
        if limit is not None and len(prompt) > limit:
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, at most {limit} are read", code="too_long")
        if len(prompt.chunks) > most:
            raise ApiError(400, f"the prompt has {len(prompt.chunks)} chunks, at most {most} are taken")

    def _selector(self, extras: Extras) -> Selector | None:
        if extras.selector is None:
            return None
        config = BlendConfig(selector=extras.selector)
        if extras.recompute_ratio is not None:
            config = replace(config, recompute_ratio=extras.recompute_ratio)
        return config.make_selector()

    def _params(self, asked: Sampling, prompt: Prompt) -> SamplingParams:
        most = getattr(asked, "max_completion_tokens", None) or asked.max_tokens or self.settings.max_tokens
        limit = self.engine.survey.max_length
        room = most if limit is None else limit - len(prompt) + 1
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        return SamplingParams(
            max_new_tokens=min(most, room),
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(0, asked.top_k or 0),
            min_p=asked.min_p or 0.0,
            repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
            seed=asked.seed,
            stop=stop,
            ignore_eos=asked.ignore_eos,
        )


def create_app(engine: BlendEngine, settings: ServeSettings | None = None) -> FastAPI:
    """The app over an engine.

    Args:
        engine: with a tokenizer; it stays open behind the app.
        settings: of the server.
    """
    settings = settings or ServeSettings()
    server = Server(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        giving_back = asyncio.create_task(give_back_now_and_then())
        yield
        giving_back.cancel()
        await run_in_threadpool(server.scheduler.close, settings.drain_s)
        await run_in_threadpool(engine.flush, settings.drain_s)

    errors: dict[int | str, dict[str, Any]] = {code: {"model": ErrorAnswer} for code in ("4XX", 503)}
    app = FastAPI(title="CacheBlend", lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors)
    app.state.server = server
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_s, check=server.key_by)
    app.add_middleware(RequestLog, metrics=server.metrics)
    _tell_errors(app)
    _openai_routes(app, server)
    _health_routes(app, server)
    chunks.add_routes(app, server)
    if settings.playground:
        playground.add_routes(app, server)
    return app


def _openai_routes(app: FastAPI, server: Server) -> None:
    key_of = Annotated[ApiKey, Depends(server.key_of)]

    @app.get("/v1/models")
    async def models(key: key_of) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": server.engine.name, "object": "model", "created": 0, "owned_by": "you"}],
        }

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest, key: key_of) -> Any:
        form = ChatForm(server.token_text)
        return await server.answer(
            request, asked, key, lambda: chat_prompt(server.engine, asked, server.settings.chunk_tokens), form
        )

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest, key: key_of) -> Any:
        form = CompletionForm(server.token_text)
        return await server.answer(request, asked, key, lambda: completion_prompt(server.engine, asked), form)


def _health_routes(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        if not server.scheduler.is_alive:
            return JSONResponse({"status": "nobody works requests off; restart the server"}, 503)
        return JSONResponse({"status": "ready", "waiting": server.scheduler.waiting, "active": server.scheduler.active})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        await server.key_of(request)
        return Response(await run_in_threadpool(server.metrics.text), media_type=CONTENT_TYPE)


def _tell_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            where = f"character {first['loc'][-1]}"
            return ApiError(400, f"the body is not JSON: {first['ctx']['error']}, {where}").response()
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        if not where:
            return ApiError(400, "the body is not a JSON object, sent as application/json").response()
        return ApiError(400, f"{where}: {first['msg']}", param=where).response()

    @app.exception_handler(HTTPException)
    async def tell(_: Request, error: HTTPException) -> Response:
        return api_error(error).response()

    @app.exception_handler(ApiError)
    async def tell_client(_: Request, error: ApiError) -> Response:
        return error.response()


def _logprobs(asked: Sampling) -> int | None:
    if isinstance(asked, ChatRequest):
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None


async def _unless_gone(request: Request, answering: Answering, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The answer; given up where the client has gone away meanwhile."""
    wanted = asyncio.ensure_future(answer)
    try:
        while True:
            done, _ = await asyncio.wait({wanted}, timeout=0.5)
            if done:
                return wanted.result()
            if await request.is_disconnected():
                raise ApiError(499, "the client has gone")
    finally:  # also where this is cancelled
        wanted.cancel()
