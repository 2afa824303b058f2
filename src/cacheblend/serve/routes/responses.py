"""OpenAI's Responses, as far as they are text: POST /v1/responses. Nothing is kept of an answer."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from cacheblend.serve.admission import RunningRequest, started, unless_disconnected
from cacheblend.serve.errors import ApiError, api_error
from cacheblend.serve.prompts import ParsedPrompt, chat_prompt, texts_of_chat
from cacheblend.serve.routes.openai import EVENT_STREAM, report_of, usage_of
from cacheblend.serve.schemas import ChatRequest, ContentPart, InputMessage, InputPart, Message, ResponsesRequest
from cacheblend.serve.state import Key, ServerState


@dataclass
class ResponseObject:
    """A Response while it is made: the answer's text and number of tokens so far; `finish_reason` None: it goes on."""

    asked: ResponsesRequest
    model: str
    running: RunningRequest
    text: str = ""
    generated: int = 0
    finish_reason: str | None = None
    _id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _created: int = field(default_factory=lambda: int(time.time()))

    @property
    def status(self) -> str:
        if self.finish_reason is None:
            return "in_progress"
        return "incomplete" if self.finish_reason == "length" else "completed"

    async def pieces(self) -> AsyncIterator[str]:
        """Pieces of text as they come; adds them. Raises the error that ended the request."""
        async for event in self.running.events():
            self.text += event.text
            self.generated += event.token_id is not None
            self.finish_reason = event.finish_reason or self.finish_reason
            if event.text:
                yield event.text

    def part(self) -> dict[str, Any]:
        """The message's only part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def message(self) -> dict[str, Any]:
        """The only item of its output, without the part while it is made."""
        content = [] if self.finish_reason is None else [self.part()]
        message = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**message, "status": self.status, "content": content}

    def where(self) -> dict[str, Any]:
        """The fields by which an event says what it is about."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def shown(self, error: ApiError | None = None) -> dict[str, Any]:
        """The object as it is now; with the error that ended it."""
        asked, is_done, usage = self.asked, self.finish_reason is not None, None
        said = asked.text and asked.text.format
        if is_done:
            counted = usage_of(self.running, self.generated)
            usage = {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": self.generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "failed" if error else self.status,
            "error": {"code": "server_error", "message": error.message} if error else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.model,
            "output": [self.message()] if is_done else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {
                "format": {"type": "text"} if said is None else said.model_dump(by_alias=True, exclude_unset=True)
            },
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": {},
            "cacheblend": report_of(self.running),
        }


async def response_events(shown: ResponseObject) -> AsyncIterator[str]:
    """The Response as server-sent events; an error becomes ``response.failed``."""
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        data = {"type": kind, "sequence_number": number, **fields}
        number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

    for kind in ("response.created", "response.in_progress"):
        yield event(kind, response=shown.shown())
    yield event("response.output_item.added", output_index=0, item=shown.message())
    yield event("response.content_part.added", **shown.where(), part=shown.part())
    try:
        async for piece in shown.pieces():
            yield event("response.output_text.delta", **shown.where(), delta=piece, logprobs=[])
    except Exception as error:  # too late for a status: that has been sent
        failed = api_error(error)
        shown.running.failed = failed.status
        yield event("response.failed", response=shown.shown(failed))
        return
    yield event("response.output_text.done", **shown.where(), text=shown.text, logprobs=[])
    yield event("response.content_part.done", **shown.where(), part=shown.part())
    yield event("response.output_item.done", output_index=0, item=shown.message())
    yield event(f"response.{shown.status}", response=shown.shown())


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""

    @app.post("/v1/responses")
    async def respond(request: Request, asked: ResponsesRequest, key: Key) -> Any:
        def parse() -> list[ParsedPrompt]:
            messages = [Message(role="system", content=asked.instructions)] if asked.instructions else []
            given = [InputMessage(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
            for each in given:
                role, content = "system" if each.role == "developer" else each.role, each.content
                parts = [ContentPart(type="text", text=p.text) for p in content if isinstance(p, InputPart)]
                messages.append(Message(role=role, content=content if isinstance(content, str) else parts))
            state.text_limit.check(texts_of_chat(messages))
            chat = ChatRequest.model_construct(messages=messages, chat_template_kwargs=asked.chat_template_kwargs)
            return [chat_prompt(state.engine, chat, state.settings.chunk_tokens)]

        shown = ResponseObject(asked, state.engine.name, await started(state, request, asked, key, parse))
        if asked.stream:
            return StreamingResponse(response_events(shown), **EVENT_STREAM)

        async def whole() -> dict[str, Any]:
            async for _ in shown.pieces():
                pass
            return shown.shown()

        return JSONResponse(await unless_disconnected(request, whole()))
