"""The plug-in in unmodified vLLM: exact where it must be, right beside everything else that vLLM does."""

from pathlib import Path
from typing import Any

import pytest

from vllm_running import Asked, Texts, Vllm, needs_vllm

pytestmark = needs_vllm


def tokens(step: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [answer["tokens"] for answer in step]


def mixed_prompts(seed: int, count: int) -> list[Asked]:
    """Prompts of mixed shape over few passages: some plain, some of one passage, some that end in one."""
    texts = Texts(seed)
    passages = texts.passages(8)
    shapes = []
    for number in range(count):
        chosen = texts.rng.sample(passages, texts.rng.randint(0, 4))
        front = texts.rng.choice([0, 1, 16, 33])
        question = 1 if number % 10 == 9 else texts.rng.randint(2, 40)
        shapes.append(texts.prompt(chosen, front, texts.rng.choice([0, 3]), question))
    return shapes


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_fifty_prompts_at_ratio_one_answer_as_without_the_plugin(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, caching: bool
) -> None:
    asked = mixed_prompts(3, 50)
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    plain = vllm.run(models["llama"], [{"ask": ids}], None, enable_prefix_caching=True)
    forget = {"forget": True}
    steps = [
        {"ask": ids, "chunks": spans, "alone": True},  # fills the store, and blends what is there
        forget,
        {"ask": ids, "chunks": spans},
        forget,
        {"ask": ids},  # found by content
    ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    blended = vllm.run(models["llama"], steps, extra, enable_prefix_caching=caching)
    for step in blended["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert blended["metrics"]["vllm:cacheblend_requests"] >= 60


def test_a_vllm_that_lacks_what_the_plugin_needs_still_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the connector: this package's entry point runs wherever it is installed."""
    import sys

    from cacheblend.engines.vllm import plugin

    monkeypatch.setitem(sys.modules, "cacheblend.engines.vllm.internals.weight_loader", None)  # importing it fails
    plugin.register()
    assert "CacheBlendConnector cannot be used here" in caplog.text


def test_answers_are_right_whatever_the_controller_leaves_out(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path
) -> None:
    """It starts with nothing, and learns that a tiny model computes faster than anything is loaded."""
    asked = mixed_prompts(5, 30)
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    plain = vllm.run(models["llama"], [{"ask": ids}], None)
    steps: list[dict[str, Any]] = [{"ask": ids, "chunks": spans, "alone": True}]
    steps += [{"forget": True}, {"ask": ids, "chunks": spans}] * 3
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "controller": True}
    found = vllm.run(models["llama"], steps, extra)
    for step in found["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert found["metrics"]["vllm:cacheblend_requests"] >= 5


@pytest.mark.parametrize(("family", "checks"), [("llama", (1,)), ("qwen3", (1,)), ("llama", None)])
def test_a_partial_ratio_chooses_the_rows_that_the_embedded_engine_chooses(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, family: str, checks: tuple[int, ...] | None
) -> None:
    """Both engines on one store, each reading what the other wrote; without check layers both filter gradually."""
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.engines.hf.sampling import SamplingParams

    texts = Texts(11)
    passages = texts.passages(6)
    asked = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(6)]
    store = f"file://{tmp_path}/store"
    steps = [
        {"ask": [one.ids for one in asked], "chunks": [one.spans for one in asked], "alone": True},
        {"ask": [one.ids for one in asked], "sampling": {"max_tokens": 5}},
    ]
    extra = {"store": store, "recompute_ratio": 0.2, "selector": "hkvd"}
    extra |= {"check_layers": list(checks)} if checks else {}
    blended = vllm.run(models[family], steps, extra, enable_prefix_caching=False)
    config = BlendConfig(recompute_ratio=0.2, check_layers=checks, capture=False)
    with BlendEngine.from_pretrained(
        models[family], store=store, config=config, dtype="float32", with_tokenizer=False, device="cpu"
    ) as engine:
        plain = 0
        for one, answer in zip(asked, blended["answers"][1], strict=True):
            mine = engine.generate(one.prompt, SamplingParams(max_new_tokens=5, temperature=0.0))
            assert mine.report.missed_tokens == 0  # what vLLM wrote is found
            assert answer["tokens"][0] == mine.token_ids
            plain += (
                answer["tokens"][0]
                == engine.generate(one.prompt, SamplingParams(max_new_tokens=5, temperature=0.0), ratio=1.0).token_ids
            )
        assert plain < len(asked)  # or the ratio would show nothing


@pytest.mark.parametrize("in_pages", [False, True])
def test_blended_blocks_are_never_found_by_a_plain_request(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, in_pages: bool
) -> None:
    texts = Texts(5)
    passages = texts.passages(4)
    # The question fills a block: vLLM computes the last block, which is not full, itself the second time.
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1], front=40, question=40)
    plain = vllm.run(models["llama"], [{"ask": [warm.ids, asked.ids]}], None)
    steps = [
        {"ask": [warm.ids], "chunks": [warm.spans]},
        {"ask": [asked.ids], "chunks": [asked.spans]},
        {"ask": [asked.ids], "chunks": [asked.spans]},
        {"ask": [asked.ids], "chunks": [[]]},  # the client says that there are no chunks
    ]
    extra = {
        "store": f"file://{tmp_path}/store",
        "recompute_ratio": 0.0,
        "match_content": False,
        "in_pages": in_pages,
    }
    result = vllm.run(models["llama"], steps, extra, block_size=32)
    first, again, after = (result["answers"][i][0] for i in (1, 2, 3))
    right = tokens(plain["answers"][0])[1]
    assert tokens(result["answers"][0])[0] == tokens(plain["answers"][0])[0]
    assert first["tokens"] != right  # full reuse errs here, so pollution would be seen
    assert again["tokens"] == first["tokens"]
    assert after["tokens"] == right
    assert after["cached"] == 32  # the block that lies wholly in front of the first passage


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_preempted_request_is_provided_again(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, in_pages: bool
) -> None:
    texts = Texts(6)
    passages = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(6)]
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    sampling = {"max_tokens": 48}
    plain = vllm.run(models["llama"], [{"ask": ids, "sampling": sampling}], None)
    steps = [
        {"ask": ids, "chunks": spans, "alone": True},
        {"ask": ids, "chunks": spans, "sampling": sampling},
    ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "in_pages": in_pages}
    result = vllm.run(
        models["llama"],
        steps,
        extra,
        num_gpu_blocks_override=44,
        max_model_len=1024,
        block_size=32,
        enable_prefix_caching=False,
    )
    assert tokens(result["answers"][1]) == tokens(plain["answers"][0])
    assert result["metrics"]["vllm:num_preemptions"] > 0


def test_slices_of_a_few_layers_give_the_same(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    asked = mixed_prompts(7, 12)
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    plain = vllm.run(models["qwen3"], [{"ask": ids}], None)
    ask = {"ask": ids, "chunks": spans}
    steps = [{**ask, "alone": True}, {"forget": True}, ask]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "budget_row_layers": 1}
    sliced = vllm.run(models["qwen3"], steps, extra)
    for step in sliced["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])


@pytest.mark.may_fail("block lost", "store", "store write")
def test_a_store_that_goes_away_costs_time_and_nothing_else(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path
) -> None:
    texts = Texts(8)
    passages = texts.passages(4)
    asked = [texts.prompt(passages), texts.prompt(passages[::-1])]
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    plain = vllm.run(models["llama"], [{"ask": ids}], None)
    steps: list[dict[str, Any]] = [
        {"ask": ids, "chunks": spans},
        {"remove": f"{tmp_path}/store"},
        {"ask": ids, "chunks": spans},
    ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.0}
    result = vllm.run(models["llama"], steps, extra, enable_prefix_caching=False)
    assert tokens(result["answers"][2]) == tokens(plain["answers"][0])


@pytest.mark.feature("several answers (n), seeds", "blends")
def test_several_answers_and_seeds(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    texts = Texts(9)
    passages = texts.passages(3)
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1])
    sampling = {"n": 3, "temperature": 0.8, "seed": 5}
    plain = vllm.run(models["llama"], [{"ask": [asked.ids], "sampling": sampling}], None)
    steps = [
        {"ask": [warm.ids], "chunks": [warm.spans]},
        {"ask": [asked.ids], "chunks": [asked.spans], "sampling": sampling},
    ]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    result = vllm.run(models["llama"], steps, extra)
    assert tokens(result["answers"][1]) == tokens(plain["answers"][0])


@pytest.mark.feature("tensor parallel 2", "blends")
def test_two_tensor_parallel_ranks_choose_the_rows_of_one(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    """And a store that one filled serves two; several prompts at once go side by side on both ranks alike."""
    texts = Texts(10)
    passages = texts.passages(5)
    asked = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(4)]
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    ask = {"ask": ids, "chunks": spans, "alone": True}
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.2}
    one = vllm.run(models["llama"], [ask, ask], extra, enable_prefix_caching=False)
    two = vllm.run(
        models["llama"],
        [ask, {"ask": ids, "chunks": spans}],
        extra,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert tokens(two["answers"][0]) == tokens(two["answers"][1]) == tokens(one["answers"][1])
    other = {"store": f"file://{tmp_path}/other", "recompute_ratio": 0.2}
    filled = vllm.run(
        models["llama"],
        [ask, ask],
        other,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert tokens(filled["answers"][1]) == tokens(one["answers"][1])


def test_two_ranks_follow_the_question_as_one_does(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    """Each rank sees the attention of its own heads: hops by rows and words need that of all."""
    texts = Texts(12)
    passages = texts.passages(5)
    asked = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(4)]
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    follow: dict[str, Any] = {"selector": "hybrid", "check_layers": [2, 4], "ratios": [0.3, 0.1], "early_ratio": 0.5}
    follow |= {"hops": 2, "hop_rows": 16, "question_words": 1.0}
    extra = {"store": f"file://{tmp_path}/store"} | follow
    steps = [{"ask": ids, "chunks": spans, "alone": True}, {"ask": ids, "chunks": spans}]
    one = vllm.run(models["llama"], steps, extra, enable_prefix_caching=False)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    two = vllm.run(models["llama"], steps, extra, enable_prefix_caching=False, **ranks)
    assert tokens(two["answers"][0]) == tokens(two["answers"][1]) == tokens(one["answers"][1])
    assert tokens(one["answers"][1]) != tokens(one["answers"][0])  # full prefill's, or this would show nothing
    assert two["metrics"]["vllm:cacheblend_requests"] >= 2 * len(asked) - 1
    assert "vllm:cacheblend_fallbacks" not in " ".join(two["metrics"])


def test_ucms_settings_and_chunks_that_end_with_a_token(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    end = 19
    texts = Texts(12)
    passages = [[*ids, end] for ids in texts.passages(4)]
    prompts = [
        [token for passage in texts.rng.sample(passages, 3) for token in passage] + texts.ids(9) for _ in range(5)
    ]
    plain = vllm.run(models["llama"], [{"ask": prompts}], None)
    store = {"storage_backends": str(tmp_path / "store"), "use_direct": False}
    extra = {
        "ucm_connectors": [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": store}],
        "ucm_sparse_config": {
            "Blend": {"chunk_end_token_id": end, "compute_meta": {"model.layers.1.self_attn.attn": {"ratio": 1.0}}}
        },
    }
    steps = [{"ask": prompts, "alone": True}, {"forget": True}, {"ask": prompts}]
    result = vllm.run(models["llama"], steps, extra)
    for step in result["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert result["metrics"]["vllm:cacheblend_captured_tokens"] == sum(map(len, passages))
    assert result["metrics"]["vllm:cacheblend_requests"] >= len(prompts)


def test_with_torch_compile_on(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    asked = mixed_prompts(13, 10)
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    ask = {"ask": ids, "chunks": spans}
    plain = vllm.run(models["qwen3"], [{"ask": ids}], None)
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    result = vllm.run(models["qwen3"], [{**ask, "alone": True}, {"forget": True}, ask], extra, enforce_eager=False)
    for step in result["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert result["metrics"]["vllm:cacheblend_requests"] > 0


def test_after_the_connector_is_reset_nothing_old_is_used(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    """As after an update of the weights; what is captured from then on is found again. No flag of vLLM is needed."""
    texts = Texts(14)
    asked = texts.prompt(texts.passages(4))
    ask = {"ask": [asked.ids], "chunks": [asked.spans]}
    steps: list[dict[str, Any]] = [ask, {"forget": True}, ask, {"count": True}, {"forget": "connector"}]
    steps += [ask, {"count": True}, {"forget": True}, ask, {"count": True}]
    result = vllm.run(models["llama"], steps, {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.0})
    counts = [answer["vllm:cacheblend_requests"] for answer in result["answers"] if isinstance(answer, dict)]
    assert counts == [1, 1, 2]
    captured = [answer["vllm:cacheblend_captured_tokens"] for answer in result["answers"] if isinstance(answer, dict)]
    tokens_stored = sum(stop - start for start, stop in asked.spans)
    assert captured == [tokens_stored, 2 * tokens_stored, 2 * tokens_stored]


@pytest.mark.parametrize(
    ("extra", "engine", "words"),
    [
        ({"recompute_ration": 0.1}, {}, "did you mean recompute_ratio"),
        ({"store": "memory"}, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline"),
    ],
    ids=["unknown key", "pipeline parallel"],
)
def test_what_is_not_known_or_not_tested_is_refused_by_name(
    vllm: Vllm, models: dict[str, Path], extra: dict[str, Any], engine: dict[str, Any], words: str
) -> None:
    result = vllm.start(models["llama"], [], extra, **engine)
    assert "answers" not in result
    assert words in result["words"]


def test_what_cannot_be_blended_is_named_or_left_to_vllm(vllm: Vllm, tmp_path: Path) -> None:
    """Positions in the embeddings are found by calling the model: by the worker, which tells the scheduler's side."""
    from transformers import AutoModelForCausalLM, OPTConfig

    config = OPTConfig(
        vocab_size=2048, hidden_size=64, word_embed_proj_dim=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "opt")
    texts = Texts(15)
    asked = texts.prompt(texts.passages(3))
    step = {"ask": [asked.ids], "chunks": [asked.spans]}
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.0}
    refused = vllm.start(tmp_path / "opt", [step], extra)
    assert "answers" not in refused
    assert "adds positions to its embeddings" in refused["words"]
    plain = vllm.run(tmp_path / "opt", [step], None)
    left = vllm.run(tmp_path / "opt", [step, {"forget": True}, step], {**extra, "on_unblendable": "plain"})
    assert tokens(left["answers"][0]) == tokens(left["answers"][2]) == tokens(plain["answers"][0])
    assert not any(value for name, value in left["metrics"].items() if "cacheblend" in name)
