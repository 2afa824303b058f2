"""Counters of blending, reported through vLLM's own statistics: its log line and its Prometheus endpoint."""

import threading
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from cacheblend.core.failures import KNOWN, count_failure, take_failures
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.engines.discovery import DiscoveryFigures
from cacheblend.engines.metrics import DISCOVERED, FAILED, SHADOW_COUNTERS, SHADOW_GAUGES, SHADOW_KL, WHOSE, Texts
from cacheblend.engines.shadow import KL_BUCKETS
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.internals.decoder import connector_settings
from cacheblend.engines.vllm.internals.interface import KVConnectorPromMetrics, KVConnectorStats, VllmConfig
from cacheblend.engines.vllm.jobs import BlendOutcome
from cacheblend.engines.vllm.reasons import DECISIONS, LOST_BLOCK, NOT_WRITTEN

HIT_TOKENS, NOT_BLENDED, FALLBACKS, FAILURES = "hit_tokens", "not_blended", "fallbacks", "failures"
COMPARED, TOKENS, KL, DROPPED, CHANGES = "shadow", "shadow_tokens", "shadow_kl", "shadow_dropped", "shadow_changes"
MISSED_TOKENS, NEAR_MISSES = "missed_tokens", "near_miss_tokens"
AGREEMENT, BOUND, RATIO, WAITING = "shadow_agreement", "shadow_agreement_bound", "shadow_ratio", "shadow_waiting"

_PLAIN: Texts = {
    "requests": ((), "Requests whose prompts were blended."),
    "prompt_tokens": ((), "Tokens of blended prompts."),
    "recomputed_tokens": ((), "Loaded tokens that were recomputed after the last selection."),
    "row_layers": ((), "Rows times layers that blending computed."),
    "captured_tokens": ((), "Tokens of missed chunks that were computed alone, and of histories, that were stored."),
    MISSED_TOKENS: ((), "Tokens of chunks that were not stored."),
    NEAR_MISSES: ((), "Those of them that are stored with another beginning or end."),
    **DISCOVERED,
    "load_seconds": ((), "Seconds of reading stored KV and copying it to the device."),
    "wait_seconds": ((), "Seconds that blending waited for stored KV."),
    "blend_seconds": ((), "Seconds from the first layer of a blended prompt to its last."),
}
_LABELLED: Texts = {
    HIT_TOKENS: (("source",), "Tokens of blended prompts whose KV was reused."),
    NOT_BLENDED: (("reason",), "Requests that vLLM computed, by why they were not blended."),
    FALLBACKS: (("reason",), "Times that stored KV could not be reused or missed chunks could not be stored."),
    FAILURES: (("reason",), FAILED),
}
_GAUGES: Texts = {
    **SHADOW_GAUGES,
    AGREEMENT: ((*WHOSE, "of"), "Agreement with full prefill in the window; not a number: nothing was compared yet."),
    WAITING: ((), "Answers that were drawn and are not compared yet."),
}
REPLACED = frozenset(_GAUGES)  # of these the last values count; of all others the sums


def joined(*labels: str) -> str:
    """Labels as one string, as vLLM transports them."""
    return "|".join(labels)


class Counts:
    """Counters since the last `take`; may be used from any thread. What failed is the process's, whoever takes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: float, label: str = "") -> None:
        """Adds to a counter, of those that are kept by source or by reason to this one's."""
        with self._lock:
            labels = self._values.setdefault(name, {})
            labels[label] = labels.get(label, 0) + value

    def add_to(self, name: str, label: str, value: float) -> None:
        """Adds to a list of observations that is kept by label."""
        with self._lock:
            self._values.setdefault(name, {}).setdefault(label, []).append(value)

    def put(self, name: str, values: dict[str, float]) -> None:
        with self._lock:
            self._values.setdefault(name, {}).update(values)

    def add_fallback(self, reason: str) -> None:
        """Counts stored KV that was computed instead of reused, or not stored; see `reasons`."""
        self.add(FALLBACKS, 1, reason)
        if reason not in DECISIONS and reason not in (LOST_BLOCK, NOT_WRITTEN):  # who met these has counted them
            count_failure(reason)

    def add_discovered(self, now: DiscoveryFigures, before: DiscoveryFigures) -> DiscoveryFigures:
        """Counts what discovery has done since; returns `now`."""
        for name in ("runs", "stored_tokens", "hit_tokens", "unwatched"):
            if getattr(now, name) > getattr(before, name):
                self.add(f"discovered_{name}", getattr(now, name) - getattr(before, name))
        return now

    def add_blended(self, outcome: BlendOutcome) -> None:
        """Counts a blended request that has ended, once however often it was preempted: as its client is told."""
        for source, count in outcome.hit_tokens.items():
            self.add(HIT_TOKENS, count, source)
        self.add("requests", 1)
        for name in ("prompt_tokens", "recomputed_tokens", "row_layers"):
            self.add(name, getattr(outcome, name))

    def add_work(self, outcome: BlendOutcome, result: PrefillResult) -> None:
        self.add("load_seconds", result.report.load_s)
        self.add("wait_seconds", result.report.wait_s)
        self.add("blend_seconds", outcome.seconds)

    def take(self) -> "BlendStats | None":
        with self._lock:
            values, self._values = self._values, {}
        if failed := take_failures():
            values[FAILURES] = dict(failed)
        return BlendStats(data=values) if values else None


class BlendStats(KVConnectorStats):
    """`Counts` in the form that vLLM transports: by name and label numbers, or lists of them."""

    data: dict[str, dict[str, Any]]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "BlendStats":
        whole = dict(self.data)
        for name, value in other.data.items():
            mine = {} if name in REPLACED else whole.get(name, {})
            summed = {label: mine[label] + count if label in mine else count for label, count in value.items()}
            whole[name] = whole.get(name, {}) | summed
        return BlendStats(data=whole)

    def reduce(self) -> dict[str, int | float]:
        """All counts by one name each, for the log line."""
        flat: dict[str, int | float] = {}
        for name, value in self.data.items():
            for label, count in value.items():
                number = sum(count) / len(count) if isinstance(count, list) else count  # the mean of observations
                flat[f"{name} {label}".strip()] = round(number, 4)
        return flat

    def is_empty(self) -> bool:
        return not self.data


class BlendPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics `vllm:cacheblend_*`, of vLLM's own kinds: what has come since the last time is added to
    counters and a histogram, gauges are set. Those of the shadow check are there where it is on. Names and labels are
    part of the interface; vLLM's own labels, model and engine, stand in front."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: Any, name: str, labels: tuple[str, ...], words: str, **options: Any) -> Any:
            named = {"name": f"vllm:cacheblend_{name}", "documentation": words, "labelnames": [*labelnames, *labels]}
            return metric_types[kind](**named, **options)

        settings = connector_settings(vllm_config)
        is_checked = settings is not None and read_config(settings).shadow_settings is not None
        counters = {**_PLAIN, **_LABELLED, **(SHADOW_COUNTERS if is_checked else {})}
        self._metrics = {name: make(Counter, name, *what) for name, what in counters.items()}
        if is_checked:
            for name, what in _GAUGES.items():
                self._metrics[name] = make(Gauge, name, *what, multiprocess_mode="mostrecent")
            self._metrics[KL] = make(Histogram, KL, WHOSE, SHADOW_KL, buckets=list(KL_BUCKETS))
        self._engines = per_engine_labelvalues
        for values in per_engine_labelvalues.values():
            for name in _PLAIN:
                self._metrics[name].labels(*values).inc(0)  # shown from the start
            for reason in KNOWN:
                self._metrics[FAILURES].labels(*values, reason).inc(0)  # else the first one would be no increase

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, found in transfer_stats_data.items():
            for text, value in found.items() if name in self._metrics else ():
                own = (text,) if name in _LABELLED else text.split("|") if text else ()  # a reason may have any letter
                metric = self._metrics[name].labels(*self._engines[engine_idx], *own)
                if name in REPLACED:
                    metric.set(value)
                elif name == KL:
                    for each in value:
                        metric.observe(each)
                else:
                    metric.inc(value)
