"""Models with windows in vLLM's hybrid KV cache manager: right answers, and only the blocks that the last token sees.

Situations: a window shorter than a chunk, across chunks, shorter than the suffix; all layers with a window; ratio 1 and
less; in pages, by the backend's kernel and in buffers; second turns, whose held rows the window has passed; preemption;
plain requests beside and after blended ones; a blend that fails; the shadow check; a request that ends meanwhile.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_table
from vllm_hybrids import group_count, make_hybrid
from vllm_running import (
    COUNT,
    EXTENDED,
    FORGET,
    Asked,
    Served,
    Texts,
    Vllm,
    ask,
    check_blended,
    check_oracle,
    close,
    tokens,
)

pytestmark = pytest.mark.usefixtures("extension")

SCENES = [
    ("ministral", 64, False),
    ("ministral", 64, True),
    ("ministral", 160, False),
    ("ministral", 160, True),
    ("gemma3", 64, True),
    ("gpt-oss", 64, True),
]
"""Family, window, in pages. Chunks have 70 to 150 tokens, suffixes up to 90."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda *key: make_hybrid(tmp_path_factory.mktemp("hybrid") / "model", *key))


@pytest.fixture
def hybrid(vllm: Vllm, folders: Any, tmp_path: Path) -> Any:
    """A model by family, window and, perhaps, types of layers."""
    return lambda *key: Served(vllm, folders(*key), tmp_path / "store", block_size=32, **EXTENDED)


def prompts(seed: int, count: int) -> list[Asked]:
    """Prompts whose last chunk ends inside the window of the last token, or far in front of it."""
    texts = Texts(seed)
    passages = texts.passages(5)
    return [texts.prompt(texts.rng.sample(passages, 4), question=texts.rng.choice([5, 17, 90])) for _ in range(count)]


@pytest.mark.parametrize(("family", "window", "in_pages"), SCENES)
def test_full_recompute_answers_as_vllm_alone(hybrid: Any, family: str, window: int, in_pages: bool) -> None:
    """Also the plain requests in the same batch, and those after it; and no block stays taken."""
    model, asked = hybrid(family, window), prompts(21, 5)
    likeliest = {"logprobs": 4}
    plain = model.run([{"ask": [one.ids for one in asked], "sampling": likeliest}], None)
    mixed = ask([*asked, *asked], sampling=likeliest)
    mixed["chunks"] = [*mixed["chunks"][:5], *[[]] * 5]
    steps = [
        {"rpc": ["attend_by", "kernel" if window == 64 else "products"]},
        ask(asked, alone=True),
        {"forget": True},
        mixed,
        {"ask": [one.ids for one in asked], "sampling": likeliest, "chunks": [[]] * 5},
        {"cache": True},
    ]
    found = model.run(steps, {"recompute_ratio": 1.0, "in_pages": in_pages})
    right = plain["answers"][0]
    close(found["answers"][3], right + right)
    close(found["answers"][4], right)
    assert found["answers"][5]["groups"] == group_count(family) and found["answers"][5]["blocks"] == 0
    check_blended(found, 8)


@pytest.mark.parametrize(("family", "window", "in_pages"), SCENES)
def test_a_partial_ratio_answers_as_the_dense_oracle(hybrid: Any, family: str, window: int, in_pages: bool) -> None:
    folder, asked = hybrid(family, window), prompts(22, 4)
    extra = {"recompute_ratio": 0.2, "check_layers": [1], "in_pages": in_pages}
    steps = [ask(asked, alone=True), {"forget": True}, ask(asked, sampling={"max_tokens": 1, "logprobs": 8})]
    found = folder.run(steps, extra)
    check_blended(found, len(asked))
    model = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32)
    assert check_oracle(model, asked, found["answers"][2]) < len(asked)


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize(("window", "layers"), [(64, None), (160, None), (160, ("sliding_attention",) * 4)])
def test_a_second_turn_reads_held_rows_that_the_window_has_passed(
    hybrid: Any, window: int, layers: tuple[str, ...] | None, in_pages: bool
) -> None:
    """vLLM's tables have the null block for them: they are kept, read, and let go."""
    model, texts = hybrid("ministral", window, layers), Texts(23)
    passages = texts.passages(6)
    first = texts.prompt(passages[:3])
    answers = model.run([{"ask": [first.ids]}], None)["answers"]
    more = texts.prompt(passages[3:], question=30)
    ids = first.ids + answers[0][0]["tokens"][0] + more.ids
    offset = len(ids) - len(more.ids)
    spans = first.spans + [[start + offset, stop + offset] for start, stop in more.spans]
    plain = model.run([{"ask": [first.ids, ids], "sampling": {"logprobs": 4}}], None)
    extra = {"recompute_ratio": 1.0, "in_pages": in_pages}
    steps = [
        ask([first]),  # fills the store
        ask([more], alone=True),
        {"forget": True},
        ask([first]),
        COUNT,
        {"ask": [ids], "chunks": [spans], "sampling": {"logprobs": 4}},
        {"count": True},
        {"cache": True},
    ]
    found = model.run(steps, extra)["answers"]
    close(found[5], plain["answers"][0][1:])
    row_layers, held = (
        found[6][name] - found[4].get(name, 0)
        for name in ("vllm:cacheblend_row_layers", "vllm:cacheblend_hit_tokens vllm")
    )
    assert held >= len(first.ids) // 32 * 32
    assert row_layers <= len(layers or range(6)) * (len(ids) - held)  # they were not computed again
    assert found[7]["blocks"] == 0


def test_preempted_requests_are_provided_again(hybrid: Any) -> None:
    model, texts = hybrid("ministral", 64), Texts(6)
    passages = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(4)]
    sampling = {"max_tokens": 200}
    plain = model.run([{"ask": [one.ids for one in asked], "sampling": sampling}], None)
    extra = {"recompute_ratio": 1.0}
    steps = [ask(asked, alone=True), {"forget": True}, ask(asked, sampling=sampling), {"cache": True}]
    found = model.run(steps, extra, num_gpu_blocks_override=50, max_model_len=640, max_num_batched_tokens=256)
    assert tokens(found["answers"][2]) == tokens(plain["answers"][0])
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert found["answers"][3]["blocks"] == 0


def test_blended_blocks_of_no_group_are_found_by_a_plain_request(hybrid: Any) -> None:
    texts, model = Texts(5), hybrid("ministral", 64)
    passages = texts.passages(4)
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1], front=40, question=40)
    longer = [*asked.ids, *texts.ids(20)]
    plain = model.run([{"ask": [warm.ids, asked.ids, longer]}], None)
    steps = [
        ask([warm]),
        ask([asked]),
        ask([asked]),
        {"ask": [asked.ids, longer], "chunks": [[], []]},
        {"ask": [longer], "chunks": [asked.spans]},
    ]
    found = model.run(steps, {"recompute_ratio": 0.0, "match_content": False})["answers"]
    right = tokens(plain["answers"][0])
    assert tokens(found[0]) == right[:1]
    assert tokens(found[1])[0] != right[1]  # full reuse errs here, so pollution would be seen
    assert tokens(found[2]) == tokens(found[1]) and found[2][0]["cached"] >= len(asked.ids) - 33
    assert tokens(found[3]) == right[1:]
    assert found[4][0]["cached"] >= len(asked.ids) // 32 * 32  # the blended blocks serve its next turn


@pytest.mark.may_fail("RuntimeError")
def test_a_blend_that_fails_is_computed_by_vllm(hybrid: Any) -> None:
    """Blocks cannot be named where there are several groups: the request is."""
    model, asked = hybrid("ministral", 64), prompts(24, 3)
    plain = model.run([{"ask": [one.ids for one in asked]}], None)
    steps: list[dict[str, Any]] = [ask(asked, alone=True)]
    for place, after in (("open", 0), ("run", 3), ("write", 2), ("finish", 0)):
        steps += [{"forget": True}, {"rpc": ["arm_fault", place, 0, "error", after]}, ask(asked), {"cache": True}]
    found = model.run(steps, {"recompute_ratio": 1.0})
    for given, held in zip(found["answers"][3::4], found["answers"][4::4], strict=True):
        assert tokens(given) == tokens(plain["answers"][0])
        assert held["blocks"] == 0
    assert found["metrics"]["vllm:cacheblend_fallbacks RuntimeError"] >= 4


def test_the_shadow_check_reads_each_groups_blocks(hybrid: Any) -> None:
    """Of prompts that the window holds; longer ones are not compared."""
    name = "vllm:cacheblend_shadow"
    asked = prompts(25, 3)
    steps = [
        {"rpc": ["check_exact"]},
        ask(asked, alone=True),
        {"forget": True},
        ask(asked, sampling={"max_tokens": 18}),
    ]
    extra = {"recompute_ratio": 1.0, "shadow": 1.0}
    found = hybrid("ministral", 1024).run(steps, extra)["metrics"]
    compared = [value for key, value in found.items() if key.startswith(f"{name} ")]
    assert sum(compared) >= len(asked)
    assert not any(value for key, value in found.items() if key.startswith(f"{name}_tokens") and key.endswith(" no"))
    found = hybrid("ministral", 160).run(steps, extra)["metrics"]
    assert found[f"{name}_dropped beyond the sliding window"] >= len(asked)


def test_a_request_that_ends_while_it_is_provided_leaves_nothing(hybrid: Any) -> None:
    """With held rows of an earlier turn that were kept for it."""
    texts, model = Texts(26), hybrid("ministral", 64)
    passages = texts.passages(4)
    one, two = texts.prompt(passages[:2]), texts.prompt(passages[2:])
    ids, spans = one.ids + two.ids, one.spans + [[a + len(one.ids), b + len(one.ids)] for a, b in two.spans]
    steps: list[dict[str, Any]] = [ask([one], alone=True), ask([two], alone=True), FORGET, ask([one])]
    for taken in (2, 3, 4, 5):
        steps += [{"begin": f"r{taken}", "ids": ids, "chunks": spans}, {"until": f"r{taken}", "steps": taken}]
        steps += [{"abort": f"r{taken}"}, {"until": "nobody", "steps": 8}, {"cache": True}]
    found = model.run(steps, {"recompute_ratio": 1.0, "budget_row_layers": 100})["answers"]
    assert [step["blocks"] for step in found[8::5]] == [0] * 4


def test_memory_of_a_blended_request_with_the_hybrid_manager_on_and_off(hybrid: Any, tmp_path: Path) -> None:
    """Gemma 3 4B's layers (five in six with a window of 1,024) and a prompt of 4,096 tokens."""
    types = tuple("full_attention" if number % 6 == 5 else "sliding_attention" for number in range(34))
    model, texts = hybrid("gemma3", 1024, types), Texts(27)
    asked = texts.prompt(texts.passages(8, 480, 500), question=4096)
    asked.ids = asked.ids[:4096]
    steps = [
        {"ask": [asked.ids], "chunks": [asked.spans], "sampling": {"max_tokens": 1}},
        {"forget": True},
        {"begin": "r", "ids": asked.ids, "chunks": asked.spans, "sampling": {"max_tokens": 60}},
        *[part for given in (1, 20, 40) for part in ({"until": "r", "tokens": given}, {"cache": True})],
    ]
    used, engine = {}, {"max_model_len": 4400, "max_num_batched_tokens": 4400, "kv_cache_memory_bytes": 1 << 30}
    for off in (False, True):
        engine["disable_hybrid_kv_cache_manager"] = off
        extra = {"store": f"file://{tmp_path}/{off}", "recompute_ratio": 0.05}
        result = model.run(steps, extra, **engine)
        held = result["answers"][4::2]
        assert {step["groups"] for step in held} == ({1} if off else {7})
        assert result["metrics"]["vllm:cacheblend_requests"] == 1
        used[off] = max(step["bytes"] for step in held)
    figure = round(used[False] / used[True], 3)
    assert figure < 0.45
    if vllm_table.RECORDED:
        vllm_table.record(Path(vllm_table.RECORDED), hma_memory=figure)
