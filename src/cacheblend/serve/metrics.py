"""Figures of a running server, its store and its shadow check, for Prometheus. The names are an interface."""

import asyncio
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend.core.failures import failures
from cacheblend.core.load.budget import LOAD_TIMEOUT, LOOK_UP, LateTiers
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.runtime import EngineRuntime
from cacheblend.engines.metrics import DISCOVERED, FAILED, SHADOW_COUNTERS, SHADOW_GAUGES, SHADOW_KL, WHOSE, Texts
from cacheblend.engines.shadow import KL_BUCKETS, ShadowFigures
from cacheblend.serve.bounded_calls import BoundedCalls
from cacheblend.store import KVStore, StoreStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_GAPS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_COUNTED: Texts = {
    "requests": (
        ("route", "status"),
        "Requests by route and HTTP status, without probes, scrapes and the page's files.",
    ),
    "refused_connections": ((), "Connections that were ended or refused since too many were open."),
    "prompt_tokens": ((), "Tokens of prompts."),
    "generated_tokens": ((), "Tokens of answers."),
    "hit_tokens": (("source",), "Tokens of prompts found in the store, by tier."),
    "missed_tokens": ((), "Tokens of chunks that were not stored."),
    "near_miss_tokens": ((), "Those of them that are stored with another beginning or end."),
    "recomputed_tokens": ((), "Tokens loaded and recomputed."),
    "changed_contents": ((), "Texts of chats that the chat template changed or dropped."),
    "fallbacks": (("reason",), "Stored KV that was computed instead, by reason."),
}
"""Counters that requests raise."""

_REPORTED = (
    "prompt_tokens",
    "generated_tokens",
    "missed_tokens",
    "near_miss_tokens",
    "recomputed_tokens",
    "changed_contents",
)

_STORE_FAILURES = "What a store failed to do: answer when asked for its state, write a block, keep it undamaged."
_SHOWN: dict[type[Any], Texts] = {
    CounterMetricFamily: {
        "store_errors": (("tier", "what"), _STORE_FAILURES),
        "captures_given_up": (("reason",), "Missed chunks that were not stored, by reason."),
        "failures": (("reason",), FAILED),
        **DISCOVERED,
        **{name: (("model", *labels), text) for name, (labels, text) in SHADOW_COUNTERS.items()},
    },
    GaugeMetricFamily: {
        "store_bytes": (("tier",), "Bytes of stored blocks."),
        "store_blocks": (("tier",), "Stored blocks."),
        "store_up": (("tier",), "1 if the tier answers, else 0."),
        "requests_waiting": ((), "Requests in the queue."),
        "requests_active": ((), "Requests being prefilled or decoded."),
        "discovered_wasted_tokens": ((), "Tokens of learnt runs that were stored and that no prompt has used."),
        "watched_tokens": ((), "Recent tokens kept to learn from."),
        **{name: (("model", *labels), text) for name, (labels, text) in SHADOW_GAUGES.items()},
    },
    HistogramMetricFamily: {"shadow_kl": (("model", *WHOSE), SHADOW_KL)},
}
"""Present values, which are asked for when Prometheus asks; by kind."""

Values = Mapping[str, Mapping[Any, Any]]
"""Of metrics by name, the values by labels, which are tuples; of a histogram, its cumulated buckets and sum."""


ANSWER_S = 1.0
"""Seconds that a scrape waits for a tier: each takes a thread, of which whole answers and probes need some, too."""


def _stats_of(tier: KVStore) -> StoreStats | None:
    return tier.stats() if tier.is_reachable else None


class StoreWatch:
    """Bytes, blocks and errors of a store's tiers but late ones, which requests pass over, too. Thread-safe."""

    def __init__(self, store: KVStore, late_tiers: LateTiers) -> None:
        self._late_tiers, self._tiers = late_tiers, store.tiers()
        self._lock = threading.Lock()
        self._no_answer, self._calls = dict.fromkeys(self._tiers, 0), BoundedCalls(max(1, len(self._tiers)))

    def stats(self) -> Mapping[str, StoreStats | None]:
        """By tier; None for one that does not answer, or answered requests too late, which is counted."""
        found: dict[str, StoreStats | None] = {}
        for name, tier in self._tiers.items():
            try:
                late = max(self._late_tiers.left_s(name), self._late_tiers.left_s(LOOK_UP)) > 0
                found[name] = None if late else self._calls.result(name, partial(_stats_of, tier), ANSWER_S)
            except Exception:  # whatever it is, this tier is of no use now
                found[name] = None
            if found[name] is None:
                with self._lock:
                    self._no_answer[name] += 1
        return found

    def down(self) -> list[str]:
        """Tiers that do not answer."""
        return [name for name, stats in self.stats().items() if stats is None]

    def values(self) -> Values:
        found = self.stats()
        there = {(name,): stats for name, stats in found.items() if stats is not None}
        errors = {(name, "answer"): self._no_answer[name] for name in found}
        errors |= {(name, "write"): stats.write_failures for (name,), stats in there.items()}
        errors |= {(name, "damage"): stats.damaged for (name,), stats in there.items()}
        return {
            "store_bytes": {tier: stats.bytes for tier, stats in there.items()},
            "store_blocks": {tier: stats.blocks for tier, stats in there.items()},
            "store_up": {(name,): stats is not None for name, stats in found.items()},
            "store_errors": errors,
        }


def _shadow_values(figures: ShadowFigures, waiting: int) -> Values:
    model, ends = figures.model, [*map(str, KL_BUCKETS), "+Inf"]
    series = {(model, *each.labels): each for each in figures.series}
    tokens = {(*labels, "yes"): each.agreed for labels, each in series.items()}
    agreement = {(*labels, of): found for labels, each in series.items() for of, found in each.agreement.items()}
    compared = {labels: (share, bound) for labels, (share, bound, rows) in agreement.items() if rows}
    return {
        "shadow": {labels: each.compared for labels, each in series.items()},
        "shadow_tokens": tokens | {(*labels, "no"): each.differed for labels, each in series.items()},
        "shadow_kl": {
            labels: (list(zip(ends, accumulate(map(float, each.kl_counts)), strict=True)), each.kl_sum)
            for labels, each in series.items()
        },
        "shadow_agreement": {labels: share for labels, (share, _) in compared.items()},
        "shadow_agreement_bound": {labels: bound for labels, (_, bound) in compared.items()},
        "shadow_dropped": {(model, reason): count for reason, count in figures.dropped.items()},
        "shadow_changes": {(model, "raised"): figures.raised, (model, "lowered"): figures.lowered},
        "shadow_waiting": {(model,): waiting},
        "shadow_ratio": {} if figures.ratio is None else {(model,): figures.ratio},
    }


class _PresentValues(Collector):  # type: ignore[misc, unused-ignore]
    def __init__(self, ask: Callable[[], Values]) -> None:
        self._ask = ask

    def collect(self) -> Iterable[Metric]:
        values = self._ask()
        for kind, texts in _SHOWN.items():
            for name, (labels, text) in texts.items():
                if name not in values:
                    continue
                family = kind(f"cacheblend_{name}", text, labels=labels)
                for of, value in values[name].items():
                    family.add_metric(of, *value) if isinstance(value, tuple) else family.add_metric(of, value)
                yield family


class Metrics:
    """The metrics of one server, which runs requests on `runtime`; safe to call from several threads."""

    def __init__(self, runtime: EngineRuntime, waiting: Callable[[], int], active: Callable[[], int]) -> None:
        self.store = StoreWatch(runtime.store, runtime.prefiller.late_tiers)

        def ask() -> Values:
            shadow, learnt = runtime.shadow, None if runtime.discovery is None else runtime.discovery.figures
            names = () if learnt is None else (*DISCOVERED, "discovered_wasted_tokens", "watched_tokens")
            return {
                **self.store.values(),
                "captures_given_up": {(reason,): count for reason, count in runtime.background.given_up.items()},
                "failures": {(reason,): count for reason, count in failures().items()},
                "requests_waiting": {(): waiting()},
                "requests_active": {(): active()},
                **({} if shadow is None else _shadow_values(shadow.watch.figures(), shadow.waiting)),
                **{name: {(): getattr(learnt, name.removeprefix("discovered_"))} for name in names},
            }

        disable_created_metrics()  # Prometheus would store the time at which each counter was made as one more series
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        versions = {"version": version("cacheblend"), "python": platform.python_version()}
        versions |= {name: version(name) for name in ("torch", "transformers")}
        Info("cacheblend_build", "Versions.", registry=registry).info(versions)
        registry.register(_PresentValues(ask))
        text = "Time to first token, including the time in the queue."
        self._ttft = Histogram("cacheblend_ttft_seconds", text, ["mode"], buckets=_SECONDS, registry=registry)
        text = "Time between two tokens."
        self._gap = Histogram("cacheblend_inter_token_seconds", text, buckets=_GAPS, registry=registry)
        text = "Time by which the event loop was late for a timer."
        self._lag = Histogram("cacheblend_loop_lag_seconds", text, buckets=(*_GAPS, 5, 10), registry=registry)
        self._counters = {
            name: Counter(f"cacheblend_{name}", text, labels, registry=registry)
            for name, (labels, text) in _COUNTED.items()
        }
        self.refused_connection: Callable[[], None] = self._counters["refused_connections"].inc

    def request(self, route: str, status: int) -> None:
        self._counters["requests"].labels(route, str(status)).inc()

    async def watch_loop(self, every_s: float = 0.25) -> None:
        """Records by how much the event loop is late, until it is cancelled."""
        while True:
            due = time.perf_counter() + every_s
            await asyncio.sleep(every_s)
            self._lag.observe(max(0.0, time.perf_counter() - due))

    def gap(self, seconds: float) -> None:
        """Records the time between two tokens of an answer."""
        self._gap.observe(seconds)

    def report(self, report: BlendReport, mode: str) -> None:
        """Records a request that had at least its first token."""
        self._ttft.labels(mode).observe(report.ttft_s)
        for name in _REPORTED:
            self._counters[name].inc(getattr(report, name))
        for source, tokens in report.hit_tokens.items():
            self._counters["hit_tokens"].labels(source).inc(tokens)
        for reason, found in (("lost block", report.fallbacks), (LOAD_TIMEOUT, report.load_timeouts)):
            if found:
                self._counters["fallbacks"].labels(reason).inc(len(found))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text
