"""A request on its way through the scheduler, as events on the server's own loop; and OpenAI's forms of them."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, Ticket, TokenEvent
from cacheblend.serve.metrics import Metrics

DONE = "data: [DONE]\n\n"


@dataclass
class Answering:
    """One request's events.

    Attributes:
        ask: the request.
        report: once it is done.
        scheduler, metrics: of the server.
    """

    ask: Ask
    scheduler: Scheduler
    metrics: Metrics
    report: BlendReport | None = None
    _last: dict[int, float] = field(default_factory=dict)
    _inbox: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    _ticket: Ticket | None = None

    def start(self) -> None:
        """Queues the request; on the server's loop.

        Raises:
            QueueFullError, ClosedError: see `Scheduler.submit`.
        """
        loop, inbox = asyncio.get_running_loop(), self._inbox

        def on_event(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(inbox.put_nowait, event)

        self._ticket = self.scheduler.submit(self.ask, on_event)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Tokens of a request that was started, as they come. Who stops listening cancels it.

        Raises:
            Exception: what ended it early, as the scheduler tells it.
        """
        done = False
        try:
            while True:
                event = await self._inbox.get()
                if isinstance(event, DoneEvent):
                    done = True
                    self.report = event.report
                    if event.error is not None:
                        raise event.error
                    return
                self._note(event)
                yield event
        finally:
            if not done and self._ticket is not None:
                self._ticket.cancel()
            elif self.report is not None:
                self.metrics.report(self.report, self.ask.mode)

    def _note(self, event: TokenEvent) -> None:
        now, before = time.perf_counter(), self._last.get(event.choice)
        if before is not None:
            self.metrics.gap(now - before)
        self._last[event.choice] = now


def new_id(kind: str) -> str:
    """Of an answer."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage(ask: Ask, report: BlendReport | None, generated: int) -> dict[str, Any]:
    """OpenAI's usage; cached are the tokens that were loaded and not computed anew."""
    cached = 0 if report is None else max(0, sum(report.hit_tokens.values()) - report.recomputed_tokens)
    return {
        "prompt_tokens": len(ask.prompt),
        "completion_tokens": generated,
        "total_tokens": len(ask.prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def told(report: BlendReport | None) -> dict[str, Any] | None:
    """The key ``cacheblend`` of an answer: the request's report."""
    return None if report is None else asdict(report)


def sse(data: dict[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
