"""OpenAI's response formats, whole and streamed, of chats and of completions."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.tickets import Ask, TokenEvent
from cacheblend.serve.errors import log_internal
from cacheblend.serve.running_requests import RunningRequest

DONE = "data: [DONE]\n\n"
TokenText = Callable[[int], str]


@dataclass
class ResponseChoice:
    """One choice, put together from its events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: TokenEvent) -> None:
        """Appends the next token."""
        self.text += event.text
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        self.events.append(event)
        self.finish_reason = event.finish_reason or self.finish_reason


class AnswerFormat(Protocol):
    """A kind of response."""

    @property
    def kind(self) -> str:
        """Prefix of ids: ``chatcmpl`` or ``cmpl``."""
        ...

    @property
    def objects(self) -> tuple[str, str]:
        """The field ``object`` of a whole response, and of a stream's events."""
        ...

    def opening(self, number: int) -> dict[str, Any] | None:
        """A choice in the event before its first token; None: there is no such event."""
        ...

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """A choice in the event of one token; `offset` characters of the choice were sent before."""
        ...

    def choice(self, number: int, choice: ResponseChoice) -> dict[str, Any]:
        """A choice of a whole response."""
        ...


@dataclass(frozen=True)
class ChatFormat:
    """``chat.completion``; the methods are those of `AnswerFormat`.

    Attributes:
        token_text: the text of a token, for log-probabilities.
    """

    token_text: TokenText
    kind: str = "chatcmpl"
    objects: tuple[str, str] = ("chat.completion", "chat.completion.chunk")

    def opening(self, number: int) -> dict[str, Any] | None:
        """See `AnswerFormat`."""
        return {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """See `AnswerFormat`."""
        delta = {"content": event.text} if event.text else {}
        logprobs = self._logprobs([event])
        return {"index": event.choice, "delta": delta, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def choice(self, number: int, choice: ResponseChoice) -> dict[str, Any]:
        """See `AnswerFormat`."""
        message = {"role": "assistant", "content": choice.text}
        logprobs = self._logprobs(choice.events)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _logprobs(self, events: list[TokenEvent]) -> dict[str, Any] | None:
        found = [
            self._token(event.token_id, event.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in event.top]}
            for event in events
            if event.token_id is not None and event.logprob is not None
        ]
        return {"content": found, "refusal": None} if found else None

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@dataclass(frozen=True)
class CompletionFormat:
    """``text_completion``; `token_text`: see `ChatFormat`."""

    token_text: TokenText
    kind: str = "cmpl"
    objects: tuple[str, str] = ("text_completion", "text_completion")

    def opening(self, number: int) -> dict[str, Any] | None:
        """See `AnswerFormat`."""
        return None

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """See `AnswerFormat`."""
        logprobs = self._logprobs([event], offset)
        return {"index": event.choice, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def choice(self, number: int, choice: ResponseChoice) -> dict[str, Any]:
        """See `AnswerFormat`."""
        logprobs = self._logprobs(choice.events, 0)
        return {"index": number, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _logprobs(self, events: list[TokenEvent], offset: int) -> dict[str, Any] | None:
        found = [event for event in events if event.token_id is not None and event.logprob is not None]
        if not found:
            return None
        tokens = [self.token_text(event.token_id or 0) for event in found]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [event.logprob for event in found],
            "top_logprobs": [{self.token_text(token): value for token, value in event.top} for event in found],
            "text_offset": offsets,
        }


async def whole_response(running: RunningRequest, form: AnswerFormat, model: str) -> dict[str, Any]:
    """The response in one piece, as JSON.

    Raises:
        Exception: the error that ended the request.
    """
    choices = [ResponseChoice() for _ in range(running.ask.choices)]
    async for event in running.events():
        choices[event.choice].add(event)
    return {
        **_head(form.kind, form.objects[0], model),
        "choices": [form.choice(number, choice) for number, choice in enumerate(choices)],
        "usage": usage_of(running.ask, running.report, sum(len(choice.token_ids) for choice in choices)),
        "cacheblend": report_of(running.report),
    }


async def streamed_response(
    running: RunningRequest, form: AnswerFormat, model: str, *, with_usage: bool, in_each: bool = False
) -> AsyncIterator[str]:
    """The response as server-sent events; an error becomes an event, too.

    The last event carries the report. By default that is the event of the last token, so that clients may read
    ``choices[0]`` of every event; with `with_usage` it is one without a choice, as OpenAI specifies. With
    `in_each` every event has the usage so far.
    """
    head = _head(form.kind, form.objects[1], model)
    generated, lengths, last = 0, [0] * running.ask.choices, None
    for number in range(running.ask.choices):
        opening = form.opening(number)
        if opening is not None:
            yield _sse({**head, "choices": [opening]})
    try:
        async for event in running.events():
            if last is not None:
                yield _sse(last)
            generated += event.token_id is not None
            piece, last = {**head, "choices": [form.piece(event, lengths[event.choice])]}, None
            if in_each:
                piece["usage"] = usage_of(running.ask, running.report, generated)
            lengths[event.choice] += len(event.text)
            if event.finish_reason is None:
                yield _sse(piece)
            else:  # may be the last event, which gets the report
                last = piece
    except Exception as error:  # too late for a status: that has been sent
        yield _sse(log_internal(error).body())
        yield DONE
        return
    if with_usage:
        if last is not None:
            yield _sse(last)
        last = {**head, "choices": [], "usage": usage_of(running.ask, running.report, generated)}
    yield _sse({**(last or head), "cacheblend": report_of(running.report)})
    yield DONE


def _head(kind: str, object_name: str, model: str) -> dict[str, Any]:
    """The fields that a whole response and every event of a stream begin with."""
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": object_name, "created": int(time.time()), "model": model}


def usage_of(ask: Ask, report: BlendReport | None, generated: int) -> dict[str, Any]:
    """OpenAI's usage; tokens count as cached if they were loaded and not recomputed."""
    cached = 0 if report is None else max(0, sum(report.hit_tokens.values()) - report.recomputed_tokens)
    return {
        "prompt_tokens": len(ask.prompt),
        "completion_tokens": generated,
        "total_tokens": len(ask.prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def report_of(report: BlendReport | None) -> dict[str, Any] | None:
    """The field ``cacheblend`` of a response: how the request was prefilled."""
    return None if report is None else asdict(report)


def _sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
