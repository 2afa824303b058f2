"""Figure 6: time to first token and throughput by request rate, Poisson arrivals."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.core.plan.prompt import Prompt
from cacheblend.evaluation.methods import Method
from lab.paper import drawing
from lab.paper.compared import BLEND, FULL, PREFIX, methods
from lab.paper.context import Context, LeftOutError, Part
from lab.paper.side_by_side import Sent, open_cases, send, store
from lab.servers.clients import poisson_times

SERVED = (FULL, PREFIX, BLEND)
AT_ONCE = "at saturation"


def measure(context: Context) -> dict[str, Any]:
    """See `Part`. First all requests at once, which gives each method's saturation; from it follow the rates."""
    cases, notes = open_cases(context)
    if not cases:
        raise LeftOutError("; ".join(notes))
    sweeps = context.sweeps
    served = [method for method in methods(context.engine) if method.label.family in SERVED]
    prompts = [case.longest for case in cases]
    prompts = (prompts * -(-sweeps.load_requests // len(prompts)))[: max(sweeps.load_requests, len(prompts))]
    facts = {"methods": list(map(repr, served)), "requests": len(prompts), "clients": sweeps.clients}
    with context.kept("rate", facts, cases) as kept:
        resumed, total = len(kept.items), len(served) * (1 + sweeps.load)
        is_stored, found = False, list[dict[str, Any]]()

        def point(method: Method, rate: float | None) -> dict[str, Any]:
            nonlocal is_stored
            key = f"{method.label.name}, {AT_ONCE if rate is None else rate}"
            if not is_stored and not kept.has(key):
                store(context, cases)
                is_stored = True
            found.append(kept.get(key, lambda: _at_rate(context, method, prompts, rate)))
            context.progress("rate", len(found), total)
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
    return {
        "family": method.label.family,
        "method": method.label.name,
        "x": rate,
        "rows": len(sent),
        "ttft_s": _spread([each.ttft_s for each in sent]),
        "requests_per_s": len(sent) / _seconds(sent),
    }


def _seconds(sent: Sequence[Sent]) -> float:
    return max(each.done for each in sent) - min(each.due for each in sent)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    low, high, late = np.percentile(seconds, [25, 75, 95])
    return {"median": statistics.median(seconds), "low": float(low), "high": float(high), "p95": float(late)}


def draw(result: dict[str, Any], title: str, path: Path) -> None:
    """Time on the left, with each method's saturation as a line; throughput on the right."""
    with drawing.sheet(title, 2, path) as (ttft, throughput):
        drawing.curves(ttft, result["points"], drawing.ttft, lambda point: point["x"])
        for family, at in result["saturation"].items():
            ttft.axvline(at, color=drawing.COLOURS[family], linestyle=":", linewidth=1.2)
        drawing.log_times(ttft, result["points"])
        ttft.set_title("dotted: throughput at saturation")
        drawing.curves(throughput, result["points"], drawing.throughput, lambda point: point["x"])
        throughput.set_ylabel("requests answered per second")
        for axes in (ttft, throughput):
            axes.set(xlabel="requests arriving per second", xlim=(0, None))


PART = Part(
    "rate",
    "Request rate",
    measure,
    draw,
    {
        "requests/s": lambda point: f"{point['x']:.3g}",
        "answered/s": lambda point: f"{point['requests_per_s']:.3g}",
    },
)
