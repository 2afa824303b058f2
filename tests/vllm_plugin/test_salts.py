"""Tenants that vLLM keeps apart by `cache_salt`; second turns; several answers in a small cache: one engine for all."""

from pathlib import Path
from typing import Any

import pytest

from vllm_running import Texts, Vllm

LAYERS = 6
TEXTS = Texts(31)
DOCUMENT = TEXTS.ids(300)
PASSAGES = TEXTS.passages(6, 190, 210)
SECRET = [*TEXTS.ids(9), *DOCUMENT, *TEXTS.ids(9)]
WRONG_GUESS = [*TEXTS.ids(11), *TEXTS.ids(300), *TEXTS.ids(7)]
WARM = TEXTS.prompt(PASSAGES)
TURN = TEXTS.prompt([TEXTS.ids(200), *PASSAGES[:2]], front=0)  # begins with a chunk that the store lacks
SEVERAL = TEXTS.prompt(PASSAGES[1:], front=40)
ONE = TEXTS.prompt(PASSAGES[1:], front=40)


def guess() -> list[int]:
    """The document between other texts."""
    return [*TEXTS.ids(11), *DOCUMENT, *TEXTS.ids(7)]


@pytest.fixture(scope="module")
def answers(vllm: Vllm, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    short: dict[str, Any] = {"sampling": {"max_tokens": 2}}
    many: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "n": 8, "seed": 1}
    steps: list[dict[str, Any]] = [
        {"ask": [SECRET], "chunks": [[[9, 309]]], "salt": "A", **short},  # 0
        {"ask": [guess()], "salt": "B", **short},
        {"ask": [guess()], **short},
        {"ask": [WRONG_GUESS], "salt": "B", **short},
        {"ask": [guess()], "salt": "A", **short},
        {"forget": True},  # 5
        {"ask": [WARM.ids], "chunks": [WARM.spans], **short},
        {"ask": [TURN.ids], "chunks": [TURN.spans], "sampling": {"max_tokens": 40}},
        {"count": True},
        {"ask": [[*TURN.ids, *TEXTS.ids(60)]], "chunks": [TURN.spans], **short},
        {"count": True},  # 10
        {"forget": True},
        {"ask": [ONE.ids], "chunks": [ONE.spans], **short},
        {"count": True},
        {"forget": True},
        {"ask": [SEVERAL.ids], "chunks": [SEVERAL.spans], "sampling": many},  # 15
        {"count": True},
    ]
    store = tmp_path_factory.mktemp("salts") / "store"
    extra = {"store": f"file://{store}", "recompute_ratio": 0.15, "refresh_s": 0}
    engine: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_model_len": 1600, "block_size": 32}
    found: list[Any] = vllm.run(models["llama"], steps, extra, enable_prefix_caching=True, **engine)["answers"]
    return found


def test_what_a_tenant_stored_is_found_by_nobody_else(answers: list[Any]) -> None:
    """Neither by another salt nor without one; a right guess looks like a wrong one."""
    other, nobody, wrong, same = (answers[step][0]["cached"] for step in (1, 2, 3, 4))
    assert other == nobody == wrong == 0
    assert same > 250


def test_the_second_turn_behind_a_missed_chunk_finds_vllms_cache(answers: list[Any]) -> None:
    before, after, turn = answers[8], answers[10], answers[9][0]
    assert turn["cached"] >= len(TURN.ids) // 32 * 32 - 32
    name = "vllm:cacheblend_row_layers"
    assert after[name] - before[name] <= 64 * LAYERS  # what is new at most, not the prompt again


def test_several_answers_share_one_blend_in_a_small_cache(answers: list[Any]) -> None:
    before_one, before, after = answers[10], answers[13], answers[16]
    name, preemptions = "vllm:cacheblend_row_layers", "vllm:num_preemptions"
    assert after[name] - before[name] <= 1.1 * (before[name] - before_one[name])
    assert after.get(preemptions, 0) == before.get(preemptions, 0)
    assert len(answers[15][0]["tokens"]) == 8
