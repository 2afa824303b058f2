"""OpenAI's chats and completions, whole and streamed, its list of models, and vLLM's texts to token ids and back.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models, /v1/models/{id}   POST /tokenize, /detokenize
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, islice
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from cacheblend.engines.hf.tickets import TokenEvent
from cacheblend.engines.tokens.chat import strings_in
from cacheblend.serve.admission import RunningRequest, check_model, started, unless_disconnected
from cacheblend.serve.errors import ApiError, api_error
from cacheblend.serve.prompts import ParsedPrompt, chat_prompt, completion_prompt, texts_of_chat
from cacheblend.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
)
from cacheblend.serve.state import Key, ServerState
from cacheblend.serve.tool_calls import CallReader

DONE = "data: [DONE]\n\n"
EVENT_STREAM: dict[str, Any] = {
    "media_type": "text/event-stream",
    "headers": {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},  # a proxy sends each event at once
}
MOST_PROMPTS = 32  # of a request
PARTS = 4096  # numbers, texts and what is between them, of a whole response, that are made and sent at a time
PARTS_AT_ONCE, ASIDE_S = 512, 0.0003  # some 0.6 ms of Python, and what its thread then leaves to others


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    engine = state.engine
    model = {
        "id": engine.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "you",
        "root": engine.name,  # this and the next as vLLM has it; no path of the server's
        "parent": None,
        "max_model_len": engine.runtime.survey.max_length,
    }

    @app.get("/v1/models")
    async def models(key: Key) -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str, key: Key) -> dict[str, Any]:
        check_model(state, model_id)
        return model

    async def answer(
        request: Request, asked: Sampling, key: Key, parse: Callable[[], list[ParsedPrompt]], form: "AnswerFormat"
    ) -> Any:
        running = await started(state, request, asked, key, parse)
        if asked.stream:
            events = streamed_response(running, form, engine.name, asked.stream_options or StreamOptions())
            return StreamingResponse(events, **EVENT_STREAM)
        whole = await unless_disconnected(request, whole_response(running, form, engine.name))
        if asked.wanted_logprobs() is None:
            return JSONResponse(whole)
        return StreamingResponse(encoded_in_pieces(whole), media_type="application/json")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest, key: Key) -> Any:
        calls = state.call_format if asked.may_call_tools else None

        def parse() -> list[ParsedPrompt]:
            beside = strings_in([asked.tools, asked.chat_template_kwargs])
            state.text_limit.check([*texts_of_chat(asked.messages, asked.documents), *beside])
            prompt = chat_prompt(engine, asked, state.settings.chunk_tokens)
            if calls is None or engine.runtime.builder is None:
                return [prompt]
            return [prompt._replace(shown=engine.runtime.builder.special_ids([*calls.markers, *calls.inner]))]

        new_reader = None
        if calls is not None:
            names = {tool["function"]["name"] for tool in asked.tools or ()}
            new_reader = lambda: CallReader(calls, names, only_first=asked.parallel_tool_calls is False)  # noqa: E731
        return await answer(request, asked, key, parse, ChatFormat(state, new_reader))

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest, key: Key) -> Any:
        count, most = len(asked.prompts), max(1, min(MOST_PROMPTS, state.settings.waiting))
        if count > most:
            message = f"prompt has {count:,} prompts; at most {most} are answered in a request: send several"
            raise ApiError(400, message, param="prompt")

        return await answer(request, asked, key, partial(_prompts, state, asked), CompletionFormat(state))

    @app.post("/tokenize")
    async def tokenize(request: Request, asked: TokenizeRequest, key: Key) -> dict[str, Any]:
        check_model(state, asked.model)
        return await state.parse(request, lambda: _tokenize(state, asked))

    @app.post("/detokenize")
    async def detokenize(request: Request, asked: DetokenizeRequest, key: Key) -> dict[str, Any]:
        check_model(state, asked.model)
        return await state.parse(request, lambda: _detokenize(state, asked))


def _prompts(state: ServerState, asked: CompletionRequest) -> list[ParsedPrompt]:
    spans, found = (asked.cacheblend and asked.cacheblend.chunks) or [], list[ParsedPrompt]()
    for number, given in enumerate(asked.prompts):
        what = f"prompt.{number}" if len(asked.prompts) > 1 else "the prompt"
        state.text_limit.check([given] if isinstance(given, str) else [], what)
        found.append(completion_prompt(state.engine, given, spans, what))
    return found


def _tokenize(state: ServerState, asked: TokenizeRequest) -> dict[str, Any]:
    """A chat's ids are those that ``/v1/chat/completions`` computes with."""
    builder, most = state.builder(), state.settings.max_prompt_tokens
    beside = strings_in([asked.prompt, asked.tools, asked.chat_template_kwargs])
    state.text_limit.check([*texts_of_chat(asked.messages or [], asked.documents), *beside], "the text")
    if asked.messages is None:
        ids: list[int] = builder.text_ids(asked.prompt or "", special=asked.add_special_tokens is not False)
    elif asked.add_special_tokens:
        raise ApiError(400, "a chat's special tokens are those of its template", param="add_special_tokens")
    else:
        same = {"messages", "documents", "tools", "tool_choice", "chat_template_kwargs"}
        chat = ChatRequest.model_construct(**{name: getattr(asked, name) for name in same})
        ids = chat_prompt(state.engine, chat, state.settings.chunk_tokens).prompt.token_ids.tolist()
    if most is not None and len(ids) > most:
        raise ApiError(400, f"the text has {len(ids)} tokens; at most {most} are read")
    return {
        "count": len(ids),
        "max_model_len": state.engine.runtime.survey.max_length,
        "tokens": ids,
        "token_strs": state.engine.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None,
    }


def _detokenize(state: ServerState, asked: DetokenizeRequest) -> dict[str, Any]:
    engine, size = state.engine, state.engine.runtime.survey.vocab_size
    state.builder()
    most = state.settings.max_prompt_tokens or engine.runtime.survey.max_length
    if most is not None and len(asked.tokens) > most:
        raise ApiError(400, f"{len(asked.tokens):,} tokens are given; at most {most:,} are read", code="too_long")
    for number, token in enumerate(asked.tokens):
        if not 0 <= token < size:
            raise ApiError(400, f"tokens.{number} is {token}; ids are in 0..{size - 1}", param="tokens")
    return {"prompt": engine.tokenizer.decode(asked.tokens, clean_up_tokenization_spaces=False)}


def encoded_in_pieces(whole: Mapping[str, Any]) -> Iterator[str]:
    """JSON in pieces, each made on a thread when it can be sent. It stands aside in between: the thread that decodes
    would wait for the interpreter's turn of 5 ms in each of a token's operations."""
    parts = json.JSONEncoder(ensure_ascii=False).iterencode(whole)

    def piece() -> str:
        made = list[str]()
        while len(made) < PARTS and (more := [*islice(parts, PARTS_AT_ONCE)]):
            made += more
            time.sleep(ASIDE_S)
        return "".join(made)

    return iter(piece, "")


class LazyList(list[Any]):
    """A list whose items are made while a JSON encoder goes through it, once."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__([...])  # not empty
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


@dataclass(frozen=True)
class ChatFormat:
    """``chat.completion``; for one request."""

    state: ServerState
    new_reader: Callable[[], CallReader] | None = None  # of a choice's tool calls; None: they are not read
    kind: ClassVar = "chatcmpl"  # prefix of ids
    objects: ClassVar = ("chat.completion", "chat.completion.chunk")  # of a whole response, and of a stream's events
    _readers: dict[int, CallReader] = field(default_factory=dict)

    def opening(self, number: int) -> dict[str, Any] | None:
        """A choice in the event before its first token; None: there is no such event."""
        delta = {"role": "assistant", "content": "" if self.new_reader is None else None}  # beside calls there is none
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """A choice in the event of one token; `offset` characters of the choice were sent before."""
        text, reason, calls = event.text, event.finish_reason, []
        if self.new_reader is not None:
            reader = self._readers.get(event.choice) or self._readers.setdefault(event.choice, self.new_reader())
            first = reader.calls
            text, found = reader.read(text, ended=reason is not None)
            calls = [{"index": first + number, **call} for number, call in enumerate(found)]
            reason = reason and reader.finish_reason(reason)
        delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        return {"index": event.choice, "delta": delta, "logprobs": self._logprobs([event]), "finish_reason": reason}

    def choice(self, number: int, events: list[TokenEvent]) -> dict[str, Any]:
        """A choice of a whole response, from all of its events."""
        text, reason = _text_and_reason(events)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.new_reader is not None:
            reader = self.new_reader()
            text, calls = reader.read(text, ended=True)
            message["content"] = text if text or not calls else None
            if calls:
                message["tool_calls"] = calls
            reason = reason and reader.finish_reason(reason)
        logprobs = self._logprobs(events[:1])
        if logprobs is not None:
            found = filter(None, (self._logprobs([event]) for event in events))
            logprobs["content"] = LazyList(token for each in found for token in each["content"])
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: list[TokenEvent]) -> dict[str, Any] | None:
        found = [
            self._token(event.token_id, event.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in _likeliest(event) if event.top]}
            for event in events
            if event.token_id is not None and event.logprob is not None
        ]
        return {"content": found, "refusal": None} if found else None

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        own = self.state.token_bytes(token)
        return {"token": self.state.token_name(token), "logprob": logprob, "bytes": list(own)}


@dataclass(frozen=True)
class CompletionFormat:
    """``text_completion``; as `ChatFormat`."""

    state: ServerState
    kind: ClassVar = "cmpl"
    objects: ClassVar = ("text_completion", "text_completion")

    def opening(self, number: int) -> dict[str, Any] | None:
        return None

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        return self.choice(event.choice, [event], offset)

    def choice(self, number: int, events: list[TokenEvent], offset: int = 0) -> dict[str, Any]:
        text, reason = _text_and_reason(events)
        found = [event for event in events if event.token_id is not None and event.logprob is not None]
        starts = accumulate((len(event.text) for event in events), initial=offset)
        logprobs = {
            "tokens": [self.state.token_name(event.token_id or 0) for event in found],
            "token_logprobs": [event.logprob for event in found],
            "top_logprobs": [
                {self.state.token_name(token): value for token, value in _likeliest(event)} for event in found
            ],
            "text_offset": [at for at, event in zip(starts, events, strict=False) if event.logprob is not None],
        }
        return {"index": number, "text": text, "logprobs": logprobs if found else None, "finish_reason": reason}


AnswerFormat = ChatFormat | CompletionFormat


def _likeliest(event: TokenEvent) -> list[tuple[int, float]]:
    """The likeliest tokens, and the one that was sampled."""
    chosen = event.token_id or 0, event.logprob or 0.0
    return [*event.top, *([] if chosen[0] in dict(event.top) else [chosen])]


def _text_and_reason(events: list[TokenEvent]) -> tuple[str, str | None]:
    reasons = [event.finish_reason for event in events if event.finish_reason]
    return "".join(event.text for event in events), reasons[-1] if reasons else None


async def whole_response(running: RunningRequest, form: AnswerFormat, model: str) -> dict[str, Any]:
    """The response in one piece, as JSON; raises the error that ended the request."""
    choices: list[list[TokenEvent]] = [[] for _ in range(running.choices)]
    async for event in running.events():
        choices[event.choice].append(event)
    generated = sum(event.token_id is not None for events in choices for event in events)
    return {
        **_head(form.kind, form.objects[0], model),
        "choices": await run_in_threadpool(lambda: [form.choice(*each) for each in enumerate(choices)]),
        "usage": usage_of(running, generated),
        "cacheblend": report_of(running),
    }


async def streamed_response(
    running: RunningRequest, form: AnswerFormat, model: str, options: StreamOptions
) -> AsyncIterator[str]:
    """The response, or its error, as server-sent events. The last one has the report. By default that is the last
    token's, so clients may read ``choices[0]`` of each; with `include_usage` one without a choice, as OpenAI has it."""
    head = _head(form.kind, form.objects[1], model)
    generated, lengths, left, last = 0, [0] * running.choices, running.choices, None
    for number in range(running.choices):
        if (opening := form.opening(number)) is not None:
            yield _sse({**head, "choices": [opening]})
    try:
        async for event in running.events():
            generated += event.token_id is not None
            piece = {**head, "choices": [form.piece(event, lengths[event.choice])]}
            if options.include_usage and options.continuous_usage_stats:
                piece["usage"] = usage_of(running, generated)
            lengths[event.choice] += len(event.text)
            left -= event.finish_reason is not None
            if left:
                yield _sse(piece)
            else:  # the last event, which gets the report
                last = piece
    except Exception as error:  # too late for a status: that has been sent
        if last is not None:
            yield _sse(last)
        shown = api_error(error)
        running.failed = shown.status
        yield _sse(shown.body())
        yield DONE
        return
    if options.include_usage:
        if last is not None:
            yield _sse(last)
        last = {**head, "choices": [], "usage": usage_of(running, generated)}
    yield _sse({**(last or head), "cacheblend": report_of(running)})
    yield DONE


def _head(kind: str, object_name: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": object_name, "created": int(time.time()), "model": model}


def usage_of(running: RunningRequest, generated: int) -> dict[str, Any]:
    """OpenAI's usage; tokens count as cached if they were loaded and not recomputed."""
    reports, given = filter(None, running.reports.values()), sum(len(ask.prompt) for ask in running.asks)
    cached = sum(max(0, sum(report.hit_tokens.values()) - report.recomputed_tokens) for report in reports)
    return {
        "prompt_tokens": given,
        "completion_tokens": generated,
        "total_tokens": given + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def report_of(running: RunningRequest) -> Any:
    """The field ``cacheblend`` of a response: how the prompt was prefilled, or each of several."""
    found = [running.reports.get(number) for number in range(len(running.asks))]
    shown = [None if report is None else asdict(report) for report in found]
    return shown[0] if len(shown) == 1 else shown


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
