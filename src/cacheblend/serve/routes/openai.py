"""OpenAI's chats and completions, and its list of models.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models, /v1/models/{id}
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from cacheblend.serve.admission import check_model, started, unless_disconnected
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.lengths import texts_of
from cacheblend.serve.prompts import ParsedPrompt, chat_prompt, completion_prompt
from cacheblend.serve.responses import AnswerFormat, ChatFormat, CompletionFormat, streamed_response, whole_response
from cacheblend.serve.schemas import ChatRequest, CompletionRequest, Sampling, StreamOptions
from cacheblend.serve.state import ServerState
from cacheblend.serve.tools.call_reader import CallReader, ToolChatFormat
from cacheblend.serve.tools.formats import Format
from cacheblend.serve.tools.requests import names_of


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806
    model = {
        "id": state.engine.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "you",
        "root": state.engine.name,  # this and the next as vLLM has it; no path of the server's
        "parent": None,
        "max_model_len": state.engine.survey.max_length,
    }

    @app.get("/v1/models")
    async def models(key: Key) -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str, key: Key) -> dict[str, Any]:
        check_model(state, model_id)
        return model

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest, key: Key) -> Any:
        def parse() -> ParsedPrompt:
            state.text_limit.check(texts_of(asked))
            prompt = chat_prompt(state.engine, asked, state.settings.chunk_tokens)
            return prompt._replace(shown=_markers(state, calls))

        calls = state.call_format if asked.may_call_tools else None
        return await _answer(state, request, asked, key, parse, _chat_format(state, asked, calls))

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest, key: Key) -> Any:
        def parse() -> ParsedPrompt:
            state.text_limit.check(texts_of(asked))
            return completion_prompt(state.engine, asked)

        return await _answer(state, request, asked, key, parse, CompletionFormat(state.token_text))


def _markers(state: ServerState, calls: Format | None) -> frozenset[int]:
    """The special tokens that calls are written with."""
    if calls is None or state.engine.builder is None:
        return frozenset()
    return state.engine.builder.special_ids([*calls.markers, *calls.inner])


def _chat_format(state: ServerState, asked: ChatRequest, calls: Format | None) -> AnswerFormat:
    """How a chat is answered; with the calls of its tools, if they are read."""
    chat = ChatFormat(state.token_text)
    if calls is None:
        return chat
    only_first, names = asked.parallel_tool_calls is False, names_of(asked.tools or ())
    return ToolChatFormat(chat, lambda: CallReader(calls, names, only_first=only_first), calls.new_id)


async def _answer(
    state: ServerState,
    request: Request,
    asked: Sampling,
    key: ApiKey,
    parse: Callable[[], ParsedPrompt],
    response_format: AnswerFormat,
) -> Any:
    """The response to a request, whole or as a stream."""
    model, running = state.engine.name, await started(state, request, asked, key, parse)
    if asked.stream:
        options = asked.stream_options or StreamOptions()
        with_usage, in_each = options.include_usage, options.include_usage and options.continuous_usage_stats
        events = streamed_response(running, response_format, model, with_usage=with_usage, in_each=in_each)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return JSONResponse(await unless_disconnected(request, whole_response(running, response_format, model)))
