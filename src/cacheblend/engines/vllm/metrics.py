"""What blending did, through vLLM's own statistics: its log line, and its Prometheus endpoint."""

import threading
from typing import Any

from prometheus_client import Counter

from cacheblend.core.fuse.result import PrefillResult
from cacheblend.engines.vllm.compat import KVConnectorPromMetrics, KVConnectorStats, VllmConfig

HIT_TOKENS, FALLBACKS = "hit_tokens", "fallbacks"


class Counts:
    """Counters since they were last taken; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: float) -> None:
        """Of a plain counter."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    def add_by(self, name: str, label: str, value: float) -> None:
        """Of one that is kept by source or by reason."""
        with self._lock:
            labels = self._values.setdefault(name, {})
            labels[label] = labels.get(label, 0) + value

    def add_fallback(self, reason: str) -> None:
        """Something that was to be reused was computed instead."""
        self.add_by(FALLBACKS, reason, 1)

    def add_blend(self, result: PrefillResult, local_tokens: int, seconds: float) -> None:
        """A prompt that was provided.

        Args:
            result: of its pass.
            local_tokens: of its prefix hits, those of vLLM's own cache.
            seconds: from its first layer to its last, other work between them included.
        """
        hits = result.plan.hit_tokens()
        local = min(local_tokens, hits["prefix"])  # none of them, where all had to be computed in the end
        for source, count in {**hits, "vllm": local, "prefix": hits["prefix"] - local}.items():
            if count:
                self.add_by(HIT_TOKENS, source, count)
        self.add("requests", 1)
        self.add("prompt_tokens", len(result.plan))
        self.add("recomputed_tokens", result.report.recomputed_tokens)
        self.add("row_layers", result.report.row_layers)
        self.add("load_seconds", result.report.load_s)
        self.add("wait_seconds", result.report.wait_s)
        self.add("blend_seconds", seconds)
        for _ in result.report.fallbacks:
            self.add_fallback("block lost")

    def take(self) -> "BlendStats | None":
        """What was counted since the last call; None: nothing."""
        with self._lock:
            values, self._values = self._values, {}
        return BlendStats(data=values) if values else None


class BlendStats(KVConnectorStats):
    """`Counts` on their way through vLLM: numbers, and numbers by label."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Nothing is left."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "BlendStats":
        """Of two steps, summed."""
        joined = dict(self.data)
        for name, value in other.data.items():
            if isinstance(value, dict):
                mine = dict(joined.get(name, {}))
                joined[name] = mine | {label: mine.get(label, 0) + count for label, count in value.items()}
            else:
                joined[name] = joined.get(name, 0) + value
        return BlendStats(data=joined)

    def reduce(self) -> dict[str, int | float]:
        """Flat, for the log line."""
        flat: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, dict):
                flat |= {f"{name} {label}": count for label, count in value.items()}
            else:
                flat[name] = round(value, 4)
        return flat

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


_PLAIN = {
    "requests": "Requests whose prompts were blended.",
    "prompt_tokens": "Tokens of these prompts.",
    "recomputed_tokens": "Loaded tokens that were recomputed behind the last selection.",
    "row_layers": "Rows times layers that blending computed.",
    "captured_tokens": "Tokens of missed chunks that were computed alone and stored.",
    "load_seconds": "Time that reading and placing stored KV took.",
    "wait_seconds": "Of that, what blending waited for.",
    "blend_seconds": "Time from a blended prompt's first layer to its last.",
}
_LABELLED = {
    HIT_TOKENS: ("source", "Tokens of blended prompts that were not computed from nothing."),
    FALLBACKS: ("reason", "What was to be reused and was computed instead."),
}


class BlendPromMetrics(KVConnectorPromMetrics):
    """Counters `vllm:cacheblend_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._plain = {
            name: make(name=f"vllm:cacheblend_{name}", documentation=words, labelnames=labelnames)
            for name, words in _PLAIN.items()
        }
        self._labelled = {
            name: make(name=f"vllm:cacheblend_{name}", documentation=words, labelnames=[*labelnames, label])
            for name, (label, words) in _LABELLED.items()
        }
        self._engines = per_engine_labelvalues
        for values in per_engine_labelvalues.values():
            for counter in self._plain.values():
                counter.labels(*values).inc(0)  # shown from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds a step's counts."""
        values = self._engines[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._labelled:
                for label, count in value.items():
                    self._labelled[name].labels(*values, label).inc(count)
            elif name in self._plain:
                self._plain[name].labels(*values).inc(value)
