"""Carries the shadow check's figures to vLLM's Prometheus endpoint. Names and labels are part of the interface.

    scheduler side   watch ──> Counts: {name: {labels joined by "|": number, or numbers}}
    API server       what has come since the last time ──> counters, gauges, a histogram

vLLM adds labels of its own in front: model and engine.
"""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from cacheblend.engines.metrics import SHADOW_COUNTERS, SHADOW_GAUGES, SHADOW_KL, WHOSE
from cacheblend.engines.shadow import KL_BUCKETS

COMPARED, TOKENS, KL, DROPPED, CHANGES = "shadow", "shadow_tokens", "shadow_kl", "shadow_dropped", "shadow_changes"
AGREEMENT, BOUND, RATIO, WAITING = "shadow_agreement", "shadow_agreement_bound", "shadow_ratio", "shadow_waiting"

_GAUGES = {
    **SHADOW_GAUGES,
    AGREEMENT: ((*WHOSE, "of"), "Agreement with full prefill in the window; not a number: nothing was compared yet."),
    WAITING: ((), "Answers that were drawn and are not compared yet."),
}
REPLACED = frozenset(_GAUGES)
"""Of these the last values count; of all others the sums."""

NAMES = frozenset([*SHADOW_COUNTERS, *_GAUGES, KL])


def joined(*labels: str) -> str:
    """Labels as one string, as vLLM transports them."""
    return "|".join(labels)


class ShadowPromMetrics:
    """The metrics `vllm:cacheblend_shadow*`, of vLLM's own kinds of counters, gauges and histograms."""

    def __init__(self, metric_types: dict[Any, Any], labelnames: list[str]) -> None:
        def make(kind: Any, name: str, labels: tuple[str, ...], words: str, **options: Any) -> Any:
            named = {"name": f"vllm:cacheblend_{name}", "documentation": words, "labelnames": [*labelnames, *labels]}
            return metric_types[kind](**named, **options)

        self._counters = {name: make(Counter, name, *what) for name, what in SHADOW_COUNTERS.items()}
        self._gauges = {
            name: make(Gauge, name, *what, multiprocess_mode="mostrecent") for name, what in _GAUGES.items()
        }
        self._kl = make(Histogram, KL, WHOSE, SHADOW_KL, buckets=list(KL_BUCKETS))

    def observe(self, name: str, found: dict[str, Any], labels: list[object]) -> None:
        """Adds a step's values of one of `NAMES`; `labels` are vLLM's."""
        for text, value in found.items():
            every = [*labels, *(text.split("|") if text else ())]
            if name in self._counters:
                self._counters[name].labels(*every).inc(value)
            elif name in self._gauges:
                self._gauges[name].labels(*every).set(value)
            else:
                for each in value:
                    self._kl.labels(*every).observe(each)
