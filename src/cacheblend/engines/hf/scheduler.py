"""Serves many requests on one engine in one thread, its own or the caller's: batched prefills and batched decoding.

    submit ─> waiting (bounded) ─> prefilling (batched, some row-layers a round) ─> answering (a token a round) ─> done
                   │ cancelled, timed out ─────────────────────────────────────────────────────────────────────> done

A round computes a slice of the prefills and one token of every answer, so that answers continue while prompts are
prefilled. If the engine is never idle, a tenth of the time is spent on capturing missed chunks, and on the shadow check
as large a share of the time as it draws of the requests.
Knows the engine; knows nothing of HTTP.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cacheblend.core.errors import CacheBlendError, InvalidInputError, check_fields, check_type
from cacheblend.core.failures import count_failure
from cacheblend.core.fuse.batching import PrefillBatcher, let_go
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.layers import JoinedRows
from cacheblend.engines.hf.runtime import EngineRuntime
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.tickets import Ask, Choice, DoneEvent, Event, Ticket, TokenEvent, WaitingTickets
from cacheblend.engines.tokens.detokenizer import TextStream


class QueueFullError(CacheBlendError):
    """The queue is full; a place in it is likely to be free after `retry_after_s` seconds."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait, and the queue is full; retry in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class TooLateError(CacheBlendError):
    """A request's deadline passed before its answer was finished."""


class ClosedError(CacheBlendError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Limits:
    """How many requests run and wait at a time. Raises `InvalidInputError` for a value of the wrong type."""

    # answers in prefill or decoding; beside a request for several, which may be for more, there is room for one more
    active: int = 8
    waiting: int = 64  # requests in the queue
    row_layers: int = 8192  # row-layers of prefill computed between two tokens of the running answers
    # seconds that missed chunks wait for the engine to be idle; later, they are captured between rounds
    catch_up_s: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.active < 1:
            raise InvalidInputError(f"active must be at least 1, got {self.active}")


_LEAST_ROWS = 512  # that a layer of fewer rows counts as: short prompts, many at once, would hold up the answers
_LEAST_LOGPROB = -9999.0  # as in OpenAI's API: JSON has no infinity
_CATCH_UP_SHARE = 0.1  # share of the time for missed chunks
logger = logging.getLogger("cacheblend.engine")


class Scheduler:
    """Serves requests until it is closed; close it before the engine, on which nothing is prefilled elsewhere
    meanwhile. `has_thread`: requests are served by a thread of its own; False: by whoever calls `run`, in whose thread
    all other methods are called, too."""

    def __init__(self, runtime: EngineRuntime, limits: Limits | None = None, *, has_thread: bool = True) -> None:
        check_type(runtime, EngineRuntime, "runtime", "the runtime of a BlendEngine, engine.runtime")
        self._runtime, self._limits = runtime, limits or Limits()
        selector = runtime.survey.fit_selector(runtime.config.make_selector())
        last_check = max((*selector.check_layers, runtime.survey.kinds.first_to_drop))
        self._batcher: PrefillBatcher[Ticket] = PrefillBatcher(last_check + 1, runtime.config.tile_rows, JoinedRows)
        self._waiting = WaitingTickets(self._limits.active)
        self._opening: Ticket | None = None  # while it is planned, which may take as long as a slow store's look-up
        self._answering: list[Ticket] = []
        self._view = runtime.view  # of the requests that run: other adapters have another one
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # never entered itself: see `WriteBehind`
        self._closed = self._draining = self._in_round = False
        self._catch_up_at = self._check_at = 0.0
        self._recent_s = 1.0  # running average of a request's duration
        self._thread: threading.Thread | None = None
        if has_thread:
            self._thread = threading.Thread(target=self._work, name="cacheblend-scheduler", daemon=True)
            self._thread.start()

    # ---- from any thread ----------------------------------------------------------------------------------

    def submit(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Queues a request for one prompt; its last event is a `DoneEvent`. Raises as `submit_prompts`."""
        return self.submit_prompts([ask], lambda _, event: on_event(event))[0]

    def submit_prompts(self, asks: Sequence[Ask], on_event: Callable[[int, Event], None]) -> list[Ticket]:
        """Queues all prompts of a tenant's request, or none; each one's last event is a `DoneEvent`. `on_event` is
        called with a prompt's number, too. If the queue is full, waiting requests of a tenant that has more give way.
        Raises `QueueFullError`, `ClosedError`."""
        with self._lock:
            if self._draining:
                raise ClosedError("the server is shutting down")
            each = self._recent_s / self._limits.active
            full = QueueFullError(len(self._waiting), max(1.0, each * len(self._waiting)))
            refused = self._waiting.make_room(asks, self._limits.waiting)
            if refused is None:
                raise full
            tickets = self._waiting.add(asks, on_event)
            self._changed.notify_all()
        for ticket in refused:  # here: the scheduler's thread may be in a long round
            _attempt(partial(ticket.on_event, DoneEvent(None, full)), "a refusal could not be delivered")
        return tickets

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_of(self) -> Counter[str]:
        """The same by `Ask.tenant_label`."""
        with self._lock:
            return Counter(ticket.ask.tenant_label for ticket in self._waiting)

    @property
    def active(self) -> int:
        """Number of requests that are planned, in prefill or in decoding."""
        return len(self._answering) + sum(1 for _ in self._batcher) + (self._opening is not None)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self, timeout: float = 0.0) -> None:
        """Refuses new requests, waits up to `timeout` seconds for accepted ones, and ends the rest with an error."""
        end = time.monotonic() + timeout
        with self._lock:
            self._draining = True
            self._changed.notify_all()
            while self._has_work and time.monotonic() < end:
                self._changed.wait(min(0.1, max(0.0, end - time.monotonic())))
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all(ClosedError("the request was given up: its scheduler was closed"))

    def run(self) -> None:
        """A round in the calling thread, for a scheduler that has none of its own."""
        try:
            self._round()
        except Exception as error:  # in the scheduler itself: no request may wait forever
            logger.exception("the scheduler failed; all its requests end")
            count_failure("scheduler")
            self._end_all(error)

    # ---- the thread -------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._batcher or self._answering or self._in_round)

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    self._in_round = False
                    while not self._has_work and not self._closed:
                        self._changed.notify_all()  # wakes `close`
                        self._changed.wait()
                    if self._closed:
                        return
                    self._in_round = True
                self.run()
        finally:  # also after SystemExit
            with self._lock:
                self._draining = self._closed = True
                self._in_round = False
            self._end_all(ClosedError("the server was shut down"))

    @torch.no_grad()
    def _round(self) -> None:
        for ticket in list(self._all()):
            if ticket.cancelled:
                self._end(ticket, None)
            elif ticket.ask.deadline is not None and time.monotonic() > ticket.ask.deadline:
                self._end(ticket, TooLateError("the request's deadline has passed"))
        self._admit()
        self._prefill()
        self._decode()
        # What a busy engine does beside its requests, in their share of the time: missed chunks that have waited for
        # `catch_up_s`, and a slice of the shadow check.
        background, shadow = self._runtime.background, self._runtime.shadow
        began = time.monotonic()
        if began >= self._catch_up_at and background.catch_up(self._limits.catch_up_s):
            self._catch_up_at = _next_at(began, _CATCH_UP_SHARE)
        began = time.monotonic()
        if shadow is not None and began >= self._check_at and background.advance_idle():
            self._check_at = _next_at(began, shadow.watch.settings.share)

    def _all(self) -> Iterator[Ticket]:
        with self._lock:
            waiting = list(self._waiting)
        opening = () if self._opening is None else (self._opening,)
        yield from (*waiting, *opening, *self._batcher, *self._answering)

    def _admit(self) -> None:
        runtime = self._runtime
        while True:
            running = [*self._batcher, *self._answering]
            with self._lock:
                if self._waiting.next(running) is None:
                    return
            state: ModelState | Exception
            try:
                state = runtime.follow()  # without the lock: who switches adapters may take long
            except Exception as error:
                state = error
            with self._lock:
                if (due := self._waiting.next(running)) is None:
                    return
                if running and isinstance(state, ModelState) and state.survey.view is not self._view:
                    return  # the requests that run end with the adapters that they began with
                ticket = self._opening = self._waiting.take(due)
            ask = ticket.ask
            try:
                runtime.background.begin_request()
                ticket.is_admitted = True
                if isinstance(state, Exception):
                    raise state
                prompt = runtime.known_in(ask.prompt, state, ask.tenant) if ask.mode == "blend" else ask.prompt
                ticket.prefill = runtime.open_prefill(
                    prompt, ratio=ask.ratio, selector=ask.selector, mode=ask.mode, tenant=ask.tenant, state=state
                )
            except Exception as error:
                self._fail([ticket], error)
                continue
            ticket.origin = runtime.origin(state, own=ask.is_own, tenant=ask.tenant_label)
            self._view = state.survey.view
            self._batcher.add(ticket)
            self._opening = None

    def _prefill(self) -> None:
        left = self._limits.row_layers
        if self.active > 1:
            for ticket in self._batcher:
                if ticket.prefill is not None:
                    ticket.prefill.mark_shared()
        while self._batcher and left > 0:
            tickets = self._batcher.next()
            left -= max(_LEAST_ROWS, sum(ticket.active_rows for ticket in tickets))
            with self._view.threads.held():
                advanced = self._batcher.advance(tickets)
            for error in {id(error): error for _, error in advanced if error is not None}.values():
                self._fail([ticket for ticket, failed in advanced if failed is error], error)
            for ticket, failed in advanced:
                if failed is None and ticket.prefill is not None and ticket.prefill.done:
                    try:
                        self._open_choices(ticket, ticket.prefill)
                        self._batcher.remove(ticket)
                        self._answering.append(ticket)
                    except Exception as error:
                        self._fail([ticket], error)
            if any(not ticket.choices[0].decoding.sampler.has_begun for ticket in self._answering):
                return  # a first token can be sampled: do not delay it by other prompts

    def _open_choices(self, ticket: Ticket, prefill: BlendedPrefill) -> None:
        runtime, ask, result = self._runtime, ticket.ask, prefill.result()
        prefill.close()
        ticket.report = result.report
        ticket.prefill = None  # it would hold the prompt's KV a second time
        ticket.report.ttft_s = time.perf_counter() - ticket.submitted
        for number in range(ask.choices):
            seed = None if ask.params.seed is None else ask.params.seed + number
            decoding = runtime.decoding(ask.prompt, replace(ask.params, seed=seed), ask.grammar, result)
            stream = TextStream(runtime.builder.detokenizer(ask.shown) if runtime.builder else None, ask.params.stop)
            ticket.choices.append(Choice(decoding, stream))
        ticket.to_store = result
        if runtime.shadow is not None and ticket.origin is not None:
            ticket.watched = runtime.shadow.begin(result, ticket.origin)

    def _decode(self) -> None:
        # By number: this frame may be in an error's traceback, and no answer's KV is to stay with that.
        going = [(t, n) for t in self._answering for n, choice in enumerate(t.choices) if choice.finish_reason is None]
        if not going:
            return
        try:
            compute_logits(self._view, [ticket.choices[number].decoding for ticket, number in going])
        except Exception as error:  # a layer that failed may have changed any answer's state: none of them goes on
            return self._fail(list(self._answering), error)
        for ticket, number in going:
            if ticket in self._answering:
                try:
                    self._sample(ticket, number)
                except Exception as error:  # affects one request only
                    self._fail([ticket], error)
        for ticket in list(self._answering):
            if all(choice.finish_reason for choice in ticket.choices):
                self._end(ticket, None)

    def _sample(self, ticket: Ticket, number: int) -> None:
        """Samples a choice's next token and sends its event; after the first token, has missed chunks stored."""
        choice, ask = ticket.choices[number], ticket.ask
        sampler, stream = choice.decoding.sampler, choice.stream
        token = sampler.sample()
        if ticket.watched is not None and number == 0:  # of several answers one is compared
            ticket.watched.add(token, sampler.logits)
        text, reason = stream.push(token), "stop" if stream.stopped else sampler.finish_reason
        if reason is not None:
            text += stream.finish()
            choice.finish_reason = reason = "stop" if stream.stopped else reason
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if ask.logprobs is not None:
            whole = sampler.logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
            values, ids = whole.topk(min(ask.logprobs, len(whole)))
            logprob, top = float(whole[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
        ticket.on_event(TokenEvent(number, text, token, logprob, top, reason))
        result, ticket.to_store = ticket.to_store, None
        if result is not None:
            self._runtime.store_missed(result, ask.tenant, text=ask.keep_text, may_keep=ask.may_keep)

    # ---- end of a request -------------------------------------------------------------------------------

    def _fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """Ends requests by an error that was caught here. What it holds is let go of before anybody else has it: who
        raises it again has frames in it, too."""
        _attempt(partial(let_go, error), "what a failed request held could not be freed")
        for ticket in tickets:
            self._end(ticket, error)

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        """Lets go of a request, completes its report, and delivers its last event: each step whatever becomes of those
        before it, also where the caller's thread is interrupted."""
        with contextlib.ExitStack() as ends:  # the last one first
            ends.callback(
                _attempt,
                lambda: ticket.on_event(DoneEvent(ticket.report, error)),
                "a last event could not be delivered",
            )
            if ticket.is_admitted:
                ticket.is_admitted = False
                told = self._runtime.background.end_request
                ends.callback(_attempt, told, "the engine could not be told of a request's end")
            if ticket.watched is not None and self._runtime.shadow is not None:
                watched = partial(self._runtime.shadow.submit, ticket.watched)
                ends.callback(_attempt, watched, "an answer could not be handed to the shadow check")
            if ticket.prefill is not None:
                ends.callback(_attempt, ticket.prefill.close, "a prefill could not be closed")
            ends.callback(_attempt, partial(self._complete, ticket), "a request's report could not be completed")
            ends.callback(_attempt, partial(self._leave, ticket), "a request could not be taken out")
            ticket.prefill = ticket.to_store = ticket.watched = None

    def _leave(self, ticket: Ticket) -> None:
        with self._lock:
            self._waiting.discard(ticket)
        if self._opening is ticket:
            self._opening = None
        if ticket in self._answering:
            self._answering.remove(ticket)
        self._batcher.remove(ticket)

    def _complete(self, ticket: Ticket) -> None:
        choices, ticket.choices = ticket.choices, []
        took = time.perf_counter() - ticket.submitted
        self._recent_s += 0.1 * (took - self._recent_s)
        if ticket.report is not None:
            ticket.report.total_s = took
            ticket.report.generated_tokens = sum(each.decoding.sampler.count for each in choices)

    def _end_all(self, error: Exception) -> None:
        for ticket in list(self._all()):
            self._end(ticket, error)


def _attempt(step: Callable[[], None], failed: str) -> None:
    """A step of a request's end; its failure is this request's own, and what was computed is still delivered."""
    try:
        step()
    except Exception:
        logger.exception(failed)
        count_failure("scheduler")


def _next_at(began: float, share: float) -> float:
    """When work that began then, and has ended now, may go on, so as to take this share of the time."""
    ended = time.monotonic()
    return ended + (ended - began) * (1 / share - 1)
