"""The shadow check beside a second connector in a `MultiConnector`, in front of ours and behind it.

Situations: the other loads in the step that schedules a request, while ours blends, checks and captures; both keep an
ended request's blocks, and either one lets go first; only one of them does; short answers, which are read after their
end, and long ones; plain requests that the other has, and that nobody has; a request that both have; aborts; after all
of it a prompt that takes the whole cache.
"""

from pathlib import Path
from typing import Any

import pytest

from vllm_checks import COUNT, MINE, NAME, ask, between, expected, found_in, prompts
from vllm_running import Asked, Texts, Vllm, needs_vllm

pytestmark = [needs_vllm, pytest.mark.usefixtures("extension")]

ENGINE: dict[str, Any] = {"max_num_batched_tokens": 2048, "block_size": 32, "max_logprobs": -1}


def connectors(folder: Path, *, in_front: bool) -> list[dict[str, Any] | None]:
    other = {
        "kv_connector": "Holding",
        "kv_connector_module_path": "holding",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return [other, None] if in_front else [None, other]


def plain(asked: list[Asked], **more: Any) -> dict[str, Any]:
    return {"ask": [one.ids for one in asked], "chunks": [[] for _ in asked], **more}


def mixed(blended: list[Asked], others: list[Asked], **more: Any) -> dict[str, Any]:
    """Blended and plain requests by turns, all of them at once."""
    pairs = [each for two in zip(blended, others, strict=True) for each in two]
    spans = [one.spans if number % 2 == 0 else [] for number, one in enumerate(pairs)]
    return {"ask": [one.ids for one in pairs], "chunks": spans, **more}


@pytest.mark.parametrize("in_front", [True, False], ids=["the other in front", "ours in front"])
def test_blended_plain_and_compared_requests_beside_another_connector(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, in_front: bool
) -> None:
    model, blended = models["llama"], prompts(31, 6)
    saved, new, both = prompts(32, 6, passages=2), prompts(33, 6, passages=2), prompts(34, 2)
    every = {"logprobs": -1}
    short, long = {"max_tokens": 5} | every, {"max_tokens": 20} | every
    steps: list[dict[str, Any]] = [
        plain(both, alone=True),  # the other saves them
        plain(saved, alone=True),
        {"forget": True},
        ask(both, alone=True),
        ask(blended, alone=True),
        {"forget": True},
        COUNT,
        mixed(blended, saved, sampling=short),
        COUNT,
        {"forget": True},
        mixed(blended, new, sampling=long),
        COUNT,
        {"forget": True},
        plain(saved + new, sampling=short),
        ask(both, sampling=short),
        COUNT,
    ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.2, "shadow": 1.0}
    beside = connectors(tmp_path / "other", in_front=in_front)
    answers = vllm.run(model, steps, extra, beside=beside, **ENGINE)["answers"]
    alone = vllm.run(model, steps, extra | {"shadow": 0}, **ENGINE)["answers"]
    none = vllm.run(model, steps, None, **ENGINE)["answers"]

    def tokens(run: list[Any], number: int, first: int = 0, every: int = 1) -> list[list[int]]:
        return [one["tokens"][0] for one in run[number][first::every]]

    for number in (7, 10):
        assert tokens(answers, number, 0, 2) == tokens(alone, number, 0, 2)  # blended
        assert tokens(answers, number, 1, 2) == tokens(none, number, 1, 2)  # plain
        before, given, after = answers[number - 1 if number == 7 else 8], answers[number], answers[number + 1]
        found = found_in(between(before, after))
        assert found == pytest.approx(expected(model, blended, given[::2]), rel=1e-3, abs=1e-3)
    assert tokens(answers, 13) == tokens(none, 13)
    assert all(one["cached"] > 0 for one in answers[7][1::2])  # the other has loaded them
    last = between(answers[11], answers[15])
    if in_front:
        assert tokens(answers, 14) == tokens(none, 14) and not found_in(last)[""]
        left = [answers[at]["vllm:cacheblend_not_blended another connector has it"] for at in (11, 15)]
        assert left[1] - left[0] == len(both)
    else:
        assert tokens(answers, 14) == tokens(alone, 14)
        assert found_in(last) == pytest.approx(expected(model, both, answers[14]), rel=1e-3, abs=1e-3)
    assert answers[15][f"{NAME}_waiting"] == 0
    assert not {name for name in answers[15] if name.startswith(f"{NAME}_dropped") and answers[15][name]}


@pytest.mark.parametrize("in_front", [True, False], ids=["the other in front", "ours in front"])
def test_blocks_that_both_keep_come_back(vllm: Vllm, models: dict[str, Path], tmp_path: Path, in_front: bool) -> None:
    """Requests aborted and ended at every length of answer; then a prompt that takes the whole cache."""
    (one,) = prompts(35, 1)
    large = Texts(36)
    steps: list[dict[str, Any]] = [ask([one], alone=True), ask([one], alone=True), COUNT]
    for number in range(8):
        name, tokens = f"r{number}", (1, 3, 15, 16, 17, 40, 60, 60)[number]
        steps += [{"begin": name, "ids": one.ids, "chunks": one.spans, "sampling": {"max_tokens": tokens}}]
        steps += [{"until": name, "steps": 4 + number}, {"abort": name}] if number % 2 else [{"until": name}]
        steps += [plain([Asked([(large.ids(1400), False)], [], large, 0, 0)], sampling={"max_tokens": 2})]
    steps.append(COUNT)
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.1, "shadow": 1.0}
    small = {"num_gpu_blocks_override": 47, "max_model_len": 1472, "enable_prefix_caching": False}
    beside = connectors(tmp_path / "other", in_front=in_front)
    result = vllm.run(models["llama"], steps, extra, beside=beside, **ENGINE, **small)
    first, last = result["answers"][2], result["answers"][-1]
    large_answers = [each[0]["tokens"][0] for each in result["answers"][3:-1] if isinstance(each, list)]
    assert [len(answer) for answer in large_answers] == [2] * 8
    came = between(first, last)
    ended = came.get(f" {MINE}", 0) + sum(value for name, value in came.items() if name.startswith("_dropped"))
    assert ended >= 4 and last[f"{NAME}_waiting"] == 0
