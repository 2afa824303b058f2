"""OpenAI's Responses, as far as they are text: POST /v1/responses. Nothing is kept of an answer."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from cacheblend.serve.asking import started, unless_disconnected
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.lengths import texts_of_chat
from cacheblend.serve.prompts import ParsedPrompt, chat_prompt
from cacheblend.serve.response_events import ResponseObject, response_events, whole_object
from cacheblend.serve.schemas import ChatRequest, ContentPart, Message, ResponsesRequest
from cacheblend.serve.state import ServerState

_SYSTEM = "system"


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806

    @app.post("/v1/responses")
    async def respond(request: Request, asked: ResponsesRequest, key: Key) -> Any:
        def parse() -> ParsedPrompt:
            messages = messages_of(asked)
            state.text_limit.check(texts_of_chat(messages))
            chat = ChatRequest.model_construct(messages=messages, chat_template_kwargs=asked.chat_template_kwargs)
            return chat_prompt(state.engine, chat, state.settings.chunk_tokens)

        running = await started(state, request, asked, key, parse)
        shown = ResponseObject(asked, state.engine.name)
        if asked.stream:
            events = response_events(running, shown)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return JSONResponse(await unless_disconnected(request, whole_object(running, shown)))


def messages_of(asked: ResponsesRequest) -> list[Message]:
    """The instructions and the input as a chat's messages; the role ``developer`` is another name of ``system``."""
    messages = [Message(role=_SYSTEM, content=asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*messages, Message(role="user", content=asked.input)]
    for each in asked.input:
        role = _SYSTEM if each.role == "developer" else each.role
        if isinstance(each.content, str):
            messages.append(Message(role=role, content=each.content))
        else:
            parts = [ContentPart(type="text", text=part.text) for part in each.content]
            messages.append(Message(role=role, content=parts))
    return messages
