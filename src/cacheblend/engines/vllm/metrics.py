"""Counters of blending, reported through vLLM's own statistics: its log line and its Prometheus endpoint."""

import threading
from typing import Any

from prometheus_client import Counter

from cacheblend.core.failures import count_failure
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.engines.discovery import DiscoveryFigures
from cacheblend.engines.metrics import DISCOVERED
from cacheblend.engines.vllm import shadow_metrics
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.internals.decoder import connector_settings
from cacheblend.engines.vllm.internals.interface import KVConnectorPromMetrics, KVConnectorStats, VllmConfig
from cacheblend.engines.vllm.jobs import BlendOutcome
from cacheblend.engines.vllm.reasons import DECISIONS, LOST_BLOCK, NOT_WRITTEN

HIT_TOKENS, FALLBACKS, NOT_BLENDED = "hit_tokens", "fallbacks", "not_blended"


class Counts:
    """Counters since the last `take`; may be used from any thread."""

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

    def add_blend(self, outcome: BlendOutcome, result: PrefillResult) -> None:
        """Counts a prompt that was provided."""
        for source, count in outcome.hit_tokens.items():
            self.add(HIT_TOKENS, count, source)
        self.add("requests", 1)
        self.add("prompt_tokens", len(result.plan))
        self.add("recomputed_tokens", outcome.recomputed_tokens)
        self.add("row_layers", outcome.row_layers)
        self.add("load_seconds", result.report.load_s)
        self.add("wait_seconds", result.report.wait_s)
        self.add("blend_seconds", outcome.seconds)
        for _ in result.report.fallbacks:
            self.add_fallback(LOST_BLOCK)

    def take(self) -> "BlendStats | None":
        with self._lock:
            values, self._values = self._values, {}
        return BlendStats(data=values) if values else None


class BlendStats(KVConnectorStats):
    """`Counts` in the form that vLLM transports: by name and label numbers, or lists of them."""

    data: dict[str, dict[str, Any]]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "BlendStats":
        """The sum of two steps, of which `other` is the later one."""
        joined = dict(self.data)
        for name, value in other.data.items():
            mine = {} if name in shadow_metrics.REPLACED else joined.get(name, {})
            summed = {label: mine[label] + count if label in mine else count for label, count in value.items()}
            joined[name] = joined.get(name, {}) | summed
        return BlendStats(data=joined)

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


_PLAIN = {
    "requests": "Requests whose prompts were blended.",
    "prompt_tokens": "Tokens of blended prompts.",
    "recomputed_tokens": "Loaded tokens that were recomputed after the last selection.",
    "row_layers": "Rows times layers that blending computed.",
    "captured_tokens": "Tokens of missed chunks that were computed alone and stored.",
    **{name: words for name, (_, words) in DISCOVERED.items()},
    "load_seconds": "Seconds of reading stored KV and copying it to the device.",
    "wait_seconds": "Seconds that blending waited for stored KV.",
    "blend_seconds": "Seconds from the first layer of a blended prompt to its last.",
}
_LABELLED = {
    HIT_TOKENS: ("source", "Tokens of blended prompts whose KV was reused."),
    NOT_BLENDED: ("reason", "Requests that vLLM computed, by why they were not blended."),
    FALLBACKS: ("reason", "Times that stored KV could not be reused or missed chunks could not be stored."),
}


class BlendPromMetrics(KVConnectorPromMetrics):
    """The Prometheus counters `vllm:cacheblend_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        known: dict[str, tuple[list[str], str]] = {name: ([], words) for name, words in _PLAIN.items()}
        known |= {name: ([label], words) for name, (label, words) in _LABELLED.items()}
        self._counters = {
            name: metric_types[Counter](
                name=f"vllm:cacheblend_{name}", documentation=words, labelnames=[*labelnames, *labels]
            )
            for name, (labels, words) in known.items()
        }
        settings = connector_settings(vllm_config)
        is_checked = settings is not None and read_config(settings).shadow_settings is not None
        self._shadow = shadow_metrics.ShadowPromMetrics(metric_types, labelnames) if is_checked else None
        self._engines = per_engine_labelvalues
        for values in per_engine_labelvalues.values():
            for name in _PLAIN:
                self._counters[name].labels(*values).inc(0)  # shown from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._engines[engine_idx]
        for name, found in transfer_stats_data.items():
            if name in self._counters:
                for label, count in found.items():
                    self._counters[name].labels(*values, *([label] if name in _LABELLED else [])).inc(count)
            elif self._shadow is not None and name in shadow_metrics.NAMES:
                self._shadow.observe(name, found, list(values))
