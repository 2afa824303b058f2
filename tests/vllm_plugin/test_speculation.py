"""Speculative decoding in unmodified vLLM beside the plug-in: prompts are blended for the model that answers.

A drafter only proposes, and vLLM's model takes what it would have said itself: greedy answers are those without
speculation, however little of a blended prompt a drafter has seen. Situations: prompts that are alone, side by side
and found by content, plain ones beside them, second turns, a small cache, a fault, the shadow check, which counts the
tokens of answers that come several at a time. (With seeds vLLM's CPU build ends by itself, without the plug-in too.)
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheblend.engines.vllm.internals.interface import refused_speculation
from vllm_checks import between, expected, found_in, prompts
from vllm_running import COUNT, EXTENDED, SHAPE, Texts, Vllm, ask, tokens

pytestmark = pytest.mark.usefixtures("extension")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
WORDS = 8


@pytest.fixture(scope="session")
def terse(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has few words, so that something of what is proposed is taken."""
    folder = tmp_path_factory.mktemp("terse") / "model"
    shutil.copytree(models["llama"], folder)
    weights = load_file(folder / "model.safetensors")
    silent = torch.ones(SHAPE["vocab_size"], dtype=torch.bool)
    silent[torch.randperm(SHAPE["vocab_size"], generator=torch.Generator().manual_seed(1))[:WORDS]] = False
    weights["lm_head.weight"][silent] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def drafters(terse: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Speculative configurations: n-grams; the model as its own drafter, in a cache with other heads; EAGLE."""
    folder = tmp_path_factory.mktemp("drafters")
    config, weights = json.loads((terse / "config.json").read_text()), load_file(terse / "model.safetensors")

    def write(name: str, changes: dict[str, Any], kept: dict[str, torch.Tensor]) -> str:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | changes))
        save_file(kept, folder / name / "model.safetensors", metadata={"format": "pt"})
        return str(folder / name)

    first = {name: weight for name, weight in weights.items() if ".layers." not in name or ".layers.0." in name}
    eagle = {name.removeprefix("model."): weight for name, weight in first.items() if ".layers." in name}
    del eagle["layers.0.input_layernorm.weight"]
    eagle["fc.weight"] = torch.eye(SHAPE["hidden_size"]).repeat(1, 2)
    narrow = {
        name: weight[:64].clone() if ".k_proj." in name or ".v_proj." in name else weight
        for name, weight in first.items()
    }  # two KV heads of four
    models = {
        "eagle": write("eagle", {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}, eagle),
        "draft_model": write("small", {"num_hidden_layers": 1, "num_key_value_heads": 2}, narrow),
    }
    found = {name: {"method": name, "model": path, "num_speculative_tokens": 3} for name, path in models.items()}
    return {"ngram": NGRAM, **found}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ngram", marks=pytest.mark.feature("speculative decoding, n-grams", "blends")),
        pytest.param(
            "eagle", marks=pytest.mark.feature("speculative decoding, EAGLE", "blends; the drafter starts cold")
        ),
        pytest.param(
            "draft_model",
            marks=pytest.mark.feature("speculative decoding, draft model", "blends; the drafter starts cold"),
        ),
    ],
)
def test_greedy_answers_are_those_without_speculation(
    vllm: Vllm, terse: Path, drafters: dict[str, dict[str, Any]], tmp_path: Path, method: str
) -> None:
    asked = prompts(41, 6, passages=3)
    texts = Texts(42)
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    beside, turns = texts.ids(120), [one + texts.ids(30) for one in ids[:2]]
    long: dict[str, Any] = {"sampling": {"max_tokens": 40}}
    plain = vllm.run(terse, [{"ask": [*ids, beside, *turns], **long}], None)
    steps = [
        ask(asked, alone=True, **long),
        {"forget": True},
        COUNT,
        {"ask": [*ids, beside], "chunks": [*spans, []], **long},
        COUNT,
        {"ask": turns, **long},
        {"forget": True},
        {"ask": [*ids, beside], **long},
        COUNT,
    ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    result = vllm.run(terse, steps, extra, speculative_config=drafters[method])
    right = tokens(plain["answers"][0])
    alone, _, before, together, counted, second, _, content, last = result["answers"]
    assert tokens(alone) == right[:6]
    assert tokens(together) == tokens(content) == right[:7]
    assert tokens(second) == right[7:]
    blended = [found["vllm:cacheblend_requests"] for found in (before, counted, last)]
    assert blended[1] - blended[0] == 6 and blended[2] - blended[1] >= 6
    assert counted[ACCEPTED] > before[ACCEPTED]
    assert "vllm:cacheblend_fallbacks" not in " ".join(last)


@pytest.mark.may_fail("RuntimeError")
@pytest.mark.feature("speculative decoding, n-grams", "blends")
def test_failed_prompts_and_a_small_cache_beside_ngrams(vllm: Vllm, terse: Path, tmp_path: Path) -> None:
    asked = prompts(43, 6, passages=3)
    long: dict[str, Any] = {"sampling": {"max_tokens": 48}}
    engine: dict[str, Any] = {"speculative_config": NGRAM, "enable_prefix_caching": False}
    plain = vllm.run(terse, [ask(asked, **long)], None)
    steps: list[dict[str, Any]] = [
        ask(asked, alone=True),
        ask(asked, **long),
        {"rpc": ["arm_fault", "run", 0, "error", 3]},
        ask(asked, **long),
        {"rpc": ["disarm_fault"]},
    ]
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "block_size": 32}
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    result = vllm.run(terse, steps, extra, **engine, **small, **EXTENDED)
    _, crowded, _, failed, (seen,) = result["answers"]
    assert tokens(crowded) == tokens(failed) == tokens(plain["answers"][0])
    assert result["metrics"][ACCEPTED] > 0
    assert seen["raised"] == 1


@pytest.mark.feature("shadow check beside speculative decoding", "blends")
def test_the_shadow_check_compares_the_tokens_that_were_taken(vllm: Vllm, terse: Path, tmp_path: Path) -> None:
    """Of answers that grow by several tokens in a step, beyond the 16 that are compared or ending before them."""
    asked = prompts(44, 5)
    every = {"logprobs": -1}
    steps: list[dict[str, Any]] = [ask(asked, alone=True), COUNT]
    for length in (24, 7, 1):
        steps += [ask(asked, sampling={"max_tokens": length, **every}), COUNT]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.3, "shadow": 1.0}
    engine = {"enable_prefix_caching": False, "max_logprobs": -1, "speculative_config": NGRAM}
    answers = vllm.run(terse, steps, extra, **engine)["answers"]
    for number in range(3):
        before, given, after = answers[1 + 2 * number : 4 + 2 * number]
        right = expected(terse, asked, given)
        assert found_in(between(before, after)) == pytest.approx(right, rel=1e-3, abs=1e-3), number
    assert answers[-1][ACCEPTED] > 0


@pytest.mark.feature("speculative decoding, other ways", "refused by name")
def test_other_ways_to_speculate_are_refused_by_name() -> None:
    assert refused_speculation(None) == refused_speculation(SimpleNamespace(method="eagle")) == ""
    words = refused_speculation(SimpleNamespace(method="mtp"))
    assert "'mtp'" in words and "ngram" in words and "leave it out" in words
