"""A request while the scheduler runs it: its events on the server's own loop, and its figures for the metrics."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, Ticket, TokenEvent
from cacheblend.serve.metrics import Metrics


@dataclass
class RunningRequest:
    """One request's events.

    Attributes:
        ask: the request.
        scheduler, metrics: of the server.
        report: how it was prefilled; None until it is done.
    """

    ask: Ask
    scheduler: Scheduler
    metrics: Metrics
    report: BlendReport | None = None
    _last_token_at: dict[int, float] = field(default_factory=dict)  # by choice
    _inbox: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    _ticket: Ticket | None = None

    def start(self) -> None:
        """Queues the request. Must be called on the server's loop.

        Raises:
            QueueFullError, ClosedError: see `Scheduler.submit`.
        """
        loop, inbox = asyncio.get_running_loop(), self._inbox

        def on_event(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(inbox.put_nowait, event)

        self._ticket = self.scheduler.submit(self.ask, on_event)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """The tokens of a started request as they come. Leaving the iteration early cancels the request.

        Raises:
            Exception: the error that ended the request, as the scheduler reports it.
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
                self._observe_gap(event)
                yield event
        finally:
            if not done and self._ticket is not None:
                self._ticket.cancel()
            elif self.report is not None:
                self.metrics.report(self.report, self.ask.mode)

    def _observe_gap(self, event: TokenEvent) -> None:
        now, before = time.perf_counter(), self._last_token_at.get(event.choice)
        if before is not None:
            self.metrics.gap(now - before)
        self._last_token_at[event.choice] = now
