"""Plain and blended requests that share a front and arrive in the same engine step, in every order."""

import json

from lab.faults.run import Settings, run
from vllm_running import needs_vllm


@needs_vllm
def test_no_plain_request_is_answered_otherwise_than_without_the_plugin() -> None:
    """Prompts in pieces; and beside a connector that loads within the step, where vLLM delivers jobs before the forward
    that computes the shared front."""
    found = run(Settings(tried=80, seed=5, only=("pollution",), engines=("pieces", "two connectors")))
    figures, words = found["figures"], json.dumps(found["campaigns"], indent=1)
    assert figures["pollution_tried"] >= 160
    for engine in found["campaigns"]["pollution"]["engines"].values():
        assert engine["blended"] >= 15 and engine["beside"] >= 5, words  # or nothing was shown
    assert (figures["polluted"], figures["wrong"], figures["ended"], figures["hung"]) == (0, 0, 0, 0), words
