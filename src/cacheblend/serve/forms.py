"""OpenAI's forms of an answer: whole, and as a stream; of chats and of completions."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cacheblend.engines.hf.tickets import TokenEvent
from cacheblend.serve.answers import DONE, Answering, new_id, sse, told, usage
from cacheblend.serve.errors import log_internal

TokenText = Callable[[int], str]


@dataclass
class Choice:
    """One choice as it came together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: TokenEvent) -> None:
        """The next one."""
        self.text += event.text
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        self.events.append(event)
        self.finish_reason = event.finish_reason or self.finish_reason


class Form(Protocol):
    """A kind of answer."""

    @property
    def kind(self) -> str:
        """Of ids: ``chatcmpl`` or ``cmpl``."""
        ...

    @property
    def objects(self) -> tuple[str, str]:
        """The field ``object`` of a whole answer, and of a stream's events."""
        ...

    def opening(self, number: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token."""
        ...

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """A choice in a stream's event, behind so many characters of it."""
        ...

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        """A choice of a whole answer."""
        ...


@dataclass(frozen=True)
class ChatForm:
    """``chat.completion``.

    Attributes:
        token_text: of a token, for log-probabilities.
    """

    token_text: TokenText
    kind: str = "chatcmpl"
    objects: tuple[str, str] = ("chat.completion", "chat.completion.chunk")

    def opening(self, number: int) -> dict[str, Any] | None:
        """See `Form`."""
        return {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """See `Form`."""
        delta = {"content": event.text} if event.text else {}
        logprobs = self._logprobs([event])
        return {"index": event.choice, "delta": delta, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        """See `Form`."""
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
class CompletionForm:
    """``text_completion``; `token_text`: see `ChatForm`."""

    token_text: TokenText
    kind: str = "cmpl"
    objects: tuple[str, str] = ("text_completion", "text_completion")

    def opening(self, number: int) -> dict[str, Any] | None:
        """See `Form`."""
        return None

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """See `Form`."""
        logprobs = self._logprobs([event], offset)
        return {"index": event.choice, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        """See `Form`."""
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


async def whole(answering: Answering, form: Form, model: str) -> dict[str, Any]:
    """The answer at once.

    Raises:
        Exception: what ended it early.
    """
    choices = [Choice() for _ in range(answering.ask.choices)]
    async for event in answering.events():
        choices[event.choice].add(event)
    return {
        **_head(form, form.objects[0], model, new_id(form.kind)),
        "choices": [form.choice(number, choice) for number, choice in enumerate(choices)],
        "usage": usage(answering.ask, answering.report, sum(len(choice.token_ids) for choice in choices)),
        "cacheblend": told(answering.report),
    }


async def stream(answering: Answering, form: Form, model: str, *, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. The last one carries the report: that of the last token, so that clients which read
    ``choices[0]`` of every event can, or with `with_usage`, as OpenAI has it, one without a choice."""
    head = _head(form, form.objects[1], model, new_id(form.kind))
    generated, lengths, last = 0, [0] * answering.ask.choices, None
    for number in range(answering.ask.choices):
        opening = form.opening(number)
        if opening is not None:
            yield sse({**head, "choices": [opening]})
    try:
        async for event in answering.events():
            if last is not None:
                yield sse(last)
            generated += event.token_id is not None
            piece, last = {**head, "choices": [form.piece(event, lengths[event.choice])]}, None
            lengths[event.choice] += len(event.text)
            if event.finish_reason is None:
                yield sse(piece)
            else:  # it may be the very last
                last = piece
    except Exception as error:  # the status was sent long ago
        yield sse(log_internal(error).body())
        yield DONE
        return
    report = {"cacheblend": told(answering.report)}
    if with_usage:
        if last is not None:
            yield sse(last)
        last = {**head, "choices": [], "usage": usage(answering.ask, answering.report, generated)}
    yield sse({**(last or head), **report})
    yield DONE


def _head(form: Form, kind: str, model: str, name: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
