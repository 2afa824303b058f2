"""The plug-in in unmodified vLLM: exact where it must be, right beside everything else that vLLM does."""

import sys
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.vllm import plugin
from vllm_running import COUNT, FORGET, TWO_RANKS, Asked, Served, Texts, Vllm, ask, check_blended, make_opt, tokens


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
def test_fifty_prompts_at_ratio_one_answer_as_without_the_plugin(llama: Served, caching: bool) -> None:
    asked = mixed_prompts(3, 50)
    by_content = ask(asked, chunks=None)
    plain = llama.run([by_content], None, enable_prefix_caching=True)
    # The first one fills the store, and blends what is there.
    steps = [ask(asked, alone=True), FORGET, ask(asked), FORGET, by_content]
    blended = llama.run(steps, {"recompute_ratio": 1.0}, enable_prefix_caching=caching)
    for step in blended["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert blended["metrics"]["vllm:cacheblend_requests"] >= 60


def test_a_vllm_that_lacks_what_the_plugin_needs_still_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the connector: this package's entry point runs wherever it is installed."""
    monkeypatch.setitem(sys.modules, "cacheblend.engines.vllm.internals.weight_loader", None)  # importing it fails
    plugin.register()
    assert "CacheBlendConnector cannot be used here" in caplog.text


def test_answers_are_right_whatever_the_controller_leaves_out(llama: Served) -> None:
    """It starts with nothing, and learns that a tiny model computes faster than anything is loaded."""
    asked = mixed_prompts(5, 30)
    plain = llama.run([ask(asked, chunks=None)], None)
    found = llama.run([ask(asked, alone=True), *[FORGET, ask(asked)] * 3], {"recompute_ratio": 1.0, "controller": True})
    for step in found["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert found["metrics"]["vllm:cacheblend_requests"] >= 5


@pytest.mark.parametrize(("family", "checks"), [("llama", (1,)), ("qwen3", (1,)), ("llama", None)])
def test_a_partial_ratio_chooses_the_rows_that_the_embedded_engine_chooses(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, family: str, checks: tuple[int, ...] | None
) -> None:
    """Both engines on one store, each reading what the other wrote; without check layers both filter gradually."""
    texts = Texts(11)
    passages = texts.passages(6)
    asked = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(6)]
    store = f"file://{tmp_path}/store"
    steps = [ask(asked, alone=True), ask(asked, chunks=None, sampling={"max_tokens": 5})]
    extra = {"store": store, "recompute_ratio": 0.2, "selector": "hkvd"}
    extra |= {"check_layers": list(checks)} if checks else {}
    blended = vllm.run(models[family], steps, extra, enable_prefix_caching=False)
    config = BlendConfig(recompute_ratio=0.2, check_layers=checks, capture=False)
    with BlendEngine.from_pretrained(
        models[family], store=store, config=config, dtype="float32", with_tokenizer=False, device="cpu"
    ) as engine:
        plain, sampling = 0, SamplingParams(max_new_tokens=5, temperature=0.0)
        for one, answer in zip(asked, blended["answers"][1], strict=True):
            mine = engine.generate(one.prompt, sampling)
            assert mine.report.missed_tokens == 0  # what vLLM wrote is found
            assert answer["tokens"][0] == mine.token_ids
            plain += answer["tokens"][0] == engine.generate(one.prompt, sampling, ratio=1.0).token_ids
        assert plain < len(asked)  # or the ratio would show nothing


@pytest.mark.parametrize("in_pages", [False, True])
def test_blended_blocks_are_never_found_by_a_plain_request(llama: Served, in_pages: bool) -> None:
    texts = Texts(5)
    passages = texts.passages(4)
    # The question fills a block: vLLM computes the last block, which is not full, itself the second time.
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1], front=40, question=40)
    plain = llama.run([ask([warm, asked], chunks=None)], None)
    steps = [ask([warm]), ask([asked]), ask([asked]), ask([asked], chunks=[[]])]  # at last the client names none
    result = llama.run(steps, {"recompute_ratio": 0.0, "match_content": False, "in_pages": in_pages}, block_size=32)
    first, again, after = (result["answers"][i][0] for i in (1, 2, 3))
    right = tokens(plain["answers"][0])[1]
    assert tokens(result["answers"][0])[0] == tokens(plain["answers"][0])[0]
    assert first["tokens"] != right  # full reuse errs here, so pollution would be seen
    assert again["tokens"] == first["tokens"]
    assert after["tokens"] == right
    assert after["cached"] == 32  # the block that lies wholly in front of the first passage


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_preempted_request_is_provided_again(llama: Served, in_pages: bool) -> None:
    texts = Texts(6)
    passages = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(6)]
    long = ask(asked, sampling={"max_tokens": 48})
    plain = llama.run([{**long, "chunks": None}], None)
    extra = {"recompute_ratio": 1.0, "in_pages": in_pages}
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "block_size": 32, "enable_prefix_caching": False}
    result = llama.run([ask(asked, alone=True), long], extra, **small)
    assert tokens(result["answers"][1]) == tokens(plain["answers"][0])
    assert result["metrics"]["vllm:num_preemptions"] > 0


def test_slices_of_a_few_layers_give_the_same(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    asked = mixed_prompts(7, 12)
    plain = vllm.run(models["qwen3"], [ask(asked, chunks=None)], None)
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "budget_row_layers": 1}
    sliced = vllm.run(models["qwen3"], [ask(asked, alone=True), FORGET, ask(asked)], extra)
    for step in sliced["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])


@pytest.mark.may_fail("block lost", "store", "store write")
def test_a_store_that_goes_away_costs_time_and_nothing_else(llama: Served, tmp_path: Path) -> None:
    texts = Texts(8)
    passages = texts.passages(4)
    asked = [texts.prompt(passages), texts.prompt(passages[::-1])]
    plain = llama.run([ask(asked, chunks=None)], None)
    steps: list[dict[str, Any]] = [ask(asked), {"remove": f"{tmp_path}/store"}, ask(asked)]
    result = llama.run(steps, {"recompute_ratio": 0.0}, enable_prefix_caching=False)
    assert tokens(result["answers"][2]) == tokens(plain["answers"][0])


@pytest.mark.feature("several answers (n), seeds", "blends")
def test_several_answers_and_seeds(llama: Served) -> None:
    texts = Texts(9)
    passages = texts.passages(3)
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1])
    sampling = {"n": 3, "temperature": 0.8, "seed": 5}
    several = ask([asked], sampling=sampling)
    plain = llama.run([{**several, "chunks": None}], None)
    result = llama.run([ask([warm]), several], {"recompute_ratio": 1.0})
    assert tokens(result["answers"][1]) == tokens(plain["answers"][0])


@pytest.mark.feature("tensor parallel 2", "blends")
def test_two_tensor_parallel_ranks_choose_the_rows_of_one(llama: Served, tmp_path: Path) -> None:
    """And a store that one filled serves two; several prompts at once go side by side on both ranks alike."""
    texts = Texts(10)
    passages = texts.passages(5)
    asked = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(4)]
    alone, extra = ask(asked, alone=True), {"recompute_ratio": 0.2}
    ranks = {"enable_prefix_caching": False, **TWO_RANKS}
    one = llama.run([alone, alone], extra, enable_prefix_caching=False)
    two = llama.run([alone, ask(asked)], extra, **ranks)
    assert tokens(two["answers"][0]) == tokens(two["answers"][1]) == tokens(one["answers"][1])
    filled = llama.run([alone, alone], extra | {"store": f"file://{tmp_path}/other"}, **ranks)
    assert tokens(filled["answers"][1]) == tokens(one["answers"][1])


def test_two_ranks_follow_the_question_as_one_does(llama: Served) -> None:
    """Each rank sees the attention of its own heads: hops by rows and words need that of all."""
    texts = Texts(12)
    passages = texts.passages(5)
    asked = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(4)]
    extra: dict[str, Any] = {"selector": "hybrid", "check_layers": [2, 4], "ratios": [0.3, 0.1], "early_ratio": 0.5}
    extra |= {"hops": 2, "hop_rows": 16, "question_words": 1.0}
    steps = [ask(asked, alone=True), ask(asked)]
    one = llama.run(steps, extra, enable_prefix_caching=False)
    two = llama.run(steps, extra, enable_prefix_caching=False, **TWO_RANKS)
    assert tokens(two["answers"][0]) == tokens(two["answers"][1]) == tokens(one["answers"][1])
    assert tokens(one["answers"][1]) != tokens(one["answers"][0])  # full prefill's, or this would show nothing
    check_blended(two, 2 * len(asked) - 1)


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
    result = vllm.run(models["llama"], [{"ask": prompts, "alone": True}, {"forget": True}, {"ask": prompts}], extra)
    for step in result["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert result["metrics"]["vllm:cacheblend_captured_tokens"] == sum(map(len, passages))
    assert result["metrics"]["vllm:cacheblend_requests"] >= len(prompts)


def test_with_torch_compile_on(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> None:
    asked = mixed_prompts(13, 10)
    plain = vllm.run(models["qwen3"], [ask(asked, chunks=None)], None)
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    result = vllm.run(models["qwen3"], [ask(asked, alone=True), FORGET, ask(asked)], extra, enforce_eager=False)
    for step in result["answers"][::2]:
        assert tokens(step) == tokens(plain["answers"][0])
    assert result["metrics"]["vllm:cacheblend_requests"] > 0


def test_after_the_connector_is_reset_nothing_old_is_used(llama: Served) -> None:
    """As after an update of the weights; what is captured from then on is found again. No flag of vLLM is needed."""
    texts = Texts(14)
    asked = texts.prompt(texts.passages(4))
    one = ask([asked])
    steps: list[dict[str, Any]] = [one, FORGET, one, COUNT, {"forget": "connector"}, one, COUNT, FORGET, one, COUNT]
    result = llama.run(steps, {"recompute_ratio": 0.0})
    counts = [answer for answer in result["answers"] if isinstance(answer, dict)]
    assert [each["vllm:cacheblend_requests"] for each in counts] == [1, 1, 2]
    captured = [each["vllm:cacheblend_captured_tokens"] for each in counts]
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
    llama: Served, extra: dict[str, Any], engine: dict[str, Any], words: str
) -> None:
    result = llama.start([], extra, **engine)
    assert "answers" not in result
    assert words in result["words"]


def test_what_cannot_be_blended_is_named_or_left_to_vllm(vllm: Vllm, tmp_path: Path) -> None:
    """Positions in the embeddings are found by calling the model: by the worker, which tells the scheduler's side."""
    opt = make_opt(tmp_path / "opt")
    texts = Texts(15)
    asked = texts.prompt(texts.passages(3))
    step = ask([asked])
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.0}
    refused = vllm.start(opt, [step], extra)
    assert "answers" not in refused
    assert "adds positions to its embeddings" in refused["words"]
    plain = vllm.run(opt, [step], None)
    left = vllm.run(opt, [step, {"forget": True}, step], {**extra, "on_unblendable": "plain"})
    assert tokens(left["answers"][0]) == tokens(left["answers"][2]) == tokens(plain["answers"][0])
    assert not any(value for name, value in left["metrics"].items() if "cacheblend" in name)
