"""Models with latent attention (MLA) in vLLM: records of latents, its own answers at ratio 1, the dense oracle's below.

Situations: queries with and without a low rank; rotations stretched by YaRN, and such as vLLM's own operation on CPUs
turns wrongly; plain requests in the same step and afterwards; second turns; passages in another order; two ranks, which
both have all of what is kept; a blend that fails; the shadow check; models, settings and features that are refused, by
the configuration, by the modules and by the start-up check, and served plainly where the settings say so; stored bytes.
The families are in `test_reach`; what their pages look like in `test_latent_pages`.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_running
import vllm_table
from cacheblend.engines.vllm.internals.latent_attention import latent_spec
from families import VOCAB
from vllm_families import ENGINES, write_model
from vllm_requests import refusals
from vllm_running import EXTENDED, TWO_RANKS, Asked, Served, Texts, Vllm, check_blended, check_oracle, close

pytestmark = pytest.mark.usefixtures("extension")

SCENES = ["deepseek_v2-yarn", "deepseek_v3"]
LIKELIEST = {"max_tokens": 4, "logprobs": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("latents")
    return cache(lambda name: write_model(name, folder))


@pytest.fixture
def latents(vllm: Vllm, folders: Any, tmp_path: Path) -> Any:
    return lambda name: Served(vllm, folders(name), tmp_path / "store", **EXTENDED, **ENGINES.get(name, {}))


def prompts(seed: int, count: int) -> list[Asked]:
    """Of the same passages in changing order."""
    texts = Texts(seed, VOCAB)
    passages = texts.passages(4, 60, 110)
    return [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(count)]


def ask(asked: list[Asked], **more: Any) -> dict[str, Any]:
    return vllm_running.ask(asked, **{"sampling": LIKELIEST, **more})


def plainly(asked: list[Asked]) -> dict[str, Any]:
    return ask(asked, chunks=[[]] * len(asked))


@pytest.mark.parametrize("name", SCENES)
def test_full_recompute_answers_as_vllm_alone(latents: Any, name: str) -> None:
    """Also the plain requests in the same step, and those after it."""
    model, asked = latents(name), prompts(31, 3)
    right = model.run([plainly(asked)], None)["answers"][0]
    mixed = ask([*asked, *asked])
    mixed["chunks"] = [*mixed["chunks"][:3], *[[]] * 3]
    steps = [ask(asked, alone=True), {"forget": True}, mixed, plainly(asked), {"cache": True}]
    found = model.run(steps, {"recompute_ratio": 1.0})
    close(found["answers"][2], right + right)
    close(found["answers"][3], right)
    assert found["answers"][4]["blocks"] == 0  # none stays taken
    check_blended(found, len(asked))


@pytest.mark.parametrize("name", SCENES)
def test_a_partial_ratio_answers_as_the_dense_oracle(latents: Any, name: str) -> None:
    folder, asked = latents(name), prompts(32, 3)
    extra = {"recompute_ratio": 0.2, "check_layers": [1], "in_pages": True}
    found = folder.run([ask(asked, alone=True), {"forget": True}, ask(asked)], extra)
    check_blended(found, len(asked))
    model = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32)
    assert check_oracle(model, asked, found["answers"][2]) < len(asked)


def test_a_second_turn_answers_as_vllm_alone(latents: Any) -> None:
    (first,), texts = prompts(33, 1), Texts(34, VOCAB)
    model, extra = latents("deepseek_v3"), {"recompute_ratio": 1.0}
    answer = model.run([plainly([first])], None)["answers"][0][0]["tokens"][0]
    second = texts.prompt([], front=0)
    second.ids, second.spans = [*first.ids, *answer, *texts.ids(19)], first.spans
    right = model.run([plainly([first]), plainly([second])], None)["answers"]
    found = model.run([ask([first]), ask([first]), ask([second]), plainly([second])], extra)
    close(found["answers"][1], right[0])
    close(found["answers"][2] + found["answers"][3], right[1] + right[1])
    assert found["metrics"]["vllm:cacheblend_requests"] == 2


def test_two_ranks_answer_as_one(latents: Any) -> None:
    """Both keep the whole latent, and have half of the heads that it is expanded to; one's store serves two."""
    model, asked = latents("deepseek_v3"), prompts(35, 2)
    extra = {"recompute_ratio": 0.3}
    one = model.run([ask(asked, alone=True), {"forget": True}, ask(asked)], extra)
    two = model.run([ask(asked)], extra, **TWO_RANKS)
    close(two["answers"][0], one["answers"][2])
    assert two["metrics"]["vllm:cacheblend_requests"] == len(asked)


@pytest.mark.may_fail("RuntimeError")
def test_a_blend_that_fails_is_computed_by_vllm(latents: Any) -> None:
    model, asked = latents("deepseek_v3"), prompts(36, 2)
    right = model.run([plainly(asked)], None)["answers"][0]
    steps: list[dict[str, Any]] = [ask(asked, alone=True), {"rpc": ["arm_fault", "attention", 0, "error", 2]}]
    steps += [ask(asked, alone=True), {"rpc": ["disarm_fault"]}, ask(asked)]
    found = model.run(steps, {"recompute_ratio": 1.0})
    assert found["answers"][3][0]["raised"] == 1
    close(found["answers"][2], right)
    close(found["answers"][4], right)


def test_the_shadow_check_agrees_with_full_recompute(latents: Any) -> None:
    asked = prompts(37, 3)
    steps = [{"rpc": ["check_exact"]}, ask(asked, alone=True), ask(asked, sampling={"max_tokens": 12}), {"count": True}]
    found = latents("deepseek_v3").run(steps, {"recompute_ratio": 1.0, "shadow": 1.0})["metrics"]
    shadow = {name: value for name, value in found.items() if "cacheblend_shadow" in name}
    disagreeing = [value for name, value in shadow.items() if "_tokens" in name and " no" in name]
    agreeing = sum(value for name, value in shadow.items() if "_tokens" in name and " yes" in name)
    assert not any(disagreeing) and agreeing >= len(asked) * 12, shadow


def test_what_is_not_blended_of_such_models_is_refused_by_name() -> None:
    """vLLM's CPU build ends with its own words at a model with an indexer, before it asks the connector."""

    assert refusals(use_mla=True) == []
    (found,) = refusals(use_mla=True, hf={"model_type": "deepseek_v32", "index_topk": 2048})
    assert "deepseek_v32 with sparse attention to the 2048 tokens that an indexer selects" in found
    for what, fields in (
        ("LoRA", {"lora": SimpleNamespace()}),
        ("an FP8 cache", {"cache": "fp8"}),
        ("speculative decoding", {"speculative": SimpleNamespace(method="ngram")}),
    ):
        (found,) = refusals(use_mla=True, **fields)
        assert found.startswith(f"MLA attention beside {what}")
    with pytest.raises(Exception, match="attends sparsely, to tokens that an indexer selects"):
        latent_spec(SimpleNamespace(layer_name="layers.0", use_sparse=True))


@pytest.mark.parametrize("measure", ["k", "v"])
def test_a_measure_of_keys_or_values_alone_ends_the_start(latents: Any, measure: str) -> None:
    """A layer keeps one vector for both."""
    refused = latents("deepseek_v3").start([], {"store": "memory", "measure": measure})
    assert "answers" not in refused
    assert f"measure '{measure}' compares keys or values alone" in refused["words"]


def test_a_model_that_cannot_be_blended_is_named_or_left_to_vllm(vllm: Vllm, folders: Any, tmp_path: Path) -> None:
    """One whose rotated parts vLLM's own CPU operation turns otherwise than by their positions: it takes slices for
    whole rows. It shows while layers are run, not in the configuration."""
    model, asked = Served(vllm, folders("deepseek_v2"), tmp_path / "store"), prompts(38, 2)
    extra = {"recompute_ratio": 0.0}
    refused = model.start([ask(asked)], extra)
    assert "answers" not in refused
    assert "the keys of layer 0 follow none of the model's 1 rotations" in refused["words"]
    right = model.run([plainly(asked)], None)["answers"][0]
    left = model.run([ask(asked), ask(asked)], {**extra, "on_unblendable": "plain"})
    for given in left["answers"]:
        close(given, right)
    assert not any(value for name, value in left["metrics"].items() if "cacheblend" in name)


def test_records_are_a_tenth_of_the_expanded_cache(vllm: Vllm, tmp_path: Path) -> None:
    """Of DeepSeek-V2-Lite's heads; bytes are those of the folder, with everything that is stored beside records."""
    heads, head_dim, rotary_dim, layers = 16, 128, 64, 2
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers}
    shape |= {"qk_nope_head_dim": head_dim, "v_head_dim": head_dim, "q_lora_rank": None}
    model, asked = write_model("deepseek_v2-yarn", tmp_path, **shape), prompts(39, 2)
    store = tmp_path / "store"
    found = vllm.run(model, [ask(asked, alone=True)], {"store": f"file://{store}"}, **EXTENDED)
    tokens = found["metrics"]["vllm:cacheblend_captured_tokens"]
    assert tokens == sum(map(len, {tuple(one.ids[start:stop]) for one in asked for start, stop in one.spans}))
    stored = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    expanded = layers * heads * (head_dim + rotary_dim + head_dim) * 4
    figure = round(stored / tokens / expanded, 3)
    assert figure < 0.15
    if vllm_table.RECORDED:
        vllm_table.record(Path(vllm_table.RECORDED), mla_bytes=figure)
