"""What is asked of the scheduler, what it answers, and who of those that wait is admitted next."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from cacheblend.core.fuse.prefill import PrefillJob, PrefillResult
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.grammar import CompiledGrammar
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.hf.shadow_check import Origin, WatchedAnswer
from cacheblend.engines.tokens.detokenizer import TextStream

PASSES = 4  # for each place, prompts that pass one whose answers do not fit; then places are kept for it


@dataclass(frozen=True)
class Ask:
    """A prompt, and what is asked of it."""

    prompt: Prompt  # the engine checks it
    params: SamplingParams  # of each answer
    choices: int = 1  # number of answers; with a seed, answer i uses the seed + i
    # that of the parameters, compiled by the engine's `grammars`, which takes too long for the scheduler
    grammar: CompiledGrammar | None = None
    mode: Mode = "blend"  # this, ratio, selector and tenant: see `BlendEngine.open_prefill`
    ratio: float | None = None
    selector: Selector | None = None
    deadline: float | None = None  # by `time.monotonic`; None: no deadline
    logprobs: int | None = None  # number of most likely tokens reported with each token; None: no log-probabilities
    tenant: str = ""
    # who asks: answers are shared out among these names, which the figures of the shadow check show to all tenants
    tenant_label: str = ""
    # also store the plain text in front of the first chunk, for prompts that start with the same text
    keep_text: bool = True
    shown: frozenset[int] = frozenset()  # special tokens that are part of the text; all others never are
    # called after the first token with the number of missed chunk tokens, and later from another thread with those of
    # text that recurs; returns whether to store them. Must not block.
    may_keep: Callable[[int], bool] = lambda tokens: True

    @property
    def is_own(self) -> bool:
        """It leaves everything that decides quality to the engine."""
        return self.mode == "blend" and self.ratio is None and self.selector is None


@dataclass(frozen=True)
class TokenEvent:
    """A token of one choice, whose last event has a `finish_reason`."""

    choice: int  # index of the choice, from 0
    text: str  # new text that later tokens cannot change; may be empty
    token_id: int | None = None  # None for an event after the last token that carries held-back text
    logprob: float | None = None  # before any penalty or temperature; None if not requested
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the most likely tokens
    finish_reason: str | None = None


@dataclass(frozen=True)
class DoneEvent:
    """The last event of a request: its report, None if it failed before its first token, and why it failed."""

    report: BlendReport | None
    error: Exception | None = None


Event = TokenEvent | DoneEvent


@dataclass
class Choice:
    """One answer of a request; `finish_reason` is set once it has ended."""

    decoding: Decoding
    stream: TextStream
    finish_reason: str | None = None


@dataclass(eq=False)
class Submission:
    """Prompts that were submitted together."""

    choices: int  # of all its prompts
    turn: int  # a number that grows: when it was submitted, or one of its prompts was admitted last
    has_begun: bool = False  # one of its prompts was admitted


@dataclass(eq=False)
class Ticket(PrefillJob):
    """A prompt of a request that was submitted."""

    ask: Ask
    submission: Submission
    # called with each event of the request, in the scheduler's thread, or in that of who takes its place in the queue;
    # must not block
    on_event: Callable[[Event], None]
    submitted: float  # by `time.perf_counter`
    cancelled: bool = False
    passed: int = 0  # smaller ones that were admitted when it was its turn, and it did not fit
    is_extra: bool = False  # it runs beyond the bound, and takes nobody's place
    is_admitted: bool = False  # the engine knows of the request, which has not ended
    choices: list[Choice] = field(default_factory=list)
    report: BlendReport | None = None
    to_store: PrefillResult | None = None
    origin: Origin | None = None
    watched: WatchedAnswer | None = None

    def cancel(self) -> None:
        """Cancels the request; the scheduler ends it before its next round."""
        self.cancelled = True


class Due(NamedTuple):
    """The prompt that is admitted next, and those that it passes, since they do not fit."""

    ticket: Ticket
    passed: Sequence[Ticket] = ()


class WaitingTickets:
    """Prompts that wait for one of so many places. Answers take places, not requests, since each has its own KV cache.
    The caller locks.

    Tenants take turns, and so do the requests of each: first who has the fewest places, of these who has waited longest
    for a turn. Whose turn it is and does not fit is passed, but not for ever. While a request has several places, one
    that is for one answer runs beyond the bound, one at a time: it would wait for all of a long answer.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._tickets: deque[Ticket] = deque()
        self._turns = count(1)
        self._last_turn: dict[str, int] = {}  # by `Ask.tenant_label`, of which there are as many as API keys

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def add(self, asks: Sequence[Ask], on_event: Callable[[int, Event], None]) -> list[Ticket]:
        """The prompts of a request; `on_event` is called with a prompt's number, too."""
        submission, now = Submission(sum(ask.choices for ask in asks), next(self._turns)), time.perf_counter()
        tickets = [Ticket(ask, submission, partial(on_event, number), now) for number, ask in enumerate(asks)]
        self._tickets.extend(tickets)
        return tickets

    def make_room(self, asks: Sequence[Ask], limit: int) -> list[Ticket] | None:
        """Takes out what gives way to a tenant's prompts, so that at most `limit` wait with them: of the tenant that
        has most, while it has more than this one will have, its newest request that has not begun. None, and all stay:
        there is too little."""
        gone, counts = list[Ticket](), Counter(each.ask.tenant_label for each in self._tickets)
        own = counts[asks[0].tenant_label] + len(asks)
        while len(self._tickets) - len(gone) + len(asks) > limit:
            able = [
                each
                for each in self._tickets
                if counts[each.ask.tenant_label] > own and not each.submission.has_begun and each not in gone
            ]
            if not able:
                return None
            last = max(able, key=lambda each: (counts[each.ask.tenant_label], each.submission.turn))
            leaving = [each for each in able if each.submission is last.submission]
            counts[last.ask.tenant_label] -= len(leaving)
            gone += leaving
        self._tickets = deque(each for each in self._tickets if each not in gone)
        return gone

    def discard(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def next(self, running: Sequence[Ticket]) -> Due | None:
        """Who may run beside those that run; None: nobody yet."""
        held: Counter[object] = Counter()  # places, by request, and by tenant
        for each in running:
            held.update({each.submission: each.ask.choices, each.ask.tenant_label: each.ask.choices})
        free: int = self._places - sum(min(each.ask.choices, self._places) for each in running if not each.is_extra)

        def turn(each: Ticket) -> tuple[int, int, int, int]:
            label, submission = each.ask.tenant_label, each.submission
            return held[label], self._last_turn.get(label, 0), held[submission], submission.turn

        first = {each.submission: each for each in reversed(self._tickets)}  # of each request's prompts
        turns, passed = sorted(first.values(), key=turn), list[Ticket]()
        for each in turns:
            if min(each.ask.choices, self._places) <= free:
                each.is_extra = False  # it was, while other adapters ran
                return Due(each, passed)
            if each.passed >= PASSES * self._places:
                break
            passed.append(each)
        if any(each.is_extra for each in running) or all(held[each.submission] == 1 for each in running):
            return None
        extra = next((each for each in turns if each.submission.choices == 1), None)
        if extra is None:
            return None
        extra.is_extra = True
        return Due(extra)

    def take(self, due: Due) -> Ticket:
        """Who was due is admitted: it has had its turn."""
        for each in due.passed:
            each.passed += 1
        ticket = due.ticket
        self._tickets.remove(ticket)
        ticket.submission.has_begun = True
        ticket.submission.turn = self._last_turn[ticket.ask.tenant_label] = next(self._turns)
        return ticket
