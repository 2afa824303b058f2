"""The shadow check inside unmodified vLLM: what it finds is what a dense reference finds, and nobody notices it.

The clock, the budget and the order of work are tested without an engine.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_prompts import COUNT, FORGET, Asked, Texts, ask, prompts, rpc
from vllm_running import (
    EXTENDED,
    MINE,
    SHADOW,
    TWO_RANKS,
    Serve,
    Served,
    between,
    check_shadow,
    expected,
    found_in,
    tokens,
)

Run = Callable[..., dict[str, Any]]
EVERY = {"logprobs": -1}


@pytest.fixture
def run(serve: Serve) -> Run:
    """Runs steps in vLLM, all answers checked; `engine`: its arguments besides."""

    def started(steps: list[Any], family: str = "llama", engine: Any = None, **settings: Any) -> dict[str, Any]:
        extra = {"recompute_ratio": 0.1, "shadow": 1.0} | settings
        model = serve(family, **{"enable_prefix_caching": False, "max_logprobs": -1} | (engine or {}))
        found: dict[str, Any] = model.run(steps, extra)
        return found

    return started


@pytest.mark.parametrize(("family", "in_pages"), [("llama", False), ("llama", True), ("qwen3-moe", False)])
def test_what_is_found_is_what_a_dense_model_finds(
    run: Run, models: dict[str, Path], family: str, in_pages: bool
) -> None:
    """Of greedy, sampled and penalised answers, of one token and of more than are compared."""
    asked = prompts(11, 6)
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 24},
        {"max_tokens": 7, "temperature": 1.0, "seed": 3},
        {"max_tokens": 9, "repetition_penalty": 1.5},
        {"max_tokens": 1},
    ]
    steps: list[dict[str, Any]] = [ask(asked, alone=True), COUNT]
    for sampling in kinds:
        steps += [ask(asked, sampling=sampling | EVERY), COUNT]
    answers = run(steps, family, recompute_ratio=0.3, in_pages=in_pages)["answers"]
    for number in range(len(kinds)):
        before, given, after = answers[1 + 2 * number : 4 + 2 * number]
        check_shadow(models[family], asked, given, before, after)
    assert answers[-1][f"{SHADOW}_waiting"] == 0
    assert found_in(between({}, answers[-1]))["_tokens no"] > 0  # or agreement would show nothing


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e5m2"])
def test_full_recompute_agrees_wholly_and_diverges_by_rounding(run: Run, cache: str) -> None:
    """Such answers are not drawn, since they are exact: here they are. Numbers are rounded as the cache's."""
    if cache != "auto" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's FP8 caches on CPUs need AVX-512")
    asked = prompts(12, 6)
    steps = [rpc("check_exact"), ask(asked, alone=True), ask(asked, sampling={"max_tokens": 20})]
    result = run(steps, engine={"kv_cache_dtype": cache, **EXTENDED}, recompute_ratio=1.0)
    found = found_in(between({}, result["metrics"]))
    assert found[""] >= 10 and found["_tokens no"] == 0 and found["_tokens yes"] >= 6 * 16
    assert found["_kl_sum"] / found[""] < (1e-6 if cache == "auto" else 1e-3)  # a sum may lie at a step of eight bits
    assert result["metrics"][f"{SHADOW}_agreement {MINE} answer"] == 1


@pytest.mark.parametrize("exact", [{"shadow": 0}, {"shadow": 1.0, "recompute_ratio": 1.0}], ids=["share 0", "exact"])
def test_nothing_is_drawn(run: Run, exact: dict[str, float]) -> None:
    found = run([ask(prompts(13, 4), alone=True)], **exact)["metrics"]
    shown = {name: value for name, value in found.items() if name.startswith(SHADOW)}
    assert found["vllm:cacheblend_requests"] > 0
    if exact["shadow"]:
        assert set(shown.values()) <= {0, 1.0} and shown[f"{SHADOW}_ratio"] == 1 and f"{SHADOW} {MINE}" not in shown
    else:
        assert not shown


def test_a_lean_setting_is_raised_until_its_answers_are_those_of_full_prefill(run: Run, llama: Served) -> None:
    """Requests keep settings of their own; tenants are not named."""
    asked = prompts(14, 12)
    alone = ask(asked, alone=True)
    steps = [*[alone] * 6, COUNT, FORGET, ask(asked), FORGET]
    steps += [{**alone, "options": {"recompute_ratio": 0.05}}]
    steps += [{**alone, "options": {"selector": "none"}, "salt": "acme"}]
    result = run(steps, engine={"enable_prefix_caching": True}, recompute_ratio=0.05, shadow_floor=0.8)
    raised, _, last, _, own, _ = result["answers"][6:]
    assert raised[f"{SHADOW}_ratio"] == 1 and raised[f"{SHADOW}_changes raised"] >= 7  # 0.05 x 1.5^6 is above 1/2
    assert math.isnan(raised[f"{SHADOW}_agreement {MINE} answer"])  # of full recompute nothing is compared
    assert tokens(last) == tokens(llama.plain(ask(asked))) != tokens(own)
    found = result["metrics"]
    assert found["vllm:cacheblend_not_blended full recompute"] >= 12
    assert found[f"{SHADOW}  hkvd request"] >= 10
    (tenant,) = {name.split()[1] for name in found if name.endswith("none request") and name.startswith(f"{SHADOW} ")}
    assert len(tenant) == 8 and tenant != "acme"


def begin(name: str, one: Asked, most: int) -> dict[str, Any]:
    return {"begin": name, "ids": one.ids, "chunks": one.spans, "sampling": {"max_tokens": most}}


WHOLE_CACHE = {"num_gpu_blocks_override": 47, "max_model_len": 1472, "block_size": 32}
"""A prompt of 1,400 tokens takes all of it: every block has to have come back."""


def test_requests_that_end_in_every_state_are_counted_once_and_leave_no_block(run: Run) -> None:
    """Aborted before and behind the first token, ended before and behind sixteen."""
    (one,) = prompts(15, 1)
    large = ask([], [Asked(Texts(3).ids(1400), [])], sampling={"max_tokens": 2})
    steps: list[dict[str, Any]] = [ask([one], alone=True), ask([one], alone=True), COUNT]
    for number in range(0, 21, 4):
        steps += [begin("a", one, 60), {"until": "a", "steps": 5 + number}, {"abort": "a"}, large, COUNT]
    answers = run(steps, engine=WHOLE_CACHE)["answers"]
    counts = [answers[2], *answers[7::5]]
    ended = 0
    for before, after in pairwise(counts):
        came = between(before, after)
        ended += int(came.get(f" {MINE}", 0) + came.get("_dropped no answer", 0))
    assert ended >= 5 and counts[-1][f"{SHADOW}_waiting"] == 0
    assert counts[-1][f"{SHADOW} {MINE}"] >= 4


def test_preemption_in_a_small_cache_changes_no_answer(run: Run) -> None:
    asked = prompts(6, 8, 3)
    steps = [ask(asked, alone=True), ask(asked, sampling={"max_tokens": 120}), ask(asked, sampling={"max_tokens": 5})]
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "block_size": 32}
    plain, result = (run(steps, engine=small, recompute_ratio=0.2, shadow=share) for share in (0, 1.0))
    assert list(map(tokens, result["answers"][1:])) == list(map(tokens, plain["answers"][1:]))
    found = result["metrics"]
    assert found["vllm:num_preemptions"] > 0
    assert found[f"{SHADOW}_dropped preempted"] > 0
    assert found[f"{SHADOW} {MINE}"] > 0
    assert found[f"{SHADOW}_waiting"] == 0


def test_prompts_beyond_a_sliding_window_are_not_compared(run: Run) -> None:
    texts = Texts(16)
    (passage,) = texts.passages(1, 90, 91)
    short, long = texts.prompt([passage], front=20, question=9), texts.prompt([passage] * 2, front=20)
    found = run([ask([short, long], alone=True)] * 2, "mistral")["metrics"]
    assert found[f"{SHADOW} {MINE}"] == 1
    assert found[f"{SHADOW}_dropped beyond the sliding window"] >= 1


def test_answers_of_old_weights_are_not_compared_with_new_ones_and_vllm_ends_while_answers_wait(run: Run) -> None:
    (one,) = prompts(17, 1)
    alone = ask([one], alone=True)
    steps = [alone, COUNT, begin("a", one, 19), {"until": "a"}, {"forget": "connector"}, alone]  # it waits
    steps += [COUNT, begin("b", one, 3), {"until": "b"}]
    result = run(steps, budget_row_layers=1)
    assert between(result["answers"][1], result["answers"][6]) == {"_dropped cache reset": 1}
    assert result["metrics"][f"{SHADOW}_waiting"] == 1
    assert len(result["answers"][-1]["tokens"][0]) == 3


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
    asking = ask([one], sampling={"max_tokens": 6, **EVERY})
    steps: list[dict[str, Any]] = [ask([one], alone=True), asking, COUNT]
    for number, (place, rank, after) in enumerate(faults):
        kind = ["error", "memory"][number % 2]
        steps += [rpc("arm_fault", place, rank, kind, after), asking, rpc("disarm_fault"), asking, COUNT]
    answers = run(steps, engine=EXTENDED | (TWO_RANKS if ranks > 1 else {}))["answers"]
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


# ---- beside a second connector in a `MultiConnector`, in front of ours and behind it -------------------------------


def test_blended_plain_and_compared_requests_beside_another_connector(
    serve: Serve, in_front: bool, beside: list[Any]
) -> None:
    """Short answers, which are read after their end, and long ones; plain requests that the other has, and that nobody
    has; a request that both have."""
    blended, saved, new, both = prompts(31, 6), prompts(32, 6, 2), prompts(33, 6, 2), prompts(34, 2)
    short, long = {"max_tokens": 5} | EVERY, {"max_tokens": 20} | EVERY

    def by_turns(others: list[Asked], **more: Any) -> dict[str, Any]:
        pairs = list(zip(blended, others, strict=True))
        asked = [each for two in pairs for each in two]
        return ask(asked, chunks=[spans for one, _ in pairs for spans in (one.spans, [])], **more)

    steps: dict[str, dict[str, Any]] = {
        "both, saved": ask([], both, alone=True),
        "saved": ask([], saved, alone=True),
        "first": FORGET,
        "both, stored": ask(both, alone=True),
        "stored": ask(blended, alone=True),
        "second": FORGET,
        "before short": COUNT,
        "short": by_turns(saved, sampling=short),
        "before long": COUNT,
        "third": FORGET,
        "long": by_turns(new, sampling=long),
        "before both": COUNT,
        "fourth": FORGET,
        "plain": ask([], saved + new, sampling=short),
        "both": ask(both, sampling=short),
        "last": COUNT,
    }
    model = serve("llama", max_num_batched_tokens=2048, block_size=32, max_logprobs=-1)
    extra = {"recompute_ratio": 0.2, "shadow": 1.0}
    answers, alone, none = (
        dict(zip(steps, model.run(list(steps.values()), settings, **how)["answers"], strict=True))
        for settings, how in ((extra, {"beside": beside}), (extra | {"shadow": 0}, {}), (None, {}))
    )
    for name, behind in (("short", "before long"), ("long", "before both")):
        assert tokens(answers[name][::2]) == tokens(alone[name][::2])  # blended
        assert tokens(answers[name][1::2]) == tokens(none[name][1::2])  # plain
        check_shadow(model.model, blended, answers[name][::2], answers[f"before {name}"], answers[behind])
    assert tokens(answers["plain"]) == tokens(none["plain"])
    assert all(one["cached"] > 0 for one in answers["short"][1::2])  # the other has loaded them
    last = between(answers["before both"], answers["last"])
    if in_front:
        assert tokens(answers["both"]) == tokens(none["both"]) and not found_in(last)[""]
        left = [answers[at]["vllm:cacheblend_not_blended another connector has it"] for at in ("before both", "last")]
        assert left[1] - left[0] == len(both)
    else:
        assert tokens(answers["both"]) == tokens(alone["both"])
        check_shadow(model.model, both, answers["both"], answers["before both"], answers["last"])
    assert answers["last"][f"{SHADOW}_waiting"] == 0
    assert not any(value for name, value in answers["last"].items() if name.startswith(f"{SHADOW}_dropped"))


def test_blocks_that_both_keep_come_back(llama: Served, beside: list[Any]) -> None:
    """Requests aborted and ended at every length of answer; either one lets go first."""
    (one,) = prompts(35, 1)
    texts = Texts(36)
    steps: list[dict[str, Any]] = [ask([one], alone=True), ask([one], alone=True), COUNT]
    for number, most in enumerate((1, 3, 15, 16, 17, 40, 60, 60)):
        name = f"r{number}"
        steps += [begin(name, one, most), {"until": name, **({"steps": 4 + number} if number % 2 else {})}]
        steps += [{"abort": name}, ask([], [Asked(texts.ids(1400), [])], sampling={"max_tokens": 2})]
    extra = {"recompute_ratio": 0.1, "shadow": 1.0}
    engine = {"max_num_batched_tokens": 2048, "enable_prefix_caching": False, **WHOLE_CACHE}
    *answers, last = llama.run([*steps, COUNT], extra, beside=beside, **engine)["answers"]
    assert [len(answer[0]["tokens"][0]) for answer in answers[6::4]] == [2] * 8
    came = between(answers[2], last)
    ended = came.get(f" {MINE}", 0) + sum(value for name, value in came.items() if name.startswith("_dropped"))
    assert ended >= 4 and last[f"{SHADOW}_waiting"] == 0
