"""Figures of a running server, for Prometheus. The metrics' names are part of the interface: do not rename them."""

import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend.core.load.breaker import LateTiers
from cacheblend.core.load.budget import LOAD_TIMEOUT
from cacheblend.core.report import BlendReport
from cacheblend.engines.discovery import DiscoveryFigures
from cacheblend.engines.hf.shadowing import ShadowCheck
from cacheblend.serve.shadow_metrics import ShadowCollector
from cacheblend.serve.store_metrics import StoreWatch
from cacheblend.store import KVStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_GAPS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


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
