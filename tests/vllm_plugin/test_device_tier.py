"""Stored records on the ranks' devices, in vLLM itself; a CPU stands in for them."""

from pathlib import Path
from typing import Any

import pytest

from vllm_running import TWO_RANKS, Served, Texts, ask, tokens

pytestmark = pytest.mark.usefixtures("extension")


@pytest.mark.parametrize("ranks", [1, 2])
def test_hot_records_are_read_from_the_device_and_answers_are_the_same(
    llama: Served, tmp_path: Path, ranks: int
) -> None:
    """One process shares all tiers; of two ranks each keeps its heads, and the scheduler looks up without them."""
    texts = Texts(43)
    passages = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(4)]
    both = ask(asked)
    reads, tier = {"rpc": ["disk_reads"]}, {"rpc": ["device_tier"]}
    engine: dict[str, Any] = {"enable_prefix_caching": False, "worker_extension_cls": "standing_in.OnCpu"}
    if ranks > 1:
        engine |= TWO_RANKS
    extra = {"store": f"cuda://?max_bytes=64MiB, file://{tmp_path}/store", "recompute_ratio": 0.2}
    steps = [ask(asked, alone=True), both, reads, both, reads, tier, {"forget": "connector"}]
    steps += [{"ask": both["ask"]}, tier]
    result = llama.run(steps, extra, **engine)
    _, first, before, second, after, full, _, _, emptied = result["answers"]
    assert tokens(first) == tokens(second)
    assert before == after
    assert all(each["tiers"] == ["cuda", "disk"] and each["bytes"] > 0 for each in full)
    assert all(each["bytes"] == 0 for each in emptied), emptied
    hits = {name.rpartition(" ")[2] for name, count in result["metrics"].items() if "hit_tokens" in name and count}
    assert "cuda" in hits if ranks == 1 else "disk" in hits and "cuda" not in hits, result["metrics"]
    plain = {**extra, "store": f"file://{tmp_path}/store"}
    again = llama.run([both], plain, **engine)["answers"][0]
    assert tokens(again) == tokens(first)


def test_a_cpu_refuses_the_tier_before_anything_is_served(llama: Served, tmp_path: Path) -> None:
    found = llama.start([], {"store": f"cuda://?max_bytes=64MiB, file://{tmp_path}/store"})
    assert "this vLLM computes on a CPU: leave cuda:// out" in found["words"]
