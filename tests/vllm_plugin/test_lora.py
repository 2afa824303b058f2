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
from cacheblend.core.select.selectors import Hkvd
from reference import blend
from vllm_adapters import make_adapter, merged
from vllm_running import Asked, Texts, Vllm, needs_vllm

pytestmark = needs_vllm

RATIO = 0.2
TOLD: dict[str, Any] = {"sampling": {"max_tokens": 6, "logprobs": 4}}
COUNT: dict[str, Any] = {"count": True}


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
    ids, spans = [one.ids for one in prompts], [one.spans for one in prompts]
    return {"ask": ids, "chunks": spans, "adapters": adapters, **TOLD, **more}


def plain(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "chunks"}


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Tokens, and log-probabilities but for rounding."""
    assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    for mine, its in zip(found, expected, strict=True):
        for given, right in zip(mine["logprobs"][0], its["logprobs"][0], strict=True):
            assert given == pytest.approx(right, abs=2e-3)


@pytest.mark.feature("LoRA adapters", "blends")
def test_adapters_and_the_base_blend_alternately_and_in_one_step(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path
) -> None:
    """The same passages with each, one by one, found by content, and all at once: at ratio 1 as vLLM answers."""
    prompts = asked(3, 8)
    whose = [None, *adapters.values()] * 2
    alone = ask(prompts, whose, alone=True)
    at_once = ask([prompts[0]] * 4 + [prompts[1]] * 4, whose)
    expected = vllm.run(models["llama"], [plain(alone), plain({**at_once, "alone": True})], None, **engine())
    steps = [alone, alone, {"forget": True}, COUNT, plain(alone), {"forget": True}, COUNT, at_once, COUNT]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "min_reused_share": 0.1}
    found = vllm.run(models["llama"], steps, extra, **engine())
    answers = found["answers"]
    for step in (0, 1, 4):
        assert_same(answers[step], expected["answers"][0])
    assert_same(answers[7], expected["answers"][1])
    blended = [answers[step]["vllm:cacheblend_requests"] for step in (3, 6, 8)]
    assert blended[1] - blended[0] == 8
    assert blended[2] - blended[1] == 8
    assert "vllm:cacheblend_fallbacks" not in " ".join(found["metrics"])
    per = [{one["tokens"][0][0] for one in expected["answers"][0][at::4]} for at in range(4)]
    assert len(set(map(frozenset, per))) == 4  # each answers in its own way, or this would show little


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle_with_the_adapter_merged(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path, in_pages: bool
) -> None:
    prompts = asked(21, 6, passages=4)
    whose = [*adapters.values()] * 2
    first = {"sampling": {"max_tokens": 1, "logprobs": 8}}
    steps = [ask(prompts, whose, alone=True), {"forget": True}, ask(prompts, whose, **first)]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": RATIO, "check_layers": [1], "in_pages": in_pages}
    result = vllm.run(models["llama"], steps, extra, **engine())
    assert result["metrics"]["vllm:cacheblend_requests"] >= len(prompts)
    assert "vllm:cacheblend_fallbacks" not in " ".join(result["metrics"])
    full = 0
    for one, mine, answer in zip(prompts, whose, result["answers"][2], strict=True):
        model = merged_model(models["llama"], Path(mine["path"]))
        right = torch.log_softmax(blend(model, one.prompt, Hkvd((1,), (RATIO,))).logits.double(), -1)
        (given,) = answer["logprobs"][0]
        assert answer["tokens"][0] == [int(right.argmax())]
        assert {int(token): value for token, value in given.items()} == pytest.approx(
            {int(token): float(right[int(token)]) for token in given}, abs=3e-3
        )
        with torch.no_grad():
            whole = torch.log_softmax(model(torch.tensor([one.ids])).logits[0, -1].double(), -1)
        full += bool((whole - right).abs().max() < 3e-3)
    assert full == 0  # full prefill answers otherwise, or this would show nothing


def test_weights_replaced_under_the_same_name_find_nothing_of_the_old_ones(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path
) -> None:
    """In place, from the same path; later the first weights come back, and what was stored with them is used again."""
    prompts, live = asked(5, 3), {"name": "live", "number": 7, "path": str(tmp_path / "live")}
    step = ask(prompts, [live] * 3, alone=True)
    expected = vllm.run(
        models["llama"], [plain(ask(prompts, [adapters[name]] * 3, alone=True)) for name in "ab"], None, **engine()
    )["answers"]

    def load(name: str) -> list[dict[str, Any]]:
        files = {"copy": [adapters[name]["path"], live["path"]]}
        return [files, {"load": {**live, "inplace": True}}, {"forget": True}]

    again = [step, {"forget": True}, COUNT, step, COUNT]
    steps = [*load("a"), *again, *load("b"), *again, *load("a"), *again]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "min_reused_share": 0.1}
    found = vllm.run(models["llama"], steps, extra, **engine(2))
    answers = found["answers"]
    for at, right in ((3, 0), (6, 0), (11, 1), (14, 1), (19, 0), (22, 0)):
        assert_same(answers[at], expected[right])
    blended = [[answers[at]["vllm:cacheblend_requests"] for at in (at, at + 2)] for at in (5, 13, 21)]
    assert [after - before for before, after in blended] == [3, 3, 3]
    changed = [answers[at].get("vllm:cacheblend_fallbacks LoRA changed", 0) for at in (7, 15, 23)]
    assert changed[0] == 0 and changed[2] >= changed[1] >= 1  # the first request after each change


@pytest.mark.parametrize("slots", [1, 2])
def test_more_adapters_than_slots_blend_in_turn(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path, slots: int
) -> None:
    """At once and one by one; where vLLM keeps as many in memory as it has slots, files are read again. Jobs take many
    steps, in which vLLM decodes for others."""
    prompts, whose = asked(9, 6), [*adapters.values()] * 2
    long = {"sampling": {"max_tokens": 12, "logprobs": 4}}
    alone, at_once = ask(prompts, whose, alone=True, **long), ask(prompts, whose, **long)
    expected = vllm.run(models["llama"], [plain(alone)], None, **engine(4))["answers"][0]
    steps = [at_once, {"forget": True}, alone, {"forget": True}, COUNT, at_once, COUNT, {"forget": True}, alone]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "read_timeout_s": 60.0}
    extra["budget_row_layers"] = 400  # a layer
    found = vllm.run(models["llama"], steps, extra, **engine(slots))
    for step in (0, 2, 5, 8):
        assert_same(found["answers"][step], expected)
    before, after = (found["answers"][step]["vllm:cacheblend_requests"] for step in (4, 6))
    assert after - before == 6
    assert "vllm:cacheblend_fallbacks" not in " ".join(found["metrics"])


@pytest.mark.slow
def test_with_torch_compile_on(vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path) -> None:
    """vLLM's compiled layers and ours read from wrappers of their own."""
    prompts, whose = asked(17, 4), [None, *adapters.values()]
    step = ask(prompts, whose)
    expected = vllm.run(models["llama"], [plain({**step, "alone": True})], None, **engine())["answers"][0]
    steps = [ask(prompts, whose, alone=True), {"forget": True}, COUNT, step, COUNT]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    answers = vllm.run(models["llama"], steps, extra, **engine(enforce_eager=False))["answers"]
    assert_same(answers[0], expected)
    assert_same(answers[3], expected)
    assert answers[4]["vllm:cacheblend_requests"] - answers[2]["vllm:cacheblend_requests"] == 4


def test_preempted_requests_of_several_adapters_are_provided_again(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path
) -> None:
    prompts, whose = asked(11, 6), [*adapters.values()] * 2
    long = {"sampling": {"max_tokens": 100, "logprobs": 1}}
    step = ask(prompts, whose, **long)
    expected = vllm.run(models["llama"], [plain({**step, "alone": True})], None, **engine())["answers"][0]
    steps = [ask(prompts, whose, alone=True, sampling={"max_tokens": 1}), {"forget": True}, step]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    found = vllm.run(
        models["llama"], steps, extra, num_gpu_blocks_override=40, max_model_len=1024, block_size=32, **engine()
    )
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


def test_two_tensor_parallel_ranks_answer_as_one(
    vllm: Vllm, models: dict[str, Path], adapters: dict[str, Any], tmp_path: Path
) -> None:
    prompts, whose = asked(15, 4), [*adapters.values(), adapters["a"]]
    steps = [ask(prompts, whose, alone=True), {"forget": True}, ask(prompts, whose)]
    found = {}
    for ranks in (1, 2):
        extra = {"store": f"file://{tmp_path}/{ranks}", "recompute_ratio": RATIO}
        how = {} if ranks == 1 else {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        found[ranks] = vllm.run(models["llama"], steps, extra, **engine(2, max_cpu_loras=2), **how)
        assert found[ranks]["metrics"]["vllm:cacheblend_requests"] >= 4
        assert "vllm:cacheblend_fallbacks" not in " ".join(found[ranks]["metrics"])
    for step in (0, 2):
        assert_same(found[2]["answers"][step], found[1]["answers"][step])
