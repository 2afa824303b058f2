"""OpenAI's routes: a request becomes a prompt and sampling parameters, runs in the scheduler, and is answered.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.tickets import Ask
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.prompts import ParsedPrompt, chat_prompt, completion_prompt
from cacheblend.serve.responses import ChatFormat, CompletionFormat, ResponseFormat, streamed_response, whole_response
from cacheblend.serve.running import RunningRequest
from cacheblend.serve.schemas import ChatRequest, CompletionRequest, Extras, Sampling
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import tenant_of


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806

    @app.get("/v1/models")
    async def models(key: Key) -> dict[str, Any]:
        model = {"id": state.engine.name, "object": "model", "created": 0, "owned_by": "you"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest, key: Key) -> Any:
        def parse() -> ParsedPrompt:
            return chat_prompt(state.engine, asked, state.settings.chunk_tokens)

        return await _answer(state, request, asked, key, parse, ChatFormat(state.token_text))

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest, key: Key) -> Any:
        def parse() -> ParsedPrompt:
            return completion_prompt(state.engine, asked)

        return await _answer(state, request, asked, key, parse, CompletionFormat(state.token_text))


async def _answer(
    state: ServerState,
    request: Request,
    asked: Sampling,
    key: ApiKey,
    parse: Callable[[], ParsedPrompt],
    response_format: ResponseFormat,
) -> Any:
    """The response to a request, whole or as a stream."""
    model = state.engine.name
    if asked.model and asked.model != model:
        raise ApiError(404, f"there is no model {asked.model!r}; this server has {model!r}", code="model_not_found")
    ask = await run_in_threadpool(_scheduler_request, state, asked, key, parse)
    running = RunningRequest(ask, state.scheduler, state.metrics)
    request.state.running = running
    running.start()
    if asked.stream:
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        events = streamed_response(running, response_format, model, with_usage=with_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return JSONResponse(await _unless_disconnected(request, whole_response(running, response_format, model)))


def _scheduler_request(state: ServerState, asked: Sampling, key: ApiKey, parse: Callable[[], ParsedPrompt]) -> Ask:
    """What the scheduler runs; tokenises the prompt, so it is called on a worker thread."""
    settings, extras = state.settings, asked.cacheblend or Extras()
    if asked.n > settings.max_choices:
        raise ApiError(400, f"n is {asked.n}; at most {settings.max_choices} choices are allowed", param="n")
    prompt, keep_text = parse()
    state.check_size(prompt)
    remembered = state.tenants.remember_salt(key, extras.salt)
    state.tenants.count(key)
    return Ask(
        prompt,
        _sampling_params(state, asked, prompt),
        choices=asked.n,
        mode=extras.mode,
        ratio=None if extras.selector else extras.recompute_ratio,
        selector=_selector(extras),
        deadline=time.monotonic() + settings.timeout_s,
        logprobs=_logprobs(asked),
        tenant=tenant_of(key, extras.salt),
        tenant_label=key.label,
        may_keep=lambda tokens: remembered and state.tenants.reserve(key, tokens),
        keep_text=keep_text and settings.store_bytes is None,  # text belongs to no chunk, so no quota would count it
    )


def _selector(extras: Extras) -> Selector | None:
    if extras.selector is None:
        return None
    config = BlendConfig(selector=extras.selector)
    if extras.recompute_ratio is not None:
        config = replace(config, recompute_ratio=extras.recompute_ratio)
    return config.make_selector()


def _sampling_params(state: ServerState, asked: Sampling, prompt: Prompt) -> SamplingParams:
    wanted = getattr(asked, "max_completion_tokens", None) or asked.max_tokens or state.settings.max_tokens
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return SamplingParams(
        max_new_tokens=wanted,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(0, asked.top_k or 0),
        min_p=asked.min_p or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        seed=asked.seed,
        stop=stop,
        ignore_eos=asked.ignore_eos,
    ).within(state.engine.survey.max_length, len(prompt))


def _logprobs(asked: Sampling) -> int | None:
    """Number of most likely tokens to report with each token; None: no log-probabilities."""
    if isinstance(asked, ChatRequest):
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None


async def _unless_disconnected(request: Request, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The answer; cancelled when the client disconnects.

    Raises:
        ApiError: the client has disconnected.
    """
    wanted = asyncio.ensure_future(answer)
    try:
        while True:
            done, _ = await asyncio.wait({wanted}, timeout=0.5)
            if done:
                return wanted.result()
            if await request.is_disconnected():
                raise ApiError(499, "the client has disconnected")
    finally:  # also when this coroutine is cancelled
        wanted.cancel()
