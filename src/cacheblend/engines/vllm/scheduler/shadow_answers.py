"""The shadow check on the scheduler's side: which answers are compared, when there is time, and what follows from it.

    prompt provided ─> drawn? ─> 16 tokens answered, or ended ─> CheckJob ─> worker ─> watch ─> metrics
                                 (vLLM keeps an ended request's                          └───> ratio in force
                                 blocks for a step)

A tile of a full prefill is computed in a step without requests at once, else when as many times its seconds have passed
as make it the check's share of the time, however much else there is.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from cacheblend.core.names import as_token_ids
from cacheblend.engines.shadow import ANSWER_TOKENS, MOST_WAITING, NO_ANSWER, QUEUE_FULL, Labels, ShadowWatch
from cacheblend.engines.vllm import metrics as names
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.jobs import Adapter, CheckJob, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import RESET
from cacheblend.engines.vllm.scheduler.tracked_requests import BEYOND_WINDOW, Tracked

IDLE_S = 10.0  # without a request in which the check keeps vLLM stepping, before it pauses or ends
PREEMPTED = "preempted"


@dataclass(eq=False)
class Drawn:
    """A request whose answer will be compared. `step` is the floor's; None: the request names a ratio or a selector."""

    request: Any
    labels: Labels
    step: int | None
    block_ids: list[list[int]]
    preemptions: int
    adapter: Adapter | None = None


class AnswerDraws:
    """The checks of one engine. The watch draws, and takes the results; None: nothing is checked. `window`: rows of a
    sliding window, if there is one; a longer prompt with its answer is not compared, since vLLM frees blocks that the
    window has passed."""

    def __init__(self, watch: ShadowWatch | None, counts: Counts, window: int | None = None) -> None:
        self.watch, self._counts, self._window = watch, counts, window
        self._drawn: dict[str, Drawn] = {}
        self._held: deque[CheckJob] = deque()
        self._released: list[str] = []
        self._open: dict[int, tuple[Labels, int | None]] = {}
        self._number = 0
        self._check_at = self._request_at = 0.0
        self._awaits_report = False
        self._changes = (0, 0)
        self._show()

    @property
    def step(self) -> int:
        return 0 if self.watch is None else self.watch.step

    @property
    def is_busy(self) -> bool:
        waits = bool(self._open or self._held or self._released)
        return waits and time.monotonic() - self._request_at < IDLE_S

    def begin(self, tracked: Tracked) -> None:
        """Called when a request's prompt has been provided: draws, once for each request."""
        found, done, request = tracked.found, tracked.outcome, tracked.request
        if self.watch is None or found is None or done is None or done.failure or tracked.is_asked:
            return
        if interface.has_images(request) or request.resumable:  # ids do not say its prompt, or only begin it
            return
        tracked.is_asked = True
        is_own = tracked.options.follows_floor
        local = tracked.held_by_vllm
        tiers = sum(count for source, count in done.hit_tokens.items() if source not in ("vllm", "prefix"))
        loaded = int((found.plan.candidate_rows >= local).sum()) if tiers else 0
        shared = max(0, local - found.first_loaded)  # blended for an equal request, or an earlier turn
        if not self.watch.takes(loaded + shared, done.recomputed_tokens):
            return
        if self._window is not None and len(request.prompt_token_ids) + ANSWER_TOKENS > self._window:
            self._drop(BEYOND_WINDOW)
            return
        labels = Labels(tracked.tenant, found.selector.name, "engine" if is_own else "request")
        step = tracked.floor_step if is_own else None
        self._drawn[request.request_id] = Drawn(
            request, labels, step, tracked.block_ids, tracked.tried, tracked.adapter
        )
        self._show_waiting()

    def left_out(self) -> None:
        """Called when the floor has a request's stored tokens computed."""
        if self.watch is not None:
            self.watch.takes(0, 0, by_floor=True)
            self._show()

    def finished(self, request: Any) -> bool:
        """Called when a request has ended or was aborted; whether vLLM has to keep its blocks until they are read."""
        drawn = self._drawn.pop(request.request_id, None)
        if drawn is None:
            return False
        reason = NO_ANSWER if not request.num_output_tokens else ""
        if request.num_preemptions != drawn.preemptions:
            reason = PREEMPTED
        elif len(self._held) >= MOST_WAITING:  # one is read in each step, and vLLM keeps the blocks of all
            reason = QUEUE_FULL
        if reason:
            self._drop(reason)
            return False
        self._held.append(self._job_of(drawn, is_held=True))
        return True

    def reset(self) -> None:
        dropped = len(self._drawn) + len(self._held)
        for job in self._held:
            self._released.append(job.request_id)
            del self._open[job.number]
        self._drawn.clear()
        self._held.clear()
        for _ in range(dropped):
            self._drop(RESET)
        if self.watch is not None:
            self.watch.begin_anew()
            self._show()

    def fill(self, jobs: StepJobs, *, has_requests: bool) -> None:
        if self.watch is None:
            return
        now = time.monotonic()
        if has_requests:
            self._request_at = now
        jobs.check = self._next()
        jobs.released, self._released = self._released, []
        if self._open and (not has_requests or (now >= self._check_at and not self._awaits_report)):
            jobs.may_check, jobs.is_check_free = True, not has_requests
            self._awaits_report = has_requests

    def reported(self, report: StepReport) -> None:
        if self.watch is None:
            return
        self._awaits_report = False
        pause = report.check_s * (1 / self.watch.settings.share - 1)
        self._check_at = max(self._check_at, time.monotonic()) + pause
        for number, result in report.checked.items():
            labels, step = self._open.pop(number)
            if isinstance(result, str):
                self._drop(result)
                continue
            text = names.joined(*self.watch.add(labels, result, step))
            agreed = sum(result.agreed)
            self._counts.add(names.COMPARED, 1, text)
            self._counts.add(names.TOKENS, agreed, names.joined(text, "yes"))
            self._counts.add(names.TOKENS, len(result.agreed) - agreed, names.joined(text, "no"))
            self._counts.add_to(names.KL, text, result.kl)
            self._show()

    def _next(self) -> CheckJob | None:
        for request_id, drawn in [*self._drawn.items()]:
            if drawn.request.num_preemptions != drawn.preemptions:  # vLLM has freed its blocks
                del self._drawn[request_id]
                self._drop(PREEMPTED)
        if self._held:
            return self._held.popleft()
        for request_id, drawn in self._drawn.items():
            if drawn.request.num_output_tokens >= ANSWER_TOKENS:
                del self._drawn[request_id]
                return self._job_of(drawn)
        return None

    def _job_of(self, drawn: Drawn, *, is_held: bool = False) -> CheckJob:
        request = drawn.request
        self._number += 1
        self._open[self._number] = drawn.labels, drawn.step
        token_ids = tuple(int(token) for token in request.output_token_ids[:ANSWER_TOKENS])
        prompt_ids = as_token_ids(request.prompt_token_ids)
        where = drawn.block_ids, is_held, drawn.adapter
        return CheckJob(self._number, request.request_id, prompt_ids, token_ids, *where)

    def _drop(self, reason: str) -> None:
        assert self.watch is not None
        self.watch.drop(reason)
        self._counts.add(names.DROPPED, 1, reason)
        self._show_waiting()

    def _show_waiting(self) -> None:
        self._counts.put(names.WAITING, {"": len(self._drawn) + len(self._open)})

    def _show(self) -> None:
        if self.watch is None:
            return
        figures = self.watch.figures()
        rated = {
            names.joined(*series.labels, of): (share, bound) if rows else (math.nan, math.nan)
            for series in figures.series
            for of, (share, bound, rows) in series.agreement.items()
        }
        self._counts.put(names.AGREEMENT, {text: share for text, (share, _) in rated.items()})
        self._counts.put(names.BOUND, {text: bound for text, (_, bound) in rated.items()})
        if figures.ratio is not None:
            self._counts.put(names.RATIO, {"": figures.ratio})
        changes = figures.raised, figures.lowered
        for direction, now, before in zip(("raised", "lowered"), changes, self._changes, strict=True):
            self._counts.add(names.CHANGES, now - before, direction)
        self._changes = changes
        self._show_waiting()
