"""Text that recurs is learnt and reused inside vLLM, without a mark.

Situations: clients that name no chunks; the same passages in other orders, with prefix caching on; tenants by
`cache_salt`; r = 1, where answers are vLLM's own; requests at once; the setting off, and in vain.
"""

from pathlib import Path
from typing import Any

from vllm_running import Served, Texts, tokens


def requests(seed: int, count: int) -> tuple[Texts, list[list[int]]]:
    """Prompts of the same few passages in changing orders, each behind a text of its own."""
    texts = Texts(seed)
    held = texts.passages(4)
    found = []
    for _ in range(count):
        chosen = texts.rng.sample(held, 2)
        found.append([*texts.ids(20), *chosen[0], *texts.ids(5), *chosen[1], *texts.ids(12)])
    return texts, found


def test_passages_that_recur_are_loaded_and_answers_are_vllms_own(llama: Served) -> None:
    _, asked = requests(3, 12)
    plain = llama.run([{"ask": asked}], None)
    steps = [{"ask": asked, "alone": True}, {"forget": True}, {"ask": asked}, {"count": True}]
    found = llama.run(steps, {"recompute_ratio": 1.0, "discover": True, "min_reused_share": 0.0})["answers"]
    assert tokens(found[0]) == tokens(found[2]) == tokens(plain["answers"][0])
    counted = found[3]
    loaded = sum(value for name, value in counted.items() if "hit_tokens" in name and "vllm" not in name.split()[-1])
    assert counted["vllm:cacheblend_captured_tokens"] > 200 and loaded > 1000
    assert counted["vllm:cacheblend_discovered_runs"] >= 4


def test_nothing_is_learnt_without_the_setting_or_across_tenants(llama: Served, tmp_path: Path) -> None:
    _, asked = requests(4, 6)
    one_tenant: list[dict[str, Any]] = [{"ask": asked, "alone": True}, {"forget": True}, {"ask": asked}]
    a_tenant_each = [{"ask": [ids], "salt": f"tenant {number}"} for number, ids in enumerate(asked)]
    for extra, steps in (({}, one_tenant), ({"discover": True}, a_tenant_each)):
        settings = {"store": f"file://{tmp_path}/{len(extra)}", "min_reused_share": 0.0} | extra
        counted = llama.run([*steps, {"count": True}], settings)["answers"][-1]
        assert not counted.get("vllm:cacheblend_captured_tokens") and not counted.get("vllm:cacheblend_requests")
