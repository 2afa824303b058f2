"""Prometheus metrics that the server and vLLM's endpoint both show: their labels and what they count. A name gets the
prefix ``cacheblend_`` in the server and ``vllm:cacheblend_`` in vLLM, whose own labels stand in front. Names, labels
and texts are part of the interface."""

from collections.abc import Mapping

Texts = Mapping[str, tuple[tuple[str, ...], str]]  # by name, labels and text
WHOSE = ("tenant", "selector", "settings")  # labels of checked answers: see `engines.shadow.watch.Labels`

FAILED = "What failed and was mended, by reason: answers are right, and what blending gains is lost."
"""Text of the counter ``failures``, which has the label reason."""

DISCOVERED: Texts = {
    "discovered_runs": ((), "Runs of text that were learnt from requests."),
    "discovered_stored_tokens": ((), "Tokens of learnt runs that were stored."),
    "discovered_hit_tokens": ((), "Tokens of prompts loaded from learnt runs."),
    "discovered_unwatched": ((), "Requests that came too fast to be learnt from."),
}
"""Counters of discovery."""

SHADOW_COUNTERS: Texts = {
    "shadow": (WHOSE, "Answers compared with full prefill."),
    "shadow_tokens": ((*WHOSE, "agreed"), "Answer tokens compared with full prefill."),
    "shadow_dropped": (("reason",), "Answers that were drawn and not compared."),
    "shadow_changes": (("direction",), "Steps of the recompute ratio."),
}
SHADOW_GAUGES: Texts = {
    "shadow_agreement": ((*WHOSE, "of"), "Agreement with full prefill in the window."),
    "shadow_agreement_bound": ((*WHOSE, "of"), "Its exact lower bound."),
    "shadow_ratio": ((), "Recompute ratio of requests that name none; 1: full."),
    "shadow_waiting": ((), "Answers that wait to be compared."),
}
SHADOW_KL = "KL(full || blended) of the first token, in nats."
"""Text of the histogram ``shadow_kl``, which has the labels `WHOSE`."""
