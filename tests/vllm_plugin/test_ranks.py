"""Faults inside blends and captures, with one rank and with two: the engine lives, the answer is the plain one, and the
next request is blended again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_prompts import Texts, ask
from vllm_running import EXTENDED, TWO_RANKS, Served, Vllm, tokens

LAYER = ["readiness", "load", "fill", "project", "run", "attention", "mlp", "select", "write", "hand out"]
CAPTURING = ["open capture", "run", "mlp", "gather", "host copy"]
LAYERS = 6


def faults(ranks: int) -> list[tuple[str, Any, str, int]]:
    """(place, rank, kind, number of the call): every place on every rank and on all of them, then random ones."""
    places = ["open", "embed", *LAYER, "finish", *(["combine"] if ranks > 1 else [])]
    who: list[Any] = [0, 1, "all"] if ranks > 1 else [0]
    rng = random.Random(ranks)
    found = [(place, rank, rng.choice(["error", "memory"]), 0) for place in places for rank in who]
    for _ in range(12):
        place = rng.choice(["readiness", "load", "run", "attention", "mlp", "hand out"])
        found.append((place, rng.choice(who), rng.choice(["error", "memory"]), rng.randrange(LAYERS - 1)))
    lost = [("load", rank, "lost", rng.randrange(LAYERS)) for rank in who for _ in range(2)]
    return found + (lost if ranks > 1 else [])


def engine(ranks: int) -> dict[str, Any]:
    return {"enable_prefix_caching": False, **EXTENDED, **(TWO_RANKS if ranks > 1 else {})}


@pytest.mark.may_fail("*")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fault_anywhere_costs_one_request_its_blending_and_nothing_else(llama: Served, ranks: int) -> None:
    texts, injected = Texts(31), faults(ranks)
    passages = texts.passages(4)
    first, second = texts.prompt(passages[:3]), texts.prompt([passages[2], passages[3], passages[0]])
    both: dict[str, Any] = {"ask": [second.ids, first.ids[::-1]], "chunks": [second.spans, []]}  # one is plain
    both["sampling"] = {"max_tokens": 4}  # ranks wait for each other in every layer of a step
    steps: list[dict[str, Any]] = [{**both, "chunks": [[], []]}, ask([first, second], alone=True), both]
    for fault in injected:
        steps += [{"rpc": ["arm_fault", *fault]}, both, {"rpc": ["disarm_fault"]}, both]
    for rank in range(ranks):
        steps += [{"rpc": ["slow_store", 0.05, rank]}, both, {"rpc": ["slow_store", 0.0, rank]}]
    captures = [(place, rank) for place in CAPTURING for rank in ([0, 1, "all"] if ranks > 1 else [0])]
    captures = [each for each in captures if each != ("host copy", 1)]  # the first rank copies for all
    for place, rank in captures:
        new = texts.prompt(texts.passages(1))
        asked = ask([new])
        steps += [{"rpc": ["arm_fault", place, rank, "memory", 0]}, asked, {"rpc": ["disarm_fault"]}, asked, asked]
    result = llama.run(steps, {"recompute_ratio": 0.1, "min_reused_share": 0.0}, **engine(ranks))
    answers = iter(result["answers"])
    plain, _, blended = (tokens(next(answers)) for _ in range(3))
    assert plain[0] != blended[0]  # or a fault that was ignored would not be seen
    assert plain[1] == blended[1]
    for fault in injected:
        next(answers)
        failed, seen, again = next(answers), next(answers), next(answers)
        raised = [one["raised"] for one in seen]
        assert raised == [int(fault[1] in (rank, "all")) for rank in range(ranks)], fault
        assert tokens(failed) == plain, fault
        assert tokens(again) == blended, fault
    for _ in range(ranks):
        _, slow, _ = (next(answers) for _ in range(3))
        assert tokens(slow) == blended
    for capture in captures:
        next(answers)
        failed, seen, missed, found = (next(answers) for _ in range(4))
        assert any(one["raised"] for one in seen), capture
        assert failed[0]["tokens"] == missed[0]["tokens"], capture
        took = [answer[0]["captured_in_s"] for answer in (failed, missed, found)]
        words = f"{capture}: {took} s to capture; {json.dumps(result['metrics'])}"
        assert missed[0]["cached"] < found[0]["cached"], words


def test_each_rank_keeps_what_it_read_in_memory(llama: Served, tmp_path: Path) -> None:
    """The first rank has what it wrote; the other one reads its heads once."""
    texts = Texts(43)
    passages = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(4)]
    reads = {"rpc": ["disk_reads"]}
    extra = {"store": f"file://{tmp_path}/store?ram_bytes=64MiB", "recompute_ratio": 0.2}
    steps = [ask(asked, alone=True), ask(asked), reads, ask(asked), reads]
    _, first, before, second, after = llama.run(steps, extra, **engine(2))["answers"]
    assert tokens(first) == tokens(second)
    assert before == after and before[0] == 0 < before[1]


@pytest.mark.may_fail("RuntimeError")
def test_a_fault_beyond_a_sliding_window_harms_nobody_whose_blocks_the_window_has_passed_too(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path
) -> None:
    """One null block stands for all blocks that windows have passed: it must not be named as the one that failed."""
    texts = Texts(37)
    passages = texts.passages(5)
    one, plain = texts.prompt(passages, front=60), texts.ids(700)
    decoding = {"max_tokens": 24}
    both = {"ask": [plain, one.ids], "sampling": decoding}
    steps: list[dict[str, Any]] = [{**both, "chunks": [[], []], "alone": True}, ask([one])]
    for layer in range(1, LAYERS):
        steps += [
            {"rpc": ["arm_fault", "run", 0, "error", layer]},
            {**both, "chunks": [[], one.spans]},
            {"rpc": ["disarm_fault"]},
        ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.1, "budget_row_layers": 100}
    result = vllm.run(models["mistral"], steps, extra, block_size=32, **engine(1))
    right = tokens(result["answers"][0])
    for number in range(LAYERS - 1):
        _, answers, seen = result["answers"][2 + 3 * number : 5 + 3 * number]
        assert [one_seen["raised"] for one_seen in seen] == [1]
        assert tokens(answers) == right
