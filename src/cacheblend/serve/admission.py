"""From a request that its schema has checked to one that runs: the model, the prompt, sampling parameters.

What every kind of answer shares; how it is written is in `responses` and `routes.responses`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fastapi import Request

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.grammars import CompiledGrammar
from cacheblend.engines.hf.tickets import Ask
from cacheblend.serve.errors import ApiError
from cacheblend.serve.forms import grammar_of
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.prompts import ParsedPrompt
from cacheblend.serve.running_requests import RunningRequest
from cacheblend.serve.schemas import Extras, Sampling
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import tenant_of

T = TypeVar("T")


async def started(
    state: ServerState, request: Request, asked: Sampling, key: ApiKey, parse: Callable[[], ParsedPrompt]
) -> RunningRequest:
    """The request, queued.

    Args:
        state: of the server.
        request: noted in it, for the log.
        asked: what it says.
        key: its key.
        parse: makes its prompt; called on a worker thread.

    Raises:
        ApiError: a wrong model or value.
        QueueFullError, TooLateError, ClosedError: see `ServerState.parse` and `Scheduler.submit`.
    """
    check_model(state, asked.model)
    form = await _form(state, request, asked)
    ask = await state.parse(request, lambda: _scheduler_request(state, asked, key, parse, form))
    running = RunningRequest(ask, state.scheduler, state.metrics)
    request.state.running = running
    running.start()
    return running


def check_model(state: ServerState, name: str) -> None:
    """Raises `ApiError` if a request names another model than the server's."""
    if name and name != state.engine.name:
        message = f"there is no model {name!r}; this server has {state.engine.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
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


def _scheduler_request(
    state: ServerState,
    asked: Sampling,
    key: ApiKey,
    parse: Callable[[], ParsedPrompt],
    grammar: CompiledGrammar | None,
) -> Ask:
    """What the scheduler runs; tokenises the prompt, so it is called on a worker thread."""
    settings, extras = state.settings, asked.cacheblend or Extras()
    if asked.n > settings.max_choices:
        raise ApiError(400, f"n is {asked.n}; at most {settings.max_choices} choices are allowed", param="n")
    _check_token_ids(state, asked)
    salt = _salt(asked, extras)
    prompt, keep_text, shown = parse()
    state.check_size(prompt)
    remembered = state.tenants.remember_salt(key, salt)
    state.tenants.count(key)
    ratio, name = extras.recompute_ratio, extras.selector
    named = None if name is None else state.engine.settings.selector(ratio, name)
    return Ask(
        prompt,
        _sampling_params(state, asked, prompt, grammar),
        grammar=grammar,
        choices=asked.n,
        mode=extras.mode,
        ratio=ratio if named is None else None,
        selector=named,
        deadline=time.monotonic() + settings.timeout_s,
        logprobs=asked.wanted_logprobs(),
        tenant=tenant_of(key, salt),
        tenant_label=key.label,
        may_keep=lambda tokens: remembered and state.tenants.reserve(key, tokens),
        shown=shown,
        keep_text=keep_text and settings.store_bytes is None,  # text belongs to no chunk, so no quota would count it
    )


async def _form(state: ServerState, request: Request, asked: Sampling) -> CompiledGrammar | None:
    """The form of the answer, compiled, before anything is computed; None: any text.

    Raises:
        ApiError: it is wrong, nothing satisfies it, or it contradicts other fields.
        QueueFullError, TooLateError: see `ServerState.compile`.
    """
    said = {name: getattr(asked, name, None) for name in ("response_format", "text", "structured_outputs")}
    if all(form is None for form in said.values()):
        return None
    grammars = state.engine.grammars
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


def _bad_words(state: ServerState, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, as it begins a text and as it stands behind a space.

    Raises:
        ApiError: token ids are all that this server knows.
    """
    builder = state.engine.builder
    if words and builder is None:
        raise ApiError(400, "bad_words are text, and this server has no tokenizer", param="bad_words")
    found = [builder.encode(front + word) for word in words for front in ("", " ")] if builder is not None else []
    return tuple(dict.fromkeys(tuple(int(token) for token in ids) for ids in found))


def _check_token_ids(state: ServerState, asked: Sampling) -> None:
    for name, ids in (("logit_bias", asked.logit_bias or ()), ("stop_token_ids", asked.stop_token_ids or ())):
        for token in ids:
            if not 0 <= token < state.engine.survey.vocab_size:
                raise ApiError(
                    400, f"{name} has token {token}; ids are in 0..{state.engine.survey.vocab_size - 1}", param=name
                )


def _salt(asked: Sampling, extras: Extras) -> str:
    """Of the request, by either name."""
    if asked.cache_salt and extras.salt and asked.cache_salt != extras.salt:
        raise ApiError(400, "cache_salt and cacheblend.salt are two names of one thing, and differ", param="cache_salt")
    return extras.salt or asked.cache_salt or ""


def _sampling_params(
    state: ServerState, asked: Sampling, prompt: Prompt, grammar: CompiledGrammar | None
) -> SamplingParams:
    wanted = asked.wanted_tokens or state.settings.max_tokens
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return SamplingParams(
        max_new_tokens=wanted,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(0, asked.top_k or 0),
        min_p=asked.min_p or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logit_bias=tuple((asked.logit_bias or {}).items()),
        bad_words=_bad_words(state, asked.bad_words or []),
        seed=asked.seed,
        stop=stop,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=asked.ignore_eos,
        min_new_tokens=asked.min_tokens or 0,
        grammar=None if grammar is None else grammar.grammar,
    ).within(state.engine.survey.max_length, len(prompt))
