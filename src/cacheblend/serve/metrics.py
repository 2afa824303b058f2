"""Figures of a running server, its store and its shadow check, for Prometheus, which asks for them.

The names of the metrics are part of the interface: do not rename them.
"""

import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend.core.load.breaker import LateTiers
from cacheblend.core.load.budget import LOAD_TIMEOUT, LOOK_UP
from cacheblend.core.report import BlendReport
from cacheblend.engines.discovery import DiscoveryFigures
from cacheblend.engines.hf.shadow_check import ShadowCheck
from cacheblend.engines.shadow import ShadowFigures
from cacheblend.engines.shadow.watch import KL_BUCKETS, SeriesFigures
from cacheblend.store import KVStore, StoreStats

LABELS = ("model", "tenant", "selector", "settings")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_GAPS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class StoreWatch(Collector):  # type: ignore[misc, unused-ignore]
    """Bytes, blocks and errors of each tier; asks the store when Prometheus does. Safe to call from several threads.

    Args:
        store: the server's.
        late_tiers: those that requests pass over, which are not asked; None: there are none.
    """

    def __init__(self, store: KVStore, late_tiers: LateTiers | None = None) -> None:
        self._late_tiers = late_tiers or LateTiers()
        self._tiers = store.tiers()
        self._lock = threading.Lock()
        self._no_answer = dict.fromkeys(self._tiers, 0)

    def stats(self) -> Mapping[str, StoreStats | None]:
        """By tier; None for one that does not answer, or answered requests too late, which is counted."""
        found: dict[str, StoreStats | None] = {}
        for name, tier in self._tiers.items():
            try:
                found[name] = tier.stats() if tier.is_reachable and not self._is_late(name) else None
            except Exception:  # whatever it is, this tier is of no use now
                found[name] = None
            if found[name] is None:
                with self._lock:
                    self._no_answer[name] += 1
        return found

    def _is_late(self, tier: str) -> bool:
        return max(self._late_tiers.left_s(tier), self._late_tiers.left_s(LOOK_UP)) > 0

    def down(self) -> list[str]:
        """Tiers that do not answer."""
        return [name for name, stats in self.stats().items() if stats is None]

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        nbytes = GaugeMetricFamily("cacheblend_store_bytes", "Bytes of stored blocks.", labels=["tier"])
        blocks = GaugeMetricFamily("cacheblend_store_blocks", "Stored blocks.", labels=["tier"])
        up = GaugeMetricFamily("cacheblend_store_up", "1 if the tier answers, else 0.", labels=["tier"])
        what = "What a store failed to do: answer when asked for its state, write a block, keep it undamaged."
        errors = CounterMetricFamily("cacheblend_store_errors", what, labels=["tier", "what"])
        for name, stats in self.stats().items():
            up.add_metric([name], stats is not None)
            errors.add_metric([name, "answer"], self._no_answer[name])
            if stats is not None:
                nbytes.add_metric([name], stats.bytes)
                blocks.add_metric([name], stats.blocks)
                errors.add_metric([name, "write"], stats.write_failures)
                errors.add_metric([name, "damage"], stats.damaged)
        return [nbytes, blocks, up, errors]


class ShadowCollector(Collector):  # type: ignore[misc, unused-ignore]
    """Figures of the shadow check of one engine.

    Args:
        figures: gives the present ones.
        waiting: number of answers that wait to be compared.
    """

    def __init__(self, figures: Callable[[], ShadowFigures], waiting: Callable[[], int]) -> None:
        self._figures, self._waiting = figures, waiting

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        figures = self._figures()
        yield from _of_series(figures)
        model = [figures.model]
        dropped = CounterMetricFamily(
            "cacheblend_shadow_dropped", "Answers that were drawn and not compared.", labels=["model", "reason"]
        )
        for reason, count in figures.dropped.items():
            dropped.add_metric([*model, reason], count)
        changes = CounterMetricFamily(
            "cacheblend_shadow_changes", "Steps of the recompute ratio.", labels=["model", "direction"]
        )
        changes.add_metric([*model, "raised"], figures.raised)
        changes.add_metric([*model, "lowered"], figures.lowered)
        waiting = GaugeMetricFamily("cacheblend_shadow_waiting", "Answers that wait to be compared.", labels=["model"])
        waiting.add_metric(model, self._waiting())
        ratio = GaugeMetricFamily(
            "cacheblend_shadow_ratio", "Recompute ratio of requests that name none; 1: full.", labels=["model"]
        )
        if figures.ratio is not None:
            ratio.add_metric(model, figures.ratio)
        yield from (dropped, changes, waiting, ratio)


def _of_series(figures: ShadowFigures) -> Iterator[Metric]:
    total = CounterMetricFamily("cacheblend_shadow", "Answers compared with full prefill.", labels=LABELS)
    tokens = CounterMetricFamily(
        "cacheblend_shadow_tokens", "Answer tokens compared with full prefill.", labels=[*LABELS, "agreed"]
    )
    kl = HistogramMetricFamily(
        "cacheblend_shadow_kl", "KL(full || blended) of the first token, in nats.", labels=LABELS
    )
    share = GaugeMetricFamily(
        "cacheblend_shadow_agreement", "Agreement with full prefill in the window.", labels=[*LABELS, "of"]
    )
    bound = GaugeMetricFamily("cacheblend_shadow_agreement_bound", "Its exact lower bound.", labels=[*LABELS, "of"])
    for series in figures.series:
        labels = [figures.model, *series.labels]
        total.add_metric(labels, series.compared)
        tokens.add_metric([*labels, "yes"], series.agreed)
        tokens.add_metric([*labels, "no"], series.differed)
        kl.add_metric(labels, _buckets(series), series.kl_sum)
        for of, (agreement, least, rows) in series.agreement.items():
            if rows:
                share.add_metric([*labels, of], agreement)
                bound.add_metric([*labels, of], least)
    yield from (total, tokens, kl, share, bound)


def _buckets(series: SeriesFigures) -> list[tuple[str, float]]:
    """Cumulated counts by upper end."""
    ends = [*map(str, KL_BUCKETS), "+Inf"]
    counts = [sum(series.kl_counts[: number + 1]) for number in range(len(ends))]
    return list(zip(ends, map(float, counts), strict=True))


class _GivenUp(Collector):  # type: ignore[misc, unused-ignore]
    """Chunks that were missed and could not be stored, by reason."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        found = CounterMetricFamily(
            "cacheblend_captures_given_up", "Missed chunks that were not stored, by reason.", labels=["reason"]
        )
        for reason, count in self._counts().items():
            found.add_metric([reason], count)
        return [found]


class _Discovered(Collector):  # type: ignore[misc, unused-ignore]
    """What discovery has found, stored and reused."""

    def __init__(self, figures: Callable[[], DiscoveryFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        counted = {
            "runs": ("Runs of text that were learnt from requests.", figures.runs),
            "stored_tokens": ("Tokens of learnt runs that were stored.", figures.stored_tokens),
            "hit_tokens": ("Tokens of prompts loaded from learnt runs.", figures.hit_tokens),
            "unwatched": ("Requests that came too fast to be learnt from.", figures.unwatched),
        }
        for name, (what, value) in counted.items():
            yield CounterMetricFamily(f"cacheblend_discovered_{name}", what, value=value)
        wasted = "Tokens of learnt runs that were stored and that no prompt has used."
        yield GaugeMetricFamily("cacheblend_discovered_wasted_tokens", wasted, value=figures.wasted_tokens)
        yield GaugeMetricFamily(
            "cacheblend_watched_tokens", "Recent tokens kept to learn from.", figures.watched_tokens
        )


def _build_info(registry: CollectorRegistry) -> None:
    """``cacheblend_build_info``: versions, as labels of a constant."""
    versions = {name: version(name) for name in ("cacheblend", "torch", "transformers")}
    Info("cacheblend_build", "Versions.", registry=registry).info(
        {"version": versions.pop("cacheblend"), "python": platform.python_version(), **versions}
    )


class Metrics:
    """The metrics of one server; safe to call from several threads.

    Args:
        store: the store whose bytes are reported.
        waiting, active: return the present number of such requests.
        given_up: see `Background.given_up`.
        shadow: the engine's shadow check; None: it has none.
        discovered: figures of the engine's discovery; None: it has none.
        late_tiers: of the engine, that requests pass over.

    Attributes:
        store: whether its tiers answer.
    """

    def __init__(
        self,
        store: KVStore,
        waiting: Callable[[], int],
        active: Callable[[], int],
        given_up: Callable[[], Mapping[str, int]] = dict,
        shadow: ShadowCheck | None = None,
        discovered: Callable[[], DiscoveryFigures] | None = None,
        late_tiers: LateTiers | None = None,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.store = StoreWatch(store, late_tiers)
        registry.register(self.store)
        ProcessCollector(registry=registry)
        _build_info(registry)
        registry.register(_GivenUp(given_up))
        if shadow is not None:
            registry.register(ShadowCollector(shadow.watch.figures, lambda: shadow.waiting))
        if discovered is not None:
            registry.register(_Discovered(discovered))
        self._ttft = Histogram(
            "cacheblend_ttft_seconds",
            "Time to first token, including the time in the queue.",
            ["mode"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._gap = Histogram(
            "cacheblend_inter_token_seconds", "Time between two tokens.", buckets=_GAPS, registry=registry
        )

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"cacheblend_{name}", what, labels, registry=registry)

        self._requests = counter("requests", "Requests, by HTTP status.", "status")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generated_tokens", "Tokens of answers.")
        self._hits = counter("hit_tokens", "Tokens of prompts found in the store, by tier.", "source")
        self._missed = counter("missed_tokens", "Tokens of chunks that were not stored.")
        self._recomputed = counter("recomputed_tokens", "Tokens loaded and recomputed.")
        self._changed = counter("changed_contents", "Texts of chats that the chat template changed or dropped.")
        self._fallbacks = counter("fallbacks", "Stored KV that was computed instead, by reason.", "reason")
        for name, what, now in (
            ("cacheblend_requests_waiting", "Requests in the queue.", waiting),
            ("cacheblend_requests_active", "Requests being prefilled or decoded.", active),
        ):
            Gauge(name, what, registry=registry).set_function(now)

    def request(self, status: int) -> None:
        """Counts a response."""
        self._requests.labels(str(status)).inc()

    def gap(self, seconds: float) -> None:
        """Records the time between two tokens of an answer."""
        self._gap.observe(seconds)

    def report(self, report: BlendReport, mode: str) -> None:
        """Records a request that had at least its first token."""
        self._ttft.labels(mode).observe(report.ttft_s)
        self._prompt.inc(report.prompt_tokens)
        self._generated.inc(report.generated_tokens)
        self._missed.inc(report.missed_tokens)
        self._recomputed.inc(report.recomputed_tokens)
        self._changed.inc(report.changed_contents)
        for source, tokens in report.hit_tokens.items():
            self._hits.labels(source).inc(tokens)
        if report.fallbacks:
            self._fallbacks.labels("lost block").inc(len(report.fallbacks))
        if report.load_timeouts:
            self._fallbacks.labels(LOAD_TIMEOUT).inc(len(report.load_timeouts))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text
