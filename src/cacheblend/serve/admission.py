"""From a request that its schema has checked to one that runs: the model, the form, the prompt, sampling parameters.

What every kind of answer shares; how it is written is in `routes.openai` and `routes.responses`.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from fastapi import Request

from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.grammar import CompiledGrammar
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, Ticket, TokenEvent
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.metrics import Metrics
from cacheblend.serve.prompts import ParsedPrompt
from cacheblend.serve.schemas import Extras, Sampling, grammar_of
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import tenant_of

T = TypeVar("T")


@dataclass
class RunningRequest:
    """A request while the scheduler runs it: its events on the server's own loop, and its figures for the metrics. Each
    of several prompts is an `Ask` of its own, whose choices are numbered behind those of the prompt before it."""

    asks: Sequence[Ask]
    scheduler: Scheduler
    metrics: Metrics
    is_allowed: Callable[[], object]  # what is none ends it: its key was removed
    reports: dict[int, BlendReport | None] = field(default_factory=dict)  # how each prompt was prefilled, once it ended
    failed: int | None = None  # the status of an error that came too late to be answered with it
    _last_token_at: dict[int, float] = field(default_factory=dict)  # by choice
    _inbox: "asyncio.Queue[tuple[int, Event]]" = field(default_factory=asyncio.Queue)
    _tickets: list[Ticket] = field(default_factory=list)

    @property
    def choices(self) -> int:
        return sum(ask.choices for ask in self.asks)

    def start(self) -> None:
        """Queues all prompts of the request, or none; on the server's loop. Raises as `Scheduler.submit_prompts`."""
        loop = asyncio.get_running_loop()

        def take(number: int, event: Event) -> None:
            self._inbox.put_nowait((number, event))
            if isinstance(event, DoneEvent) and event.report is not None:  # here: who asked may have hung up
                self.metrics.report(event.report, self.asks[0].mode)

        def on_event(number: int, event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(take, number, event)

        self._tickets += self.scheduler.submit_prompts(self.asks, on_event)

    def cancel(self) -> None:
        for ticket in self._tickets:  # one that has ended takes no notice
            ticket.cancel()

    async def events(self) -> AsyncIterator[TokenEvent]:
        """The tokens of a started request as they come; raises the error that ended it. Leaving early cancels it."""
        try:
            while len(self.reports) < len(self.asks):
                number, event = await self._inbox.get()
                if isinstance(event, DoneEvent):
                    self.reports[number] = event.report
                    if event.error is not None:
                        raise event.error
                    continue
                if not self.is_allowed():
                    raise ApiError(401, "the key of this request was removed", code="invalid_api_key")
                event = replace(event, choice=event.choice + number * self.asks[0].choices) if number else event
                now, before = time.perf_counter(), self._last_token_at.get(event.choice)
                if before is not None:
                    self.metrics.gap(now - before)
                self._last_token_at[event.choice] = now
                yield event
        finally:
            self.cancel()


async def started(
    state: ServerState, request: Request, asked: Sampling, key: ApiKey, parse: Callable[[], list[ParsedPrompt]]
) -> RunningRequest:
    """The request, queued, and noted in `request` for the log; `parse`, which makes its prompts, runs on a thread.
    Raises `ApiError` for a wrong model or value, and as `FairQueue.run` and `Scheduler.submit_prompts`."""
    check_model(state, asked.model)
    form = await _form(state, request, asked)
    asks = await state.parse(request, lambda: _asks(state, asked, key, parse(), form))
    has_key = partial(state.settings.keys.find, request.headers.get("authorization"))
    running = RunningRequest(asks, state.scheduler, state.metrics, has_key)
    request.state.running = running
    running.start()
    return running


def check_model(state: ServerState, name: str) -> None:
    """Raises `ApiError` if a request names another model than the server's."""
    if name and name != state.engine.name:
        message = f"there is no model {name[:80]!r}; this server has {state.engine.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
    """The answer; cancelled when the client disconnects, with `ApiError`."""
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


def _asks(
    state: ServerState, asked: Sampling, key: ApiKey, parsed: list[ParsedPrompt], grammar: CompiledGrammar | None
) -> list[Ask]:
    """What is asked of the scheduler, one `Ask` a prompt."""
    settings, extras, vocabulary = state.settings, asked.cacheblend or Extras(), state.engine.runtime.survey.vocab_size
    if asked.n > settings.max_choices:
        raise ApiError(400, f"n is {asked.n}; at most {settings.max_choices} choices are allowed", param="n")
    for name, ids in (("logit_bias", asked.logit_bias or ()), ("stop_token_ids", asked.stop_token_ids or ())):
        for token in ids:
            if not 0 <= token < vocabulary:
                raise ApiError(400, f"{name} has token {token}; ids are in 0..{vocabulary - 1}", param=name)
    if asked.cache_salt and extras.salt and asked.cache_salt != extras.salt:
        raise ApiError(400, "cache_salt and cacheblend.salt are two names of one thing, and differ", param="cache_salt")
    salt = extras.salt or asked.cache_salt or ""
    context = state.engine.runtime.survey.max_length or math.inf
    most = asked.wanted_tokens or int(min(settings.max_tokens, asked.usual_tokens))
    for prompt, _, _ in parsed:
        state.check_size(prompt)
        left = context - len(prompt) + 1  # the last token is not computed with
        for name in (*asked.lengths, "min_tokens"):
            if 0 < left < (value := getattr(asked, name) or 0):  # that none is left is the engine's to say
                message = f"{name} is {value:,}; the prompt's {len(prompt):,} tokens leave {left:,} of {context:,}"
                raise ApiError(400, f"{message}; ask for fewer", param=name, code="too_long")
    if (asked.min_tokens or 0) > most:
        message = f"min_tokens is {asked.min_tokens:,}, and an answer has at most {most:,} ({asked.lengths[-1]})"
        raise ApiError(400, f"{message}; ask for fewer, or allow more", param="min_tokens")
    remembered = state.tenants.remember_salt(key, salt)
    with contextlib.suppress(StoreError):  # an answer needs no store; nothing of it is stored
        state.tenants.count(key)
    ratio, selector = extras.recompute_ratio, None
    if extras.selector is not None:
        selector, ratio = state.engine.runtime.settings.selector(ratio, extras.selector), None
    words, builder = asked.bad_words or (), state.engine.runtime.builder
    if words and builder is None:
        raise ApiError(400, "bad_words are text, and this server has no tokenizer", param="bad_words")
    # As it begins a text, and as it stands behind a space.
    bad = [builder.encode(front + word) for word in words for front in ("", " ")] if builder is not None else []
    same = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: value for name in same if (value := getattr(asked, name)) is not None}
    params = SamplingParams(
        **given,
        max_new_tokens=most,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=max(0, asked.top_k or 0),
        logit_bias=tuple((asked.logit_bias or {}).items()),
        bad_words=tuple(dict.fromkeys(tuple(int(token) for token in ids) for ids in bad)),
        seed=asked.seed,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=asked.ignore_eos,
        min_new_tokens=asked.min_tokens or 0,
        grammar=None if grammar is None else grammar.grammar,
    )
    ask = Ask(
        parsed[0].prompt,
        params,
        grammar=grammar,
        choices=asked.n,
        mode=extras.mode,
        ratio=ratio,
        selector=selector,
        deadline=time.monotonic() + settings.timeout_s,
        logprobs=asked.wanted_logprobs(),
        tenant=tenant_of(key, salt),
        tenant_label=key.label,
        may_keep=lambda tokens: remembered and state.tenants.reserve(key, tokens),
        shown=parsed[0].shown,
    )
    may_keep_text = settings.store_bytes is None  # text belongs to no chunk, so no quota would count it
    keeps_all = state.engine.runtime.histories is not None
    return [
        replace(
            ask,
            prompt=replace(each.prompt, conversation=extras.conversation),
            keep_text=may_keep_text and (each.keep_text or keeps_all),
        )
        for each in parsed
    ]


async def _form(state: ServerState, request: Request, asked: Sampling) -> CompiledGrammar | None:
    """The form of the answer, compiled, before anything is computed; None: any text."""
    said = {name: getattr(asked, name, None) for name in ("response_format", "text", "structured_outputs")}
    if all(form is None for form in said.values()):
        return None
    grammars = state.engine.runtime.grammars
    grammar, field = await state.parse(request, lambda: grammar_of(**said))
    if grammar is None:
        return None
    if asked.ignore_eos or asked.min_tokens:
        name = "ignore_eos" if asked.ignore_eos else "min_tokens"
        message = f"{name} cannot hold beside {field}: once the form is complete, only EOS is allowed"
        raise ApiError(400, message, param=name)
    if state.call_format is not None and asked.may_call_tools:
        message = f"an answer that {field} gives its form calls no tool; send one of the two, or tool_choice none"
        raise ApiError(400, message, param="tools")
    try:
        return grammars.find(grammar) or await state.compile(request, lambda: grammars.compile(grammar))
    except InvalidInputError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
