"""The shadow check inside unmodified vLLM: what it finds is what a dense reference finds, and nobody notices it.

Situations: greedy, sampled and penalised answers, of one token and of more than are compared; a lean setting that
disagrees; requests with settings of their own; tenants; a ratio that recomputes everything; share 0; requests aborted
while they are drawn; preemption; new weights; windows; several answers in one step; checks that fail, on one rank and
on all; vLLM ending while answers wait. The clock, the budget and the order of work are in `test_checking` and
`test_checking`.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_checks import COUNT, EXTENDED, MINE, NAME, ask, between, expected, found_in, prompts
from vllm_running import Texts, Vllm, needs_vllm

pytestmark = [needs_vllm, pytest.mark.usefixtures("extension")]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> Run:
    """Runs steps in vLLM, all answers checked; `engine`: its arguments besides."""

    def started(steps: list[Any], family: str = "llama", engine: Any = None, **settings: Any) -> dict[str, Any]:
        extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.1, "shadow": 1.0} | settings
        return vllm.run(models[family], steps, extra, **{"enable_prefix_caching": False} | (engine or {}))

    return started


@pytest.mark.parametrize(("family", "in_pages"), [("llama", False), ("llama", True), ("qwen3-moe", False)])
def test_what_is_found_is_what_a_dense_model_finds(
    run: Run, models: dict[str, Path], family: str, in_pages: bool
) -> None:
    asked = prompts(11, 6)
    every = {"logprobs": -1}
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 24},
        {"max_tokens": 7, "temperature": 1.0, "seed": 3},
        {"max_tokens": 9, "repetition_penalty": 1.5},
        {"max_tokens": 1},
    ]
    steps: list[dict[str, Any]] = [ask(asked, alone=True), COUNT]
    for sampling in kinds:
        steps += [ask(asked, sampling=sampling | every), COUNT]
    answers = run(steps, family, {"max_logprobs": -1}, recompute_ratio=0.3, in_pages=in_pages)["answers"]
    for number in range(len(kinds)):
        before, given, after = answers[1 + 2 * number : 4 + 2 * number]
        right, found = expected(models[family], asked, given), found_in(between(before, after))
        assert found == pytest.approx(right, rel=1e-3, abs=1e-3), kinds[number]
    assert answers[-1][f"{NAME}_waiting"] == 0
    assert found_in(between({}, answers[-1]))["_tokens no"] > 0  # or agreement would show nothing


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e5m2"])
def test_full_recompute_agrees_wholly_and_diverges_by_rounding(run: Run, cache: str) -> None:
    """Such answers are not drawn, since they are exact: here they are. Numbers are rounded as the cache's."""
    if cache != "auto" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's FP8 caches on CPUs need AVX-512")
    asked = prompts(12, 6)
    steps = [{"rpc": ["check_exact"]}, ask(asked, alone=True), ask(asked, sampling={"max_tokens": 20})]
    result = run(steps, engine={"kv_cache_dtype": cache, **EXTENDED}, recompute_ratio=1.0)
    found = found_in(between({}, result["metrics"]))
    assert found[""] >= 10 and found["_tokens no"] == 0 and found["_tokens yes"] >= 6 * 16
    assert found["_kl_sum"] / found[""] < (1e-6 if cache == "auto" else 1e-3)  # a sum may lie at a step of eight bits
    assert result["metrics"][f"{NAME}_agreement {MINE} answer"] == 1


@pytest.mark.parametrize("exact", [{"shadow": 0}, {"shadow": 1.0, "recompute_ratio": 1.0}], ids=["share 0", "exact"])
def test_nothing_is_drawn(run: Run, exact: dict[str, float]) -> None:
    found = run([ask(prompts(13, 4), alone=True)], **exact)["metrics"]
    shown = {name: value for name, value in found.items() if name.startswith(NAME)}
    assert found["vllm:cacheblend_requests"] > 0
    if exact["shadow"]:
        assert set(shown.values()) <= {0, 1.0} and shown[f"{NAME}_ratio"] == 1 and f"{NAME} {MINE}" not in shown
    else:
        assert not shown


def test_a_lean_setting_is_raised_until_its_answers_are_those_of_full_prefill(
    run: Run, vllm: Vllm, models: dict[str, Path]
) -> None:
    asked = prompts(14, 12)
    plain = vllm.run(models["llama"], [ask(asked)], None)
    steps: list[dict[str, Any]] = [
        ask(asked, alone=True),
        *[ask(asked, alone=True)] * 5,
        COUNT,
        {"forget": True},
        ask(asked),
        {"forget": True},
        ask(asked, alone=True, options={"recompute_ratio": 0.05}),
        ask(asked, alone=True, options={"selector": "none"}, salt="acme"),
    ]
    result = run(steps, engine={"enable_prefix_caching": True}, recompute_ratio=0.05, shadow_floor=0.8)
    raised, _, last, _, own, _ = result["answers"][6:]
    right = [one["tokens"] for one in plain["answers"][0]]
    assert raised[f"{NAME}_ratio"] == 1 and raised[f"{NAME}_changes raised"] >= 7  # 0.05 x 1.5^6 is above 1/2
    assert math.isnan(raised[f"{NAME}_agreement {MINE} answer"])  # of full recompute nothing is compared
    assert [one["tokens"] for one in last] == right
    assert [one["tokens"] for one in own] != right  # a request keeps the ratio that it names
    found = result["metrics"]
    assert found["vllm:cacheblend_not_blended full recompute"] >= 12
    assert found[f"{NAME}  hkvd request"] >= 10
    (tenant,) = {name.split()[1] for name in found if name.endswith("none request") and name.startswith(f"{NAME} ")}
    assert len(tenant) == 8 and tenant != "acme"


def test_requests_that_end_in_every_state_are_counted_once_and_leave_no_block(run: Run) -> None:
    """Aborted before and behind the first token, ended before and behind sixteen; then a prompt that takes the whole
    cache shows that every block came back."""
    (one,) = prompts(15, 1)
    texts = Texts(3)
    large = texts.ids(1400)
    steps: list[dict[str, Any]] = [ask([one], alone=True), ask([one], alone=True), COUNT]
    for tokens in range(0, 21, 4):
        begun = {"begin": "a", "ids": one.ids, "chunks": one.spans, "sampling": {"max_tokens": 60}}
        steps += [begun, {"until": "a", "steps": 5 + tokens}, {"abort": "a"}]
        steps += [{"ask": [large], "chunks": [[]], "sampling": {"max_tokens": 2}}, COUNT]
    small = {"num_gpu_blocks_override": 47, "max_model_len": 1472, "block_size": 32}
    answers = run(steps, engine=small)["answers"]
    counts = [answers[2], *answers[7::5]]
    ended = 0
    for before, after in pairwise(counts):
        came = between(before, after)
        ended += int(came.get(f" {MINE}", 0) + came.get("_dropped no answer", 0))
    assert ended >= 5 and counts[-1][f"{NAME}_waiting"] == 0
    assert counts[-1][f"{NAME} {MINE}"] >= 4


def test_preemption_in_a_small_cache_changes_no_answer(run: Run) -> None:
    asked = prompts(6, 8, passages=3)
    steps = [ask(asked, alone=True), ask(asked, sampling={"max_tokens": 120}), ask(asked, sampling={"max_tokens": 5})]
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "block_size": 32}
    plain, result = (run(steps, engine=small, recompute_ratio=0.2, shadow=share) for share in (0, 1.0))
    for right, answers in zip(plain["answers"][1:], result["answers"][1:], strict=True):
        assert [one["tokens"] for one in answers] == [one["tokens"] for one in right]
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert result["metrics"][f"{NAME}_dropped preempted"] > 0
    assert result["metrics"][f"{NAME} {MINE}"] > 0
    assert result["metrics"][f"{NAME}_waiting"] == 0


def test_prompts_beyond_a_sliding_window_are_not_compared(run: Run) -> None:
    texts = Texts(16)
    (passage,) = texts.passages(1, 90, 91)
    short, long = texts.prompt([passage], front=20, question=9), texts.prompt([passage] * 2, front=20)
    found = run([ask([short, long], alone=True)] * 2, "mistral")["metrics"]
    assert found[f"{NAME} {MINE}"] == 1
    assert found[f"{NAME}_dropped beyond the sliding window"] >= 1


def test_answers_of_old_weights_are_not_compared_with_new_ones(run: Run) -> None:
    (one,) = prompts(17, 1)
    steps: list[dict[str, Any]] = [ask([one], alone=True), COUNT]
    begun = {"begin": "a", "ids": one.ids, "chunks": one.spans, "sampling": {"max_tokens": 19}}
    steps += [begun, {"until": "a"}, {"forget": "connector"}, ask([one], alone=True)]  # it has ended and waits
    result = run(steps, budget_row_layers=1)
    came = between(result["answers"][1], result["metrics"])
    assert came == {"_dropped cache reset": 1}


def test_vllm_ends_while_answers_wait(run: Run) -> None:
    (one,) = prompts(18, 1)
    steps: list[dict[str, Any]] = [ask([one], alone=True)]
    steps += [{"begin": "a", "ids": one.ids, "chunks": one.spans, "sampling": {"max_tokens": 3}}, {"until": "a"}]
    result = run(steps)
    assert result["metrics"][f"{NAME}_waiting"] == 1
    assert len(result["answers"][2]["tokens"][0]) == 3


PLACES = [("read answer", 0), ("run check", 0), ("run check", 4), ("logits", 0)]
"""In the answer's own pass: six layers."""
FULL = [("open check", 0), ("run check", 6), ("run check", 9), ("logits", 1), ("compare", 0)]


@pytest.mark.may_fail("shadow check")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_check_that_fails_is_dropped_and_nobody_notices(run: Run, models: dict[str, Path], ranks: int) -> None:
    """Errors and lack of memory, on one rank and on all; else what is found is what a dense model finds."""
    (one,) = prompts(19, 1)
    who: list[Any] = [0, 1, "all"] if ranks > 1 else [0]
    faults = [(place, rank, after) for place, after in PLACES + FULL for rank in who]
    asking = ask([one], sampling={"max_tokens": 6, "logprobs": -1})
    steps: list[dict[str, Any]] = [ask([one], alone=True), asking, COUNT]
    for number, (place, rank, after) in enumerate(faults):
        kind = ["error", "memory"][number % 2]
        steps += [{"rpc": ["arm_fault", place, rank, kind, after]}, asking, {"rpc": ["disarm_fault"]}, asking, COUNT]
    engine: dict[str, Any] = {"max_logprobs": -1, **EXTENDED}
    if ranks > 1:
        engine |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    answers = run(steps, engine=engine)["answers"]
    right, before = answers[1][0]["tokens"], answers[2]
    found = expected(models["llama"], [one], answers[1])
    assert found_in(between({}, before)) == pytest.approx(found, rel=1e-3)
    for number, fault in enumerate(faults):
        failed, seen, again, after = answers[4 + 5 * number : 8 + 5 * number]
        assert sum(each["raised"] for each in seen) == (ranks if fault[1] == "all" else 1), fault
        assert failed[0]["tokens"] == again[0]["tokens"] == right, fault
        came = between(before, after)
        assert (came.get(f" {MINE}"), came["_dropped failed"]) == (1, 1), fault
        assert found_in(came) == pytest.approx(found, rel=1e-3), fault
        before = after
