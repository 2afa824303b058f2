"""LoRA adapters in unmodified vLLM: requests of each blend with it, and find only what was stored with it.

vLLM's CPU build computes rows without an adapter, in one batch with rows that have one, with the last slot's: so the
engines here have a slot more than adapters wherever the base model is asked beside them.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import vllm_prompts
from vllm_models import make_adapter, merge_adapter
from vllm_prompts import COUNT, FORGET, Asked, prompts
from vllm_running import (
    TWO_RANKS,
    Serve,
    between,
    check_blended,
    check_oracle,
    close,
    dense,
    expected,
    found_in,
    tokens,
)

Adapters = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Three adapters: one of all layers' parts, one of attention alone with another rank, one of the embedding too."""
    root = tmp_path_factory.mktemp("adapters")
    make_adapter(root / "a", 1)
    make_adapter(root / "b", 2, rank=8, modules=("q_proj", "v_proj", "down_proj"))
    make_adapter(root / "c", 3, embeds=True)
    return {name: {"name": name, "number": number, "path": str(root / name)} for number, name in enumerate("abc", 1)}


@pytest.fixture(scope="module")
def merged(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """The model's folder with the adapter of a folder in its weights, or with none."""

    @cache
    def made(adapter: str | None) -> Path:
        folder = tmp_path_factory.mktemp("merged") / "model"
        return models["llama"] if adapter is None else merge_adapter(models["llama"], Path(adapter), folder)

    return made


@pytest.fixture
def lora(serve: Serve) -> Serve:
    """With so many slots."""
    return lambda slots=4, **more: serve("llama", enable_lora=True, max_loras=slots, max_lora_rank=8, **more)


def ask(asked: list[Asked], adapters: list[Any], **more: Any) -> dict[str, Any]:
    return vllm_prompts.ask(asked, adapters=adapters, **{"sampling": {"max_tokens": 6, "logprobs": 4}, **more})


def requests(answers: list[Any], *steps: int) -> list[float]:
    """Blended ones between the counts of these steps."""
    counts = [answers[step]["vllm:cacheblend_requests"] for step in steps]
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.feature("LoRA adapters", "blends")
def test_adapters_and_the_base_blend_alternately_and_in_one_step(lora: Serve, adapters: Adapters) -> None:
    """The same passages with each, one by one, found by content, and all at once: at ratio 1 as vLLM answers."""
    asked, model = prompts(3, 8, 3, held=5), lora()
    whose = [None, *adapters.values()] * 2
    alone, at_once = ask(asked, whose, alone=True), ask([asked[0]] * 4 + [asked[1]] * 4, whose)
    right, right_at_once = model.plain(alone), model.plain({**at_once, "alone": True})
    steps = [alone, alone, FORGET, COUNT, {**alone, "chunks": None}, FORGET, COUNT, at_once, COUNT]
    found = model.run(steps, {"recompute_ratio": 1.0, "min_reused_share": 0.1})
    answers = found["answers"]
    close(answers[0] + answers[1] + answers[4] + answers[7], 3 * right + right_at_once)
    assert requests(answers, 3, 6, 8) == [8, 8]
    check_blended(found)
    per = [frozenset(one["tokens"][0][0] for one in right[at::4]) for at in range(4)]
    assert len(set(per)) == 4  # each answers in its own way, or this would show little


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle_with_the_adapter_merged(
    lora: Serve, adapters: Adapters, merged: Callable[[str], Path], in_pages: bool
) -> None:
    asked, whose = prompts(21, 6, 4, held=5), [*adapters.values()] * 2
    first = {"sampling": {"max_tokens": 1, "logprobs": 8}}
    steps = [ask(asked, whose, alone=True), FORGET, ask(asked, whose, **first)]
    result = lora().run(steps, {"recompute_ratio": 0.2, "check_layers": [1], "in_pages": in_pages})
    check_blended(result, len(asked))
    for one, mine, answer in zip(asked, whose, result["answers"][2], strict=True):
        assert check_oracle(dense(merged(mine["path"])), [one], [answer], within=3e-3) == 0


def test_weights_replaced_under_the_same_name_find_nothing_of_the_old_ones(
    lora: Serve, adapters: Adapters, tmp_path: Path
) -> None:
    """In place, from the same path; later the first weights come back, and what was stored with them is used again."""
    asked, live = prompts(5, 3, 3, held=5), {"name": "live", "number": 7, "path": str(tmp_path / "live")}
    step = ask(asked, [live] * 3, alone=True)
    right = {name: lora().plain(ask(asked, [adapters[name]] * 3, alone=True)) for name in "ab"}
    steps: list[dict[str, Any]] = []
    for name in "aba":
        files = {"copy": [adapters[name]["path"], live["path"]]}
        steps += [files, {"load": {**live, "inplace": True}}, FORGET, step, FORGET, COUNT, step, COUNT]
    answers = lora(2).run(steps, {"recompute_ratio": 1.0, "min_reused_share": 0.1})["answers"]
    changed = []
    for number, name in enumerate("aba"):
        given = answers[8 * number : 8 * number + 8]
        close(given[3] + given[6], 2 * right[name])
        assert requests(given, 5, 7) == [3]
        changed.append(given[7].get("vllm:cacheblend_fallbacks LoRA changed", 0))
    assert changed[0] == 0 and changed[2] >= changed[1] >= 1  # the first request after each change


@pytest.mark.parametrize("slots", [1, 2])
def test_more_adapters_than_slots_blend_in_turn(lora: Serve, adapters: Adapters, slots: int) -> None:
    """At once and one by one; where vLLM keeps as many in memory as it has slots, files are read again. Jobs take many
    steps, in which vLLM decodes for others."""
    asked, whose = prompts(9, 6, 3, held=5), [*adapters.values()] * 2
    long = {"sampling": {"max_tokens": 12, "logprobs": 4}}
    alone, at_once = ask(asked, whose, alone=True, **long), ask(asked, whose, **long)
    steps = [at_once, FORGET, alone, FORGET, COUNT, at_once, COUNT, FORGET, alone]
    found = lora(slots).run(steps, {"recompute_ratio": 1.0, "budget_row_layers": 400})  # a layer
    right, answers = lora().plain(alone), found["answers"]
    close(answers[0] + answers[2] + answers[5] + answers[8], 4 * right)
    assert requests(answers, 4, 6) == [6]
    check_blended(found)


@pytest.mark.slow
def test_with_torch_compile_on(lora: Serve, adapters: Adapters) -> None:
    """vLLM's compiled layers and ours read from wrappers of their own."""
    step = ask(prompts(17, 4, 3, held=5), [None, *adapters.values()])
    alone = {**step, "alone": True}
    answers = lora(enforce_eager=False).run([alone, FORGET, COUNT, step, COUNT], {"recompute_ratio": 1.0})["answers"]
    close(answers[0] + answers[3], 2 * lora().plain(alone))
    assert requests(answers, 2, 4) == [4]


def test_preempted_requests_of_several_adapters_are_provided_again(lora: Serve, adapters: Adapters) -> None:
    asked, whose = prompts(11, 6, 3, held=5), [*adapters.values()] * 2
    step = ask(asked, whose, sampling={"max_tokens": 100, "logprobs": 1})
    steps = [ask(asked, whose, alone=True, sampling={"max_tokens": 1}), FORGET, step]
    small = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "block_size": 32}
    found = lora(**small).run(steps, {"recompute_ratio": 1.0})
    assert tokens(found["answers"][2]) == tokens(lora().plain({**step, "alone": True}))
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert found["metrics"]["vllm:cacheblend_requests"] >= 6


def test_the_shadow_check_compares_with_the_adapter_of_each_request(
    lora: Serve, adapters: Adapters, merged: Callable[[str | None], Path]
) -> None:
    """What it finds is what dense models with the adapters merged find."""
    asked, whose = prompts(13, 8, 3, held=5), [None, *adapters.values()] * 2
    step = ask(asked, whose, sampling={"max_tokens": 20, "logprobs": -1})
    steps = [ask(asked, whose, alone=True), COUNT, step, COUNT]
    model = lora(enable_prefix_caching=False, max_logprobs=-1)
    answers = model.run(steps, {"recompute_ratio": 0.3, "shadow": 1.0})["answers"]
    right: Counter[str] = Counter()
    for at, mine in enumerate(whose[:4]):
        right.update(expected(merged(mine and mine["path"]), asked[at::4], answers[2][at::4]))
    found = found_in(between(answers[1], answers[3]))
    assert found == pytest.approx(dict(right), rel=2e-3, abs=2e-3)
    assert found[""] == 8 and found["_tokens yes"] > 0 and found["_tokens no"] > 0


def test_two_tensor_parallel_ranks_answer_as_one(lora: Serve, adapters: Adapters, tmp_path: Path) -> None:
    asked, whose = prompts(15, 4, 3, held=5), [*adapters.values(), adapters["a"]]
    steps = [ask(asked, whose, alone=True), FORGET, ask(asked, whose)]
    found = []
    for name, ranks in (("one", {}), ("two", TWO_RANKS)):
        extra = {"store": f"file://{tmp_path}/{name}", "recompute_ratio": 0.2}
        found.append(lora(2, max_cpu_loras=2, **ranks).run(steps, extra))
        check_blended(found[-1], 4)
    for step in (0, 2):
        close(found[1]["answers"][step], found[0]["answers"][step])
