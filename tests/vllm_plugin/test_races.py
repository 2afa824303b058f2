"""Plain and blended requests that share a front and arrive in the same engine step, in every order."""

import json

from cacheblend.bench.faults.scenes import draw
from cacheblend.bench.vllm_faults import Settings, run
from vllm_running import needs_vllm

SEED = 5


@needs_vllm
def test_no_plain_request_is_answered_otherwise_than_without_the_plugin() -> None:
    """Prompts in pieces; and beside a connector that loads within the step, where vLLM delivers jobs before the forward
    that computes the shared front."""
    found = run(Settings(tried=80, seed=SEED, only=("pollution",), engines=("pieces", "two connectors")))
    figures, words = found["figures"], json.dumps(found["campaigns"], indent=1)
    assert figures["pollution_tried"] >= 160
    assert (figures["polluted"], figures["wrong"], figures["ended"], figures["hung"]) == (0, 0, 0, 0), words


def test_scenes_hold_the_situations_that_they_are_for() -> None:
    """Or the test above shows nothing."""
    scenes = draw(SEED, 60, 32)
    orders, aborted, fronts = set(), 0, set()
    for scene in scenes:
        first = [each for each in scene.arrivals if each.step == 0]
        orders.add(tuple(each.is_plain for each in first))
        aborted += sum(each.aborted is not None for each in scene.arrivals)
        fronts |= {each.request.spans[0][0] % 32 for each in first if each.request.spans}
    assert {(True, False), (False, True), (True, False, False), (False, True, False)} <= orders
    assert len(orders) >= 15
    assert aborted >= 10
    assert {0, 1, 31} <= fronts  # on a block's border, and beside it
    assert scenes == draw(SEED, 80, 32)[:60]
