"""LoRA adapters in unmodified vLLM: requests of each blend with it, and find only what was stored with it.

vLLM's CPU build computes rows without an adapter, in one batch with rows that have one, with the last slot's: so the
engines here have a slot more than adapters wherever the base model is asked beside them.
"""

from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_checks
import vllm_running
from vllm_adapters import make_adapter, merged
from vllm_running import COUNT, TWO_RANKS, Asked, Served, Texts, Vllm, check_blended, check_oracle, close

TOLD: dict[str, Any] = {"sampling": {"max_tokens": 6, "logprobs": 4}}


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Three adapters: one of all layers' parts, one of attention alone with another rank, one of the embedding too."""
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        "a": make_adapter(root / "a", 1),
        "b": make_adapter(root / "b", 2, rank=8, modules=("q_proj", "v_proj", "down_proj")),
        "c": make_adapter(root / "c", 3, embeds=True),
    }
    return {
        name: {"name": name, "number": number, "path": str(folder)}
        for number, (name, folder) in enumerate(folders.items(), 1)
    }


@cache
def merged_model(model: Path, adapter: Path) -> Any:
    with TemporaryDirectory() as folder:
        return AutoModelForCausalLM.from_pretrained(
            merged(model, adapter, Path(folder) / "merged"), dtype=torch.float32
        )


def engine(slots: int = 4, **more: Any) -> dict[str, Any]:
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": 8, **more}


def asked(seed: int, count: int, passages: int = 3) -> list[Asked]:
    texts = Texts(seed)
    held = texts.passages(5)
    return [texts.prompt(texts.rng.sample(held, passages)) for _ in range(count)]


def ask(prompts: list[Asked], adapters: list[Any], **more: Any) -> dict[str, Any]:
    return vllm_running.ask(prompts, adapters=adapters, **{**TOLD, **more})


def plain(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "chunks"}


@pytest.mark.feature("LoRA adapters", "blends")
def test_adapters_and_the_base_blend_alternately_and_in_one_step(llama: Served, adapters: dict[str, Any]) -> None:
    """The same passages with each, one by one, found by content, and all at once: at ratio 1 as vLLM answers."""
    prompts = asked(3, 8)
    whose = [None, *adapters.values()] * 2
    alone = ask(prompts, whose, alone=True)
    at_once = ask([prompts[0]] * 4 + [prompts[1]] * 4, whose)
    expected = llama.run([plain(alone), plain({**at_once, "alone": True})], None, **engine())
    steps = [alone, alone, {"forget": True}, COUNT, plain(alone), {"forget": True}, COUNT, at_once, COUNT]
    found = llama.run(steps, {"recompute_ratio": 1.0, "min_reused_share": 0.1}, **engine())
    answers = found["answers"]
    for step in (0, 1, 4):
        close(answers[step], expected["answers"][0])
    close(answers[7], expected["answers"][1])
    blended = [answers[step]["vllm:cacheblend_requests"] for step in (3, 6, 8)]
    assert blended[1] - blended[0] == 8
    assert blended[2] - blended[1] == 8
    assert "vllm:cacheblend_fallbacks" not in " ".join(found["metrics"])
    per = [{one["tokens"][0][0] for one in expected["answers"][0][at::4]} for at in range(4)]
    assert len(set(map(frozenset, per))) == 4  # each answers in its own way, or this would show little


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle_with_the_adapter_merged(
    llama: Served, adapters: dict[str, Any], in_pages: bool
) -> None:
    prompts = asked(21, 6, passages=4)
    whose = [*adapters.values()] * 2
    first = {"sampling": {"max_tokens": 1, "logprobs": 8}}
    steps = [ask(prompts, whose, alone=True), {"forget": True}, ask(prompts, whose, **first)]
    result = llama.run(steps, {"recompute_ratio": 0.2, "check_layers": [1], "in_pages": in_pages}, **engine())
    check_blended(result, len(prompts))
    for one, mine, answer in zip(prompts, whose, result["answers"][2], strict=True):
        model = merged_model(llama.model, Path(mine["path"]))
        assert check_oracle(model, [one], [answer], within=3e-3) == 0


def test_weights_replaced_under_the_same_name_find_nothing_of_the_old_ones(
    llama: Served, adapters: dict[str, Any], tmp_path: Path
) -> None:
    """In place, from the same path; later the first weights come back, and what was stored with them is used again."""
    prompts, live = asked(5, 3), {"name": "live", "number": 7, "path": str(tmp_path / "live")}
    step = ask(prompts, [live] * 3, alone=True)
    both = [plain(ask(prompts, [adapters[name]] * 3, alone=True)) for name in "ab"]
    expected = llama.run(both, None, **engine())["answers"]

    def load(name: str) -> list[dict[str, Any]]:
        files = {"copy": [adapters[name]["path"], live["path"]]}
        return [files, {"load": {**live, "inplace": True}}, {"forget": True}]

    again = [step, {"forget": True}, COUNT, step, COUNT]
    steps = [*load("a"), *again, *load("b"), *again, *load("a"), *again]
    found = llama.run(steps, {"recompute_ratio": 1.0, "min_reused_share": 0.1}, **engine(2))
    answers = found["answers"]
    for at, right in ((3, 0), (6, 0), (11, 1), (14, 1), (19, 0), (22, 0)):
        close(answers[at], expected[right])
    blended = [[answers[at]["vllm:cacheblend_requests"] for at in (at, at + 2)] for at in (5, 13, 21)]
    assert [after - before for before, after in blended] == [3, 3, 3]
    changed = [answers[at].get("vllm:cacheblend_fallbacks LoRA changed", 0) for at in (7, 15, 23)]
    assert changed[0] == 0 and changed[2] >= changed[1] >= 1  # the first request after each change


@pytest.mark.parametrize("slots", [1, 2])
def test_more_adapters_than_slots_blend_in_turn(llama: Served, adapters: dict[str, Any], slots: int) -> None:
    """At once and one by one; where vLLM keeps as many in memory as it has slots, files are read again. Jobs take many
    steps, in which vLLM decodes for others."""
    prompts, whose = asked(9, 6), [*adapters.values()] * 2
    long = {"sampling": {"max_tokens": 12, "logprobs": 4}}
    alone, at_once = ask(prompts, whose, alone=True, **long), ask(prompts, whose, **long)
    expected = llama.run([plain(alone)], None, **engine(4))["answers"][0]
    steps = [at_once, {"forget": True}, alone, {"forget": True}, COUNT, at_once, COUNT, {"forget": True}, alone]
    extra = {"recompute_ratio": 1.0, "read_timeout_s": 60.0}
    extra["budget_row_layers"] = 400  # a layer
    found = llama.run(steps, extra, **engine(slots))
    for step in (0, 2, 5, 8):
        close(found["answers"][step], expected)
    before, after = (found["answers"][step]["vllm:cacheblend_requests"] for step in (4, 6))
    assert after - before == 6
    assert "vllm:cacheblend_fallbacks" not in " ".join(found["metrics"])


@pytest.mark.slow
def test_with_torch_compile_on(llama: Served, adapters: dict[str, Any]) -> None:
    """vLLM's compiled layers and ours read from wrappers of their own."""
    prompts, whose = asked(17, 4), [None, *adapters.values()]
    step = ask(prompts, whose)
    expected = llama.run([plain({**step, "alone": True})], None, **engine())["answers"][0]
    steps = [ask(prompts, whose, alone=True), {"forget": True}, COUNT, step, COUNT]
    answers = llama.run(steps, {"recompute_ratio": 1.0}, **engine(enforce_eager=False))["answers"]
    close(answers[0], expected)
    close(answers[3], expected)
    assert answers[4]["vllm:cacheblend_requests"] - answers[2]["vllm:cacheblend_requests"] == 4


def test_preempted_requests_of_several_adapters_are_provided_again(llama: Served, adapters: dict[str, Any]) -> None:
    prompts, whose = asked(11, 6), [*adapters.values()] * 2
    long = {"sampling": {"max_tokens": 100, "logprobs": 1}}
    step = ask(prompts, whose, **long)
    expected = llama.run([plain({**step, "alone": True})], None, **engine())["answers"][0]
    steps = [ask(prompts, whose, alone=True, sampling={"max_tokens": 1}), {"forget": True}, step]
    extra = {"recompute_ratio": 1.0}
    found = llama.run(steps, extra, num_gpu_blocks_override=40, max_model_len=1024, block_size=32, **engine())
    assert [one["tokens"] for one in found["answers"][2]] == [one["tokens"] for one in expected]
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert found["metrics"]["vllm:cacheblend_requests"] >= 6


def test_the_shadow_check_compares_with_the_adapter_of_each_request(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path
) -> None:
    """What it finds is what dense models with the adapters merged find."""
    prompts, whose = asked(13, 8), [None, *adapters.values()] * 2
    step = ask(prompts, whose, sampling={"max_tokens": 20, "logprobs": -1})
    steps = [ask(prompts, whose, alone=True), COUNT, step, COUNT]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.3, "shadow": 1.0}
    settings = {"enable_prefix_caching": False, "max_logprobs": -1}
    answers = vllm.run(models["llama"], steps, extra, **engine(), **settings)["answers"]
    right: Counter[str] = Counter()
    for at, mine in enumerate(whose[:4]):
        folder = models["llama"] if mine is None else merged(models["llama"], Path(mine["path"]), tmp_path / str(at))
        right.update(vllm_checks.expected(folder, prompts[at::4], answers[2][at::4]))
    found = vllm_checks.found_in(vllm_checks.between(answers[1], answers[3]))
    assert found == pytest.approx(dict(right), rel=2e-3, abs=2e-3)
    assert found[""] == 8 and found["_tokens yes"] > 0 and found["_tokens no"] > 0


def test_two_tensor_parallel_ranks_answer_as_one(llama: Served, adapters: dict[str, Any], tmp_path: Path) -> None:
    prompts, whose = asked(15, 4), [*adapters.values(), adapters["a"]]
    steps = [ask(prompts, whose, alone=True), {"forget": True}, ask(prompts, whose)]
    found = {}
    for ranks in (1, 2):
        extra = {"store": f"file://{tmp_path}/{ranks}", "recompute_ratio": 0.2}
        how = {} if ranks == 1 else TWO_RANKS
        found[ranks] = llama.run(steps, extra, **engine(2, max_cpu_loras=2), **how)
        check_blended(found[ranks], 4)
    for step in (0, 2):
        close(found[2]["answers"][step], found[1]["answers"][step])
