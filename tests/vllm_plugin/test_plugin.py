"""The plug-in in unmodified vLLM: exact where it must be, right beside everything else that vLLM does."""

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.vllm import plugin
from cacheblend.engines.vllm.metrics import Counts
from campaign import rotating
from vllm_models import MODELS
from vllm_prompts import COUNT, FORGET, Asked, Texts, ask, prompts, rpc
from vllm_running import EXTENDED, TWO_RANKS, Serve, Served, check_blended, check_oracle, dense, tokens

ATTENTION = ("products", "kernel", "pages", "pages, triton")
CORE = [*((family, "pages") for family in MODELS), ("llama", "products"), ("qwen3", "kernel"), ("llama", ATTENTION[-1])]
"""What every run draws: each family, and each way to attend."""


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


# ---- ratio 1: answers are vLLM's own -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "count", "blended", "extra", "engine"),
    [
        pytest.param("llama", 50, 60, {}, {}, id="prefix caching"),
        pytest.param("llama", 50, 60, {}, {"enable_prefix_caching": False}, id="no prefix caching"),
        # It starts with nothing, and learns that a tiny model computes faster than anything is loaded.
        pytest.param("llama", 50, 5, {"controller": True}, {}, id="whatever the controller leaves out"),
        pytest.param("qwen3", 12, 1, {"budget_row_layers": 1}, {}, id="slices of a few layers"),
        pytest.param("qwen3", 12, 1, {}, {"enforce_eager": False}, id="torch.compile"),
    ],
)
def test_prompts_at_ratio_one_answer_as_without_the_plugin(
    serve: Serve, family: str, count: int, blended: int, extra: dict[str, Any], engine: dict[str, Any]
) -> None:
    """One by one, which fills the store and blends what is there; all at once; found by content."""
    asked, model = mixed_prompts(3, count), serve(family)
    by_content = ask(asked, chunks=None)
    right = tokens(model.plain(by_content))
    steps = [ask(asked, alone=True), FORGET, ask(asked), FORGET, by_content]
    found = model.run(steps, {"recompute_ratio": 1.0, **extra}, **engine)
    for step in found["answers"][::2]:
        assert tokens(step) == right
    check_blended(found, blended)


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_preempted_request_is_provided_again(llama: Served, in_pages: bool) -> None:
    asked = prompts(6, 6, 3, held=4)
    long = ask(asked, sampling={"max_tokens": 48})
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "block_size": 32, "enable_prefix_caching": False}
    result = llama.run([ask(asked, alone=True), long], {"recompute_ratio": 1.0, "in_pages": in_pages}, **small)
    assert tokens(result["answers"][1]) == tokens(llama.plain(long))
    assert result["metrics"]["vllm:num_preemptions"] > 0


@pytest.mark.feature("several answers (n), seeds", "blends")
def test_several_answers_and_seeds(llama: Served) -> None:
    texts = Texts(9)
    passages = texts.passages(3)
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1])
    several = ask([asked], sampling={"n": 3, "temperature": 0.8, "seed": 5})
    result = llama.run([ask([warm]), several], {"recompute_ratio": 1.0})
    assert tokens(result["answers"][1]) == tokens(llama.plain(several))


def test_ucms_settings_and_chunks_that_end_with_a_token(llama: Served, tmp_path: Path) -> None:
    end, texts = 19, Texts(12)
    passages = [[*ids, end] for ids in texts.passages(4)]
    asked = [Asked([*chain.from_iterable(texts.rng.sample(passages, 3)), *texts.ids(9)], []) for _ in range(5)]
    store = {"storage_backends": str(tmp_path / "store"), "use_direct": False}
    extra = {
        "ucm_connectors": [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": store}],
        "ucm_sparse_config": {
            "Blend": {"chunk_end_token_id": end, "compute_meta": {"model.layers.1.self_attn.attn": {"ratio": 1.0}}}
        },
    }
    by_content = ask(asked, chunks=None)
    steps = [{**by_content, "alone": True}, FORGET, by_content]
    result = llama.vllm.run(llama.model, steps, extra)
    for step in result["answers"][::2]:
        assert tokens(step) == tokens(llama.plain(by_content))
    assert result["metrics"]["vllm:cacheblend_captured_tokens"] == sum(map(len, passages))
    check_blended(result, len(asked))


def test_passages_that_recur_are_learnt_without_a_mark_by_the_setting_and_for_each_tenant(
    llama: Served, tmp_path: Path
) -> None:
    """Prompts of the same few passages in changing orders, each behind a text of its own, with prefix caching on."""
    texts = Texts(3)
    held = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(held, 2), 20, 5, 12) for _ in range(12)]
    step = ask(asked, chunks=None)
    rounds = [{**step, "alone": True}, FORGET, step]
    right = tokens(llama.plain(step))
    found = llama.run(rounds, {"recompute_ratio": 1.0, "discover": True, "min_reused_share": 0.0})
    counted = found["metrics"]
    assert tokens(found["answers"][0]) == tokens(found["answers"][2]) == right
    loaded = sum(value for name, value in counted.items() if "hit_tokens" in name and "vllm" not in name.split()[-1])
    assert counted["vllm:cacheblend_captured_tokens"] > 200 and loaded > 1000
    assert counted["vllm:cacheblend_discovered_runs"] >= 4

    a_tenant_each = [ask([one], chunks=None, salt=f"tenant {number}") for number, one in enumerate(asked[:6])]
    for extra, steps in (({}, rounds), ({"discover": True}, a_tenant_each)):
        settings = {"store": f"file://{tmp_path}/{len(extra)}", "min_reused_share": 0.0} | extra
        counted = llama.run(steps, settings)["metrics"]
        assert not counted.get("vllm:cacheblend_captured_tokens") and not counted.get("vllm:cacheblend_requests")


# ---- a partial ratio -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), rotating([(f, a) for f in MODELS for a in ATTENTION], CORE))
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle(
    serve: Serve, family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pages`: in vLLM's own cache, by PyTorch and by our kernels, which Triton interprets."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    is_interpreted = attention == "pages, triton"  # which takes minutes for four prompts of four
    asked = prompts(21, *((1, 2) if is_interpreted else (4, 4)), held=5)
    attend_by = {"pages": "products", "pages, triton": "triton"}.get(attention, attention)
    steps = [rpc("attend_by", attend_by), ask(asked, alone=True), FORGET]
    steps.append(ask(asked, sampling={"max_tokens": 1, "logprobs": 8}))
    extra = {"recompute_ratio": 0.2, "check_layers": [1], "in_pages": attention.startswith("pages")}
    model = serve(family, **EXTENDED)
    result = model.run(steps, extra)
    check_blended(result, len(asked))
    assert check_oracle(dense(model.model), asked, result["answers"][3]) == 0


OURS = {"recompute_ratio": 0.2, "selector": "head", "recency": 1.0, "correction": 0.5}
"""What is the default where a tokenizer is known."""


@pytest.mark.parametrize(
    ("family", "extra", "in_pages"),
    [
        ("llama", {"recompute_ratio": 0.2, "selector": "hkvd", "check_layers": [1]}, False),
        ("qwen3", {"recompute_ratio": 0.2, "selector": "hkvd", "check_layers": [1]}, False),
        ("llama", {"recompute_ratio": 0.2, "selector": "hkvd"}, False),
        ("llama", OURS, False),
        ("qwen3", OURS, True),
        ("mistral", OURS, True),
    ],
)
def test_a_partial_ratio_chooses_the_rows_that_the_embedded_engine_chooses(
    serve: Serve, family: str, extra: dict[str, Any], in_pages: bool
) -> None:
    """Both engines on one store, each reading what the other wrote; hkvd without check layers filters gradually."""
    asked, model = prompts(11, 6), serve(family)
    steps = [ask(asked, alone=True), ask(asked, chunks=None, sampling={"max_tokens": 5})]
    blended = model.run(steps, extra | {"in_pages": in_pages}, enable_prefix_caching=False)
    config = BlendConfig.of(extra | {"capture": False})
    how: dict[str, Any] = {"dtype": "float32", "with_tokenizer": False, "device": "cpu"}
    with BlendEngine.from_pretrained(model.model, store=f"file://{model.store}", config=config, **how) as engine:
        plain, sampling = 0, SamplingParams(max_new_tokens=5, temperature=0.0)
        for one, answer in zip(asked, blended["answers"][1], strict=True):
            mine = engine.generate(one.prompt, sampling)
            assert mine.report.missed_tokens == 0  # what vLLM wrote is found
            assert answer["tokens"][0] == mine.token_ids
            plain += answer["tokens"][0] == engine.generate(one.prompt, sampling, ratio=1.0).token_ids
        assert plain < len(asked)  # or the ratio would show nothing


HOPS = {"hops": 2, "question_words": 1.0}


@pytest.mark.parametrize(
    ("seed", "extra"),
    [
        pytest.param(10, {"recompute_ratio": 0.2}, id="hkvd", marks=pytest.mark.feature("tensor parallel 2", "blends")),
        pytest.param(14, OURS, id="corrected keys"),
        # Each rank sees the attention of its own heads: hops need that of all.
        pytest.param(
            12,
            {"selector": "hybrid", "check_layers": [2, 4], "ratios": [0.3, 0.1], "early_ratio": 0.5, **HOPS},
            id="the question",
        ),
    ],
)
def test_two_tensor_parallel_ranks_choose_the_rows_of_one(
    serve: Serve, tmp_path: Path, seed: int, extra: dict[str, Any]
) -> None:
    """And a store that one filled serves two; several prompts at once go side by side on both ranks alike."""
    asked, model = prompts(seed, 4, held=5), serve("llama", enable_prefix_caching=False)
    steps = [ask(asked, alone=True), ask(asked)]
    full, right = map(tokens, model.run(steps, extra)["answers"])
    assert full != right  # or this would show nothing
    two = model.run(steps, extra, **TWO_RANKS)
    assert tokens(two["answers"][0]) == tokens(two["answers"][1]) == right
    check_blended(two, 2 * len(asked) - 1)
    filled = model.run(steps, extra | {"store": f"file://{tmp_path}/other"}, **TWO_RANKS)
    assert tokens(filled["answers"][1]) == right


@pytest.mark.parametrize("in_pages", [False, True])
def test_blended_blocks_are_never_found_by_a_plain_request(llama: Served, in_pages: bool) -> None:
    texts = Texts(5)
    passages = texts.passages(4)
    # The question fills a block: vLLM computes the last block, which is not full, itself the second time.
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1], front=40, question=40)
    right = tokens(llama.plain(ask([warm, asked])))
    steps = [ask([warm]), ask([asked]), ask([asked]), ask([], [asked])]  # at last the client names none
    result = llama.run(steps, {"recompute_ratio": 0.0, "match_content": False, "in_pages": in_pages}, block_size=32)
    exact, first, again, after = (answers[0] for answers in result["answers"])
    assert [exact["tokens"], after["tokens"]] == right
    assert first["tokens"] == again["tokens"] != right[1]  # full reuse errs here, so pollution would be seen
    assert after["cached"] == 32  # the block that lies wholly in front of the first passage


@pytest.mark.parametrize("ranks", [1, 2])
def test_hot_records_are_read_from_the_device_and_answers_are_the_same(serve: Serve, ranks: int) -> None:
    """One process shares all tiers; of two ranks each keeps its heads, and the scheduler looks up without them."""
    asked = prompts(43, 4, 3, held=4)
    reads, tier, both = rpc("disk_reads"), rpc("device_tier"), ask(asked)
    model = serve("llama", enable_prefix_caching=False, **EXTENDED)
    extra = {"store": f"cuda://?max_bytes=64MiB, file://{model.store}", "recompute_ratio": 0.2}
    steps = [ask(asked, alone=True), both, reads, both, reads, tier, {"forget": "connector"}]
    steps += [ask(asked, chunks=None), tier]
    result = model.run(steps, extra, **(TWO_RANKS if ranks > 1 else {}))
    _, first, before, second, after, full, _, _, emptied = result["answers"]
    assert tokens(first) == tokens(second)
    assert before == after
    assert all(each["tiers"] == ["cuda", "disk"] and each["bytes"] > 0 for each in full)
    assert all(each["bytes"] == 0 for each in emptied), emptied
    hits = {name.rpartition(" ")[2] for name, count in result["metrics"].items() if "hit_tokens" in name and count}
    assert "cuda" in hits if ranks == 1 else "disk" in hits and "cuda" not in hits, result["metrics"]
    assert tokens(model.run([both], {"recompute_ratio": 0.2})["answers"][0]) == tokens(first)


# ---- stores that go away, hang or are forgotten --------------------------------------------------------------------


@pytest.mark.may_fail("block lost", "store", "store write")
def test_a_store_that_goes_away_costs_time_and_nothing_else(llama: Served) -> None:
    texts = Texts(8)
    passages = texts.passages(4)
    step = ask([texts.prompt(passages), texts.prompt(passages[::-1])])
    steps = [step, {"remove": str(llama.store)}, step]
    result = llama.run(steps, {"recompute_ratio": 0.0}, enable_prefix_caching=False)
    assert tokens(result["answers"][2]) == tokens(llama.plain(step))


def test_after_the_connector_is_reset_nothing_old_is_used(llama: Served) -> None:
    """As after an update of the weights; what is captured from then on is found again. No flag of vLLM is needed."""
    texts = Texts(14)
    asked = texts.prompt(texts.passages(4))
    one = ask([asked])
    steps = [one, FORGET, one, COUNT, {"forget": "connector"}, one, COUNT, FORGET, one, COUNT]
    answers = llama.run(steps, {"recompute_ratio": 0.0})["answers"]
    counts = [answers[at] for at in (3, 6, 9)]
    assert [each["vllm:cacheblend_requests"] for each in counts] == [1, 1, 2]
    captured = [each["vllm:cacheblend_captured_tokens"] for each in counts]
    stored = sum(stop - start for start, stop in asked.spans)
    assert captured == [stored, 2 * stored, 2 * stored]


@pytest.mark.may_fail("slow store")
def test_a_store_that_hangs_while_others_decode_holds_up_nobody(llama: Served) -> None:
    """Neither in a step nor when something ends."""
    texts = Texts(41)
    passages = texts.passages(4)
    one, two = texts.prompt(passages[:3]), texts.prompt([passages[3], passages[0], passages[1]])

    def begin(name: str, asked: Asked, tokens: int = 8) -> dict[str, Any]:
        return {"begin": name, "ids": asked.ids, "chunks": asked.spans, "sampling": {"max_tokens": tokens}}

    steps: dict[str, dict[str, Any]] = {
        "exact": ask([], [one, two]),
        "warm": ask([one, two], alone=True),
        "right": ask([one, two]),
        "hang": rpc("hang_store", True),
        "plain begins": begin("plain", Asked(texts.ids(40), []), tokens=60),
        "plain decodes": {"until": "plain", "steps": 5},
        "one begins": begin("one", one),
        "two begins": begin("two", two),
        "plain ends": {"until": "plain"},  # reads hang meanwhile: an engine that waits for them stays here
        "one is not there": {"until": "one", "steps": 3},
        "two is aborted": {"abort": "two"},
        "steps go on": {"until": "one", "steps": 3},
        "answers": rpc("hang_store", False),
        "one is there": {"until": "one"},
        "hangs again": rpc("hang_store", True),
        "soon late": rpc("read_timeout", 0.2),
        "no pause": rpc("pause_after_slow_reads", 0.0),
        "late begins": begin("late", two),
        "late ends": {"until": "late"},
        "answers again": rpc("hang_store", False),
        "two begins again": begin("again", two),
        "two is there": {"until": "again"},
        "hangs to the end": rpc("hang_store", True),
        "no longer late": rpc("read_timeout", 600.0),
        "last begins": begin("last", one),
        "last is read": {"until": "last", "steps": 4},  # and the process ends meanwhile
    }
    extra = {"recompute_ratio": 0.1, "min_reused_share": 0.0}
    result = llama.run(list(steps.values()), extra, enable_prefix_caching=False, **EXTENDED)
    found = dict(zip(steps, result["answers"], strict=True))
    (exact_two,) = found["exact"][1]["tokens"]
    right_one, right_two = tokens(found["right"])
    assert right_two != [exact_two]
    assert found["plain ends"]["steps"] == 60 - 5  # one token a step: nothing took its place
    for name in ("one is not there", "steps go on", "last is read"):
        assert found[name]["tokens"] is None
    assert found["one is there"]["tokens"] == right_one
    assert found["late ends"]["tokens"] == [exact_two]
    assert found["two is there"]["tokens"] == right_two
    assert result["metrics"]["vllm:cacheblend_fallbacks slow store"] == 1


def test_a_server_of_several_connectors_reads_the_statistics_of_this_one() -> None:
    """Its logger looks connectors up by their names, and the server ends where it finds none."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    for _ in range(2):
        plugin.register()
    ours = {"kv_connector": "CacheBlendConnector", "kv_connector_module_path": "cacheblend.engines.vllm"}
    several = {"kv_connector_extra_config": {"connectors": [ours]}, "kv_role": "kv_both"}
    log, said = KVConnectorLogging(KVTransferConfig(kv_connector="MultiConnector", **several)), list[str]()
    counts = Counts()
    for _ in range(2):
        counts.add("requests", 3)
        told = counts.take()
        assert told is not None
        log.observe({"CacheBlendConnector": told.data})  # as it comes from another process
    log.log(lambda text, *more: said.append(text % more))
    assert len(said) == 1 and "requests" in said[0] and "6" in said[0]


def test_a_vllm_that_lacks_what_the_plugin_needs_still_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the connector: this package's entry point runs wherever it is installed."""
    monkeypatch.setitem(sys.modules, "cacheblend.engines.vllm.internals.weight_loader", None)  # importing it fails
    plugin.register()
    assert "CacheBlendConnector cannot be used here" in caplog.text
