"""Many requests on one engine: prefills side by side, answers decoded together, in one thread.

    submit ─> waiting (bounded) ─> prefilling (batched, some row-layers a round) ─> answering (a token a round) ─> done
                   │ cancelled, too late ──────────────────────────────────────────────────────────────────────> done

A round computes a slice of the prefills and one token of every answer, so that answers go on while prompts are read.
Where there is no moment without requests, a tenth of the time goes to missed chunks.
Knows the engine; knows nothing of HTTP.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from cacheblend.core.fuse.batching import PrefillBatcher
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.engines.hf.decode import Decoding, compute_logits
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.hf.layers import JoinedRows
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.engines.hf.text_stream import TextStream
from cacheblend.engines.hf.tickets import (
    Ask,
    Choice,
    ClosedError,
    DoneEvent,
    Event,
    Limits,
    QueueFullError,
    Ticket,
    TokenEvent,
    TooLateError,
)

_LEAST_LOGPROB = -9999.0  # as OpenAI has it: JSON knows no infinity
_CATCH_UP_SHARE = 0.1  # of the time, for missed chunks
logger = logging.getLogger("cacheblend.engine")


class Scheduler:
    """Works requests off until it is closed; close it before the engine.

    Args:
        engine: nobody else should prefill on it meanwhile.
        limits: what is under way at once.
    """

    def __init__(self, engine: BlendEngine, limits: Limits | None = None) -> None:
        self._engine, self._limits = engine, limits or Limits()
        last_check = max(engine.config.make_selector().check_layers, default=0)
        self._batcher: PrefillBatcher[Ticket] = PrefillBatcher(last_check + 1, engine.config.tile_rows, JoinedRows)
        self._waiting: deque[Ticket] = deque()
        self._answering: list[Ticket] = []
        self._changed = threading.Condition()
        self._closed = self._draining = self._in_round = False
        self._catch_up_at = 0.0
        self._recent_s = 1.0  # that a request took, a running average
        self._thread = threading.Thread(target=self._work, name="cacheblend-scheduler", daemon=True)
        self._thread.start()

    # ---- from any thread ----------------------------------------------------------------------------------

    def submit(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Queues a request; its events end with a `DoneEvent`.

        Raises:
            QueueFullError: as many wait as may.
            ClosedError: the scheduler is being closed.
        """
        with self._changed:
            if self._draining:
                raise ClosedError("the server is shutting down")
            if len(self._waiting) >= self._limits.waiting:
                each = self._recent_s / self._limits.active
                raise QueueFullError(len(self._waiting), max(1.0, each * len(self._waiting)))
            ticket = Ticket(ask, on_event, time.perf_counter())
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Requests that are prefilled or answered."""
        return len(self._answering) + sum(1 for _ in self._batcher)

    @property
    def is_alive(self) -> bool:
        """Somebody works requests off."""
        return self._thread.is_alive()

    def close(self, timeout: float = 0.0) -> None:
        """Takes no more requests, waits for those it has, and gives up what is not done in time."""
        end = time.monotonic() + timeout
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            while self._has_work and time.monotonic() < end:
                self._changed.wait(min(0.1, max(0.0, end - time.monotonic())))
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # ---- the thread -------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._batcher or self._answering or self._in_round)

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._round()
                except Exception as error:  # of the scheduler itself: no request may wait for ever
                    logger.exception("the scheduler failed; its requests end")
                    self._give_up_all(error)
        finally:  # however it ends
            with self._changed:
                self._draining = self._closed = True
                self._in_round = False
            self._give_up_all(ClosedError("the server was shut down"))

    def _wait_for_work(self) -> bool:
        """Until there is some; False once the scheduler is closed."""
        with self._changed:
            self._in_round = False
            while not self._has_work and not self._closed:
                self._changed.notify_all()  # for who drains
                self._changed.wait()
            self._in_round = not self._closed
            return self._in_round

    @torch.no_grad()
    def _round(self) -> None:
        for ticket in list(self._all()):
            if ticket.cancelled:
                self._end(ticket, None)
            elif ticket.ask.deadline is not None and time.monotonic() > ticket.ask.deadline:
                self._end(ticket, TooLateError("the request's time was over"))
        self._admit()
        self._prefill()
        self._decode()
        self._catch_up()

    def _all(self) -> Iterator[Ticket]:
        with self._changed:
            waiting = list(self._waiting)
        yield from (*waiting, *self._batcher, *self._answering)

    def _admit(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or not self._has_room(self._waiting[0].ask.choices):
                    return
                ticket = self._waiting.popleft()
            ask = ticket.ask
            self._engine.background.begin_request()
            try:
                ticket.prefill = self._engine.open_prefill(
                    ask.prompt, ratio=ask.ratio, selector=ask.selector, mode=ask.mode, tenant=ask.tenant
                )
            except Exception as error:
                self._end(ticket, error)
                continue
            self._batcher.add(ticket)

    def _has_room(self, choices: int) -> bool:
        """Each choice has KV of its own."""
        under_way: int = sum(ticket.ask.choices for ticket in (*self._batcher, *self._answering))
        return under_way == 0 or under_way + choices <= self._limits.active

    def _prefill(self) -> None:
        """A slice of the layers of the prompts at hand, or less where one is ready."""
        left = self._limits.row_layers
        if self.active > 1:
            for ticket in self._batcher:
                if ticket.prefill is not None:
                    ticket.prefill.mark_shared()
        while self._batcher and left > 0:
            tickets = self._batcher.next()
            left -= max(1, sum(ticket.active_rows for ticket in tickets))
            for ticket, error in self._batcher.advance(tickets):
                if error is not None:
                    self._end(ticket, error)
                elif ticket.prefill is not None and ticket.prefill.done:
                    self._begin_answer(ticket, ticket.prefill)
            if any(not ticket.choices[0].decoding.sampler.has_begun for ticket in self._answering):
                return  # a first token is ready: it does not wait for other prompts

    def _begin_answer(self, ticket: Ticket, prefill: BlendedPrefill) -> None:
        try:
            self._open_choices(ticket, prefill)
        except Exception as error:
            self._end(ticket, error)
            return
        self._batcher.remove(ticket)
        self._answering.append(ticket)

    def _open_choices(self, ticket: Ticket, prefill: BlendedPrefill) -> None:
        engine, ask = self._engine, ticket.ask
        result = prefill.result()
        prefill.close()
        ticket.report = result.report
        ticket.prefill = None  # it would keep the prompt's KV a second time
        ticket.report.ttft_s = time.perf_counter() - ticket.submitted
        ids, decode = engine.ids_of(ask.prompt), engine.builder.decode if engine.builder else _no_text
        for number in range(ask.choices):
            seed = None if ask.params.seed is None else ask.params.seed + number
            sampler = Sampler(ids, result.logits, replace(ask.params, seed=seed), engine.eos_ids)
            stream = TextStream(decode, ask.params.stop)
            ticket.choices.append(Choice(Decoding(sampler, list(result.kv)), stream))
        ticket.to_store = result

    def _decode(self) -> None:
        """A token of every answer."""
        going = [(t, n, c) for t in self._answering for n, c in enumerate(t.choices) if c.finish_reason is None]
        if not going:
            return
        compute_logits(self._engine.view, [choice.decoding for _, _, choice in going])
        for ticket, number, choice in going:
            if ticket in self._answering:
                try:
                    self._draw(ticket, number, choice)
                except Exception as error:  # of one request: the others go on
                    self._end(ticket, error)
        for ticket in list(self._answering):
            if all(choice.finish_reason for choice in ticket.choices):
                self._end(ticket, None)

    def _draw(self, ticket: Ticket, number: int, choice: Choice) -> None:
        """A choice's next token; behind a request's first one, what is stored of its prompt is taken."""
        self._tell(ticket, number, choice, choice.decoding.sampler.sample())
        result, ticket.to_store = ticket.to_store, None
        if result is not None and ticket.ask.may_keep(sum(map(len, result.plan.missed_chunks()))):
            self._engine.store_missed(result, ticket.ask.tenant, text=ticket.ask.keep_text)

    def _catch_up(self) -> None:
        """A missed chunk, where requests never end."""
        began = time.monotonic()
        if began >= self._catch_up_at and self._engine.background.catch_up(self._limits.catch_up_s):
            ended = time.monotonic()
            self._catch_up_at = ended + (ended - began) * (1 / _CATCH_UP_SHARE - 1)

    def _tell(self, ticket: Ticket, number: int, choice: Choice, token: int) -> None:
        sampler = choice.decoding.sampler
        text = choice.stream.push(token)
        reason = "stop" if choice.stream.stopped else sampler.finish_reason
        if reason is not None:
            text += choice.stream.finish()
            choice.finish_reason = reason
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if ticket.ask.logprobs is not None:
            logprob, top = _log_probabilities(sampler.logits, token, ticket.ask.logprobs)
        ticket.on_event(TokenEvent(number, text, token, logprob, top, reason))

    # ---- endings ----------------------------------------------------------------------------------------

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                was_admitted = False
            else:
                was_admitted = True
        self._batcher.remove(ticket)
        if ticket in self._answering:
            self._answering.remove(ticket)
        took = time.perf_counter() - ticket.submitted
        self._recent_s += 0.1 * (took - self._recent_s)
        if ticket.report is not None:
            ticket.report.total_s = took
            ticket.report.generated_tokens = sum(each.decoding.sampler.count for each in ticket.choices)
        prefill, ticket.prefill, ticket.choices, ticket.to_store = ticket.prefill, None, [], None
        try:
            if prefill is not None:
                prefill.close()
        except Exception:
            logger.exception("a prefill could not be closed")
        if was_admitted:
            self._engine.background.end_request()
        try:
            ticket.on_event(DoneEvent(ticket.report, error))
        except Exception:
            logger.exception("a request's end could not be told")

    def _give_up_all(self, error: Exception) -> None:
        for ticket in list(self._all()):
            self._end(ticket, error)


def _log_probabilities(logits: torch.Tensor, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    whole = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
    values, ids = whole.topk(min(count, len(whole)))
    return float(whole[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _no_text(ids: Sequence[int]) -> str:
    return ""
