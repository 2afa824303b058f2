"""Figures 5 and 6: requests side by side in the engine's scheduler, as in a server: by batch size and request rate."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, TokenEvent
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.demo import COLOURS
from cacheblend.evaluation.methods import Fused, Method
from cacheblend.evaluation.runner import Case, groups_that_fit, make_cases, store_passages
from lab.bench import silent
from lab.measurements import Kept
from lab.paper import drawing
from lab.paper.context import BLEND, FULL, PREFIX, REUSE, Answered, Context, LeftOutError, Part, methods, points, score
from lab.servers.clients import poisson_times

SERVED = (FULL, PREFIX, BLEND)
MODES: dict[str, Mode] = {FULL: "full", PREFIX: "prefix", REUSE: "reuse", BLEND: "blend"}
"""By the kind of a method. The scheduler computes all of them in this package's own layer loop."""


@dataclass
class Sent:
    """A request that was sent: when it was due, when its first token and its end came, its answer, why it failed.

    Row-layers and projected rows are those until the first token, see `BlendReport`.
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


class Measured:
    """Measurements of a part, kept; the passages of all cases are stored before the first one that is not there yet."""

    def __init__(self, context: Context, kept: Kept, cases: Sequence[Case]) -> None:
        self._context, self._kept, self._cases, self._is_stored = context, kept, cases, False

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        if not self._is_stored and not self._kept.has(key):
            store_passages(self._context.engine, self._cases, silent)
            self._is_stored = True
        return self._kept.get(key, measure)


def send(
    context: Context, method: Method, prompts: Sequence[Prompt], due_s: Sequence[float], active: int
) -> list[Sent]:
    """Sends each prompt when it is due, in so many seconds from now, and waits for all answers.

    At most `active` requests are in prefill or decoding. Raises `CacheBlendError` where one failed.
    """
    selector = method.selector if isinstance(method, Fused) and method.label.kind == BLEND else None
    scheduler = Scheduler(context.engine.runtime, Limits(active=active, waiting=len(prompts)))
    left = threading.Semaphore(0)
    try:
        started = time.perf_counter()
        sent = [Sent(started + at) for at in due_s]
        for each, prompt in zip(sent, prompts, strict=True):
            time.sleep(max(0.0, each.due - time.perf_counter()))
            params = SamplingParams(max_new_tokens=context.settings.max_tokens, stop=context.settings.template.stop)
            params = params.within(context.engine.runtime.survey.max_length, len(prompt))
            # Nothing is captured, so that all methods find the same blocks.
            ask = Ask(prompt, params, mode=MODES[method.label.kind], selector=selector, may_keep=lambda tokens: False)
            scheduler.submit(ask, partial(_note, each, left))
        for _ in sent:
            left.acquire()
    finally:
        scheduler.close()
    for each in sent:
        if each.error is not None:
            raise each.error
    return sent


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


# ---- 5: batch size ------------------------------------------------------------------------------------------


def measure_batch(context: Context) -> dict[str, Any]:
    """A method at a batch size is measured at once: an interrupted one is measured again."""
    cases, notes = open_cases(context)
    if not cases:
        raise LeftOutError("; ".join(notes))
    compared, sizes = methods(context.engine), sorted(set(context.sweeps.batch_sizes))
    answers: list[Answered] = []
    with context.kept("batch", {"methods": list(map(repr, compared))}, cases) as kept:
        resumed, keys = len(kept.items), [(size, method) for size in sizes for method in compared]
        measured, found = Measured(context, kept, cases), dict[tuple[int, str], list[dict[str, Any]]]()
        for number, (size, method) in enumerate(keys, 1):
            run = partial(_batches, context, method, cases, size)
            found[size, method.label.name] = measured.get(f"{method.label.name}, {size}", run)
            context.progress("batch", number, len(keys))
        full = next(m.label.name for m in compared if m.label.kind == FULL)
        for size, method in keys:
            both = found[size, method.label.name], found[size, full]
            for case, one, other in zip(cases, *both, strict=True):
                answers.append(
                    Answered(
                        case.row.category,
                        (method.label.family, method.label.name),
                        method.label.ratio,
                        size,
                        one["ttft_s"],
                        score(context.scorers, one["text"], case.row.answers),
                        float(one["token_ids"][:1] == other["token_ids"][:1]),
                        one["compute"],
                    )
                )
        return {"points": points(answers), "notes": notes, "machines": kept.machines, "resumed": resumed}


def _batches(context: Context, method: Method, cases: Sequence[Case], size: int) -> list[dict[str, Any]]:
    """An answer for each case; the last batch is filled up with the first cases, whose second answers do not count."""
    padded = [case.longest for case in (list(cases) * size)[: -(-len(cases) // size) * size]]
    send(context, method, padded[:size], [0.0] * size, size)  # a warm-up
    sent: list[Sent] = []
    for start in range(0, len(padded), size):
        sent += send(context, method, padded[start : start + size], [0.0] * size, size)
    scale = ComputeScale.of(context.engine)
    return [
        {
            "ttft_s": each.ttft_s,
            "text": each.text,
            "token_ids": each.token_ids,
            "compute": scale.share(each.row_layers, each.projected_rows, len(case.longest)),
        }
        for each, case in zip(sent, cases, strict=False)
    ]


# ---- 6: request rate ----------------------------------------------------------------------------------------


def measure_rate(context: Context) -> dict[str, Any]:
    """Poisson arrivals. First all requests at once, which gives each method's saturation; from it follow the rates."""
    cases, notes = open_cases(context)
    if not cases:
        raise LeftOutError("; ".join(notes))
    sweeps = context.sweeps
    served = [method for method in methods(context.engine) if method.label.family in SERVED]
    prompts = [case.longest for case in cases]
    prompts = (prompts * -(-sweeps.load_requests // len(prompts)))[: max(sweeps.load_requests, len(prompts))]
    facts = {"methods": list(map(repr, served)), "requests": len(prompts), "clients": sweeps.clients}
    with context.kept("rate", facts, cases) as kept:
        resumed, measured, found = len(kept.items), Measured(context, kept, cases), list[dict[str, Any]]()

        def point(method: Method, rate: float | None) -> dict[str, Any]:
            key = f"{method.label.name}, {'at saturation' if rate is None else rate}"
            found.append(measured.get(key, lambda: _at_rate(context, method, prompts, rate)))
            context.progress("rate", len(found), len(served) * (1 + sweeps.load))
            return found[-1]

        saturation = {method.label.family: point(method, None)["requests_per_s"] for method in served}
        low, high = saturation[FULL] / 3, 1.1 * max(saturation.values())
        for rate in np.linspace(low, high, sweeps.load).round(6).tolist():
            for method in served:
                point(method, rate)
        return {
            "points": [each for each in found if each["x"] is not None],
            "saturation": saturation,
            "requests": len(prompts),
            "notes": [*notes, f"{len(prompts)} requests at each rate, at most {sweeps.clients} under way"],
            "machines": kept.machines,
            "resumed": resumed,
        }


def _at_rate(context: Context, method: Method, prompts: Sequence[Prompt], rate: float | None) -> dict[str, Any]:
    """One method at one rate; None: all requests at once."""
    due = [0.0] * len(prompts) if rate is None else poisson_times(rate, len(prompts), "paper")
    send(context, method, prompts[:1], [0.0], 1)  # a warm-up
    sent = send(context, method, prompts, due, context.sweeps.clients)
    times = [each.ttft_s for each in sent]
    low, high, late = map(float, np.percentile(times, [25, 75, 95]))
    return {
        "family": method.label.family,
        "method": method.label.name,
        "x": rate,
        "rows": len(sent),
        "ttft_s": {"median": statistics.median(times), "low": low, "high": high, "p95": late},
        "requests_per_s": len(sent) / (max(each.done for each in sent) - min(each.due for each in sent)),
    }


def draw_rate(result: dict[str, Any], title: str, path: Path) -> None:
    """Time on the left, with each method's saturation as a line; throughput on the right."""
    with drawing.sheet(title, 2, path) as (ttft, throughput):
        drawing.curves(ttft, result["points"], drawing.ttft, lambda point: point["x"])
        for family, at in result["saturation"].items():
            ttft.axvline(at, color=COLOURS[family], linestyle=":", linewidth=1.2)
        drawing.log_times(ttft, result["points"])
        ttft.set_title("dotted: throughput at saturation")
        drawing.curves(throughput, result["points"], drawing.throughput, lambda point: point["x"])
        throughput.set_ylabel("requests answered per second")
        for axes in (ttft, throughput):
            axes.set(xlabel="requests arriving per second", xlim=(0, None))


BATCH = Part(
    "batch",
    "Batch size",
    measure_batch,
    drawing.sweep_of("requests at once", log=True),
    {"batch": lambda point: str(point["x"])},
)
RATE = Part(
    "rate",
    "Request rate",
    measure_rate,
    draw_rate,
    {
        "requests/s": lambda point: f"{point['x']:.3g}",
        "answered/s": lambda point: f"{point['requests_per_s']:.3g}",
    },
)
