"""Sends prompts to the engine's scheduler, as a server does, and notes when first tokens and answers come."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, Limits, TokenEvent
from cacheblend.evaluation.methods import Fused, Method
from cacheblend.evaluation.runner import Case, groups_that_fit, make_cases, store_passages
from lab.paper.compared import BLEND, FULL, PREFIX, REUSE
from lab.paper.context import Context

MODES: dict[str, Mode] = {FULL: "full", PREFIX: "prefix", REUSE: "reuse", BLEND: "blend"}
"""By the kind of a method. The scheduler computes all of them in this package's own layer loop."""


@dataclass
class Sent:
    """A request that was sent.

    Attributes:
        due: when it was due, by `time.perf_counter`.
        first, done: when its first token and its end came.
        text, token_ids: the answer.
        row_layers, projected_rows: computed until the first token, see `BlendReport`.
        error: why it failed.
    """

    due: float
    first: float = 0.0
    done: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    row_layers: int = 0
    projected_rows: int = 0
    error: Exception | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.first - self.due


def open_cases(context: Context) -> tuple[list[Case], list[str]]:
    """Cases whose prompts fit the context, as many as the store holds at once; and a line on those left out."""
    rows = context.some_rows
    fitting = [case for case in make_cases(context.engine, context.settings, rows) if case.prompts]
    cases = next(groups_that_fit(context.engine, fitting), [])
    left = len(rows) - len(cases)
    why = "the context, or all passages the store"
    return cases, [f"{left} of {len(rows)} rows are left out: their prompts exceed {why}"] if left else []


def store(context: Context, cases: Sequence[Case]) -> None:
    """Stores the passages of all cases."""
    store_passages(context.engine, cases, lambda stage, done, total: None)


def send(
    context: Context, method: Method, prompts: Sequence[Prompt], due_s: Sequence[float], active: int
) -> list[Sent]:
    """Sends each prompt when it is due, and waits for all answers.

    Args:
        context: its engine serves.
        method: full recompute, prefix caching, full reuse or a blend.
        prompts: in the order in which they are due.
        due_s: [prompts] seconds from now, rising.
        active: most requests in prefill or decoding.

    Raises:
        CacheBlendError: a request failed.
    """
    selector = method.selector if isinstance(method, Fused) and method.label.kind == BLEND else None
    scheduler = Scheduler(context.engine, Limits(active=active, waiting=len(prompts)))
    left = threading.Semaphore(0)
    try:
        started = time.perf_counter()
        sent = [Sent(started + at) for at in due_s]
        for each, prompt in zip(sent, prompts, strict=True):
            time.sleep(max(0.0, each.due - time.perf_counter()))
            scheduler.submit(_ask(context, method, selector, prompt), partial(_note, each, left))
        for _ in sent:
            left.acquire()
    finally:
        scheduler.close()
    for each in sent:
        if each.error is not None:
            raise each.error
    return sent


def _ask(context: Context, method: Method, selector: Selector | None, prompt: Prompt) -> Ask:
    params = SamplingParams(max_new_tokens=context.settings.max_tokens, stop=context.settings.template.stop)
    params = params.within(context.engine.survey.max_length, len(prompt))
    # Nothing is captured, so that all methods find the same blocks.
    return Ask(prompt, params, mode=MODES[method.label.kind], selector=selector, may_keep=lambda tokens: False)


def _note(sent: Sent, left: threading.Semaphore, event: Event) -> None:
    now = time.perf_counter()
    if isinstance(event, TokenEvent):
        sent.first = sent.first or now
        sent.text += event.text
        sent.token_ids += [] if event.token_id is None else [event.token_id]
    elif isinstance(event, DoneEvent):
        sent.done, sent.error = now, event.error
        if event.report is not None:
            sent.row_layers, sent.projected_rows = event.report.row_layers, event.report.projected_rows
        left.release()
