"""The shadow check's figures on their way to vLLM's endpoint, with Prometheus' own counters."""

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cacheblend.engines.vllm.shadow_metrics import KL, NAMES, REPLACED, ShadowPromMetrics, joined


def test_counts_are_added_present_values_replaced_and_observations_observed() -> None:
    registry = CollectorRegistry()

    def of(kind: type) -> object:
        return lambda **options: kind(**options, registry=registry)

    made = ShadowPromMetrics({kind: of(kind) for kind in (Counter, Gauge, Histogram)}, ["model_name", "engine"])
    text = joined("ab12", "hkvd", "engine")
    for _ in range(2):
        made.observe("shadow", {text: 1}, ["m", "0"])
        made.observe("shadow_tokens", {joined(text, "yes"): 15, joined(text, "no"): 1}, ["m", "0"])
        made.observe("shadow_kl", {text: [0.02, 5.0]}, ["m", "0"])
        made.observe("shadow_agreement", {joined(text, "answer"): 0.9}, ["m", "0"])
        made.observe("shadow_ratio", {"": 0.15}, ["m", "0"])
    made.observe("shadow_agreement", {joined(text, "answer"): math.nan}, ["m", "0"])  # the window has begun anew
    whose = {"model_name": "m", "engine": "0", "tenant": "ab12", "selector": "hkvd", "settings": "engine"}
    value = registry.get_sample_value
    assert value("vllm:cacheblend_shadow_total", whose) == 2
    assert value("vllm:cacheblend_shadow_tokens_total", whose | {"agreed": "yes"}) == 30
    assert value("vllm:cacheblend_shadow_kl_sum", whose) == 10.04
    assert value("vllm:cacheblend_shadow_kl_bucket", whose | {"le": "0.03"}) == 2
    assert math.isnan(value("vllm:cacheblend_shadow_agreement", whose | {"of": "answer"}) or 0)
    assert value("vllm:cacheblend_shadow_ratio", {"model_name": "m", "engine": "0"}) == 0.15
    assert REPLACED < NAMES and KL in NAMES
