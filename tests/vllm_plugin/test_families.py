"""Families of decoders in vLLM, end to end: its own answers at ratio 1, the dense oracle's at 0.2, plain ones beside.

Besides, what is particular to two kinds. Windows, in vLLM's hybrid KV cache manager: only the blocks that the last
token sees are kept; a window may be shorter than a chunk or than the suffix, or go across chunks. Latent attention:
queries with and without a low rank, rotations stretched by YaRN; what its pages look like is in `test_paged_cache`.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import vllm_table
from campaign import rotating
from families import VOCAB
from vllm_models import ENGINES, REACH, group_count, make_family, make_hybrid
from vllm_prompts import CACHE, COUNT, FORGET, Asked, Texts, ask, prompts, rpc
from vllm_running import EXTENDED, SHADOW, TWO_RANKS, Serve, Served, check_blended, check_oracle, close, dense, tokens

Family = Serve
"""Of a name; or of a name, a window and, perhaps, types of layers, for a model with windows."""

TOLD: dict[str, Any] = {"sampling": {"max_tokens": 4, "logprobs": 4}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def made(name: str, window: int = 0, layers: Sequence[str] | None = None) -> Path:
        folder = tmp_path_factory.mktemp("family")
        return make_hybrid(folder / "model", name, window, layers) if window else make_family(name, folder)

    return made


@pytest.fixture
def family(serve: Serve, folders: Callable[..., Path]) -> Family:
    return lambda name, *windows: serve(
        folders(name, *windows), **EXTENDED, **({"block_size": 32} if windows else ENGINES.get(name, {}))
    )


def drawn(seed: int, count: int, below: int = 2000) -> list[Asked]:
    """Prompts whose last chunk ends inside the window of the last token, or far in front of it."""
    texts = Texts(seed, below)
    passages = texts.passages(5)
    return [texts.prompt(texts.rng.sample(passages, 4), question=texts.rng.choice([5, 17, 90])) for _ in range(count)]


def check_both_ratios(
    model: Served, asked: list[Asked], extra: dict[str, Any], *first: Any, oracle: Any
) -> dict[str, Any]:
    """One by one, all at once, beside the same prompts as plain requests, and these again; no block stays taken.

    Returns:
        What was told of the cache at last.
    """
    right = model.plain(ask(asked, **TOLD))
    steps = list(first)
    for ratio in (1.0, 0.2):
        told = TOLD | {"options": {"recompute_ratio": ratio}}
        steps += [FORGET, ask(asked, alone=True, **told), FORGET, ask(asked, **told)]
        steps += [FORGET, ask(asked, asked, **told), ask([], asked, **TOLD)]
    result = model.run([*steps, CACHE], {"check_layers": [1], **extra})
    answers, count = result["answers"][len(first) :], len(asked)
    exact = answers[1] + answers[3] + answers[5] + answers[6] + answers[12][count:] + answers[13]
    close(exact, 7 * right)
    if oracle is not None:
        for given in (answers[8], answers[10]):
            assert check_oracle(oracle, asked, given) < count
    check_blended(result, 3 * count)
    assert answers[14]["blocks"] == 0
    return dict(answers[14])


# ---- all families --------------------------------------------------------------------------------------------------

NOT_RUN = {"minimax_m2": ("AssertionError", "has no sigmoid routing; it blends in the embedded engine")}
"""Families that vLLM's CPU build does not run: its error, which has no words, and what is missing."""

WITHOUT_ORACLE = {
    "apertus": "vLLM's activation differs from transformers' by 0.003 in log-probabilities",
    "cohere2": "vLLM's own answers are not those of transformers beyond a window",
}
"""Families that vLLM alone computes otherwise than transformers, which the oracle runs: only r = 1 is checked."""

KINDS = ("llama", "mistral-window", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v2", "phi", "minimax_m2")
"""Those that every run draws: full attention, a window, experts, a soft-cap, windows in every other layer with sinks,
latent attention, layers in parallel, and one that vLLM does not run."""

ENGINE: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 8}


@pytest.mark.parametrize("name", rotating(REACH, KINDS))
def test_a_family_answers_as_vllm_at_one_and_as_the_oracle_below(
    serve: Serve, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    """What came of each is noted, and printed at the end of the run."""
    note = partial(record_property, "reach")
    texts = Texts(REACH.index(name), VOCAB)
    passages = texts.passages(3, 70, 90)
    asked = [texts.prompt(passages, front=9), texts.prompt(passages[::-1], front=9)]
    model = serve(make_family(name, tmp_path), **ENGINE, **ENGINES.get(name, {}))
    if name in NOT_RUN:
        error, reason = NOT_RUN[name]
        assert error in model.refusal({}, ask(asked))
        note([name, vllm_table.NOT_RUN, f"vLLM's CPU build {reason} ({error})"])
        return
    try:
        oracle = None if name in WITHOUT_ORACLE else dense(model.model)
        if getattr(getattr(oracle, "config", None), "attn_logit_softcapping", None):
            oracle.set_attn_implementation("eager")  # SDPA drops the soft-cap
        check_both_ratios(model, asked, {"store": "memory"}, oracle=oracle)
    except BaseException:
        note([name, vllm_table.FAILS, "answers"])
        raise
    note([name, "blends", WITHOUT_ORACLE.get(name, "")])


# ---- windows and latents -------------------------------------------------------------------------------------------


SCENES = [
    *((key, in_pages) for key in (("ministral", 64), ("ministral", 160)) for in_pages in (False, True)),
    *((key, in_pages) for key in (("deepseek_v2-yarn",), ("deepseek_v3",)) for in_pages in (False, True)),
    (("gemma3", 64), True),
    (("gpt-oss", 64), True),
]


@pytest.mark.parametrize(("key", "in_pages"), SCENES, ids=str)
def test_windows_and_latents_at_both_ratios(family: Family, key: Any, in_pages: bool) -> None:
    """Chunks have 70 to 150 tokens, suffixes up to 90."""
    is_latent, model = len(key) == 1, family(*key)
    asked = drawn(21, 4, VOCAB if is_latent else 2000)
    extra, attend_by = {"in_pages": in_pages}, rpc("attend_by", "kernel" if key[-1] == 64 else "products")
    cache = check_both_ratios(model, asked, extra, attend_by, oracle=dense(model.model))
    assert cache["groups"] == (1 if is_latent else group_count(key[0]))


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize(
    ("key", "layers"),
    [
        (("ministral", 64), 6),
        (("ministral", 160), 6),
        (("ministral", 160, ("sliding_attention",) * 4), 4),
        (("deepseek_v3",), 0),  # vLLM's CPU build caches none of such models
    ],
)
def test_a_second_turn_reads_held_rows_that_the_window_has_passed(
    family: Family, key: Any, layers: int, in_pages: bool
) -> None:
    """vLLM's tables have the null block for them: they are kept, read, and let go."""
    model, texts = family(*key), Texts(23, 2000 if layers else VOCAB)
    passages = texts.passages(6)
    first, more = texts.prompt(passages[:3]), texts.prompt(passages[3:], question=30)
    (answer,) = tokens(model.plain(ask([first])))
    second = first + Asked(answer[0], []) + more
    right = model.plain(ask([second], **TOLD))
    fill = [ask([first]), ask([more], alone=True), FORGET, ask([first]), COUNT]
    steps = [*fill, ask([second], **TOLD), COUNT, CACHE, ask([], [second], **TOLD)]
    found = model.run(steps, {"recompute_ratio": 1.0, "in_pages": in_pages})["answers"]
    close(found[5] + found[8], right + right)
    row_layers, held, requests = (
        found[6].get(f"vllm:cacheblend_{name}", 0) - found[4].get(f"vllm:cacheblend_{name}", 0)
        for name in ("row_layers", "hit_tokens vllm", "requests")
    )
    assert requests == 1 and found[7]["blocks"] == 0
    if layers:
        assert held >= len(first.ids) // 32 * 32
        assert row_layers <= layers * (len(second.ids) - held)  # they were not computed again


@pytest.mark.may_fail("RuntimeError")
@pytest.mark.parametrize(
    ("key", "faults"),
    [
        (("ministral", 64), [("open", 0), ("run", 3), ("write", 2), ("finish", 0)]),
        (("deepseek_v3",), [("attention", 2)]),
    ],
)
def test_a_blend_that_fails_is_computed_by_vllm(family: Family, key: Any, faults: Any) -> None:
    """Blocks cannot be named where there are several groups: the request is."""
    model, asked = family(*key), drawn(24, 3, VOCAB if len(key) == 1 else 2000)
    right = model.plain(ask(asked, **TOLD))
    steps = [ask(asked, alone=True)]
    for place, after in faults:
        steps += [FORGET, rpc("arm_fault", place, 0, "error", after), ask(asked, **TOLD), rpc("disarm_fault"), CACHE]
    found = model.run([*steps, FORGET, ask(asked, **TOLD)], {"recompute_ratio": 1.0})
    *answers, _, last = found["answers"]
    close(last, right)
    for given, (seen,), held in zip(answers[3::5], answers[4::5], answers[5::5], strict=True):
        close(given, right)
        assert seen["raised"] == 1 and held["blocks"] == 0
    assert found["metrics"]["vllm:cacheblend_fallbacks RuntimeError"] >= len(faults)


def test_the_shadow_check_reads_each_groups_blocks_and_latents(family: Family) -> None:
    """It agrees with full recompute, of prompts that the window holds; longer ones are not compared."""
    for key in (("ministral", 1024), ("deepseek_v3",), ("ministral", 160)):
        asked = drawn(25, 3, VOCAB if len(key) == 1 else 2000)
        steps = [rpc("check_exact"), ask(asked, alone=True), FORGET, ask(asked, sampling={"max_tokens": 18}), COUNT]
        found = family(*key).run(steps, {"recompute_ratio": 1.0, "shadow": 1.0})["metrics"]
        if key[-1] == 160:
            assert found[f"{SHADOW}_dropped beyond the sliding window"] >= len(asked)
            continue
        compared, agreeing, disagreeing = (
            sum(value for name, value in found.items() if name.startswith(start) and name.endswith(end))
            for start, end in ((f"{SHADOW} ", ""), (f"{SHADOW}_tokens", " yes"), (f"{SHADOW}_tokens", " no"))
        )
        assert compared >= len(asked) and agreeing >= 16 * len(asked) and not disagreeing, found


def test_preempted_requests_are_provided_again(family: Family) -> None:
    model, asked = family("ministral", 64), prompts(6, 4, 3, held=4)
    long = ask(asked, sampling={"max_tokens": 200})
    steps = [ask(asked, alone=True), FORGET, long, CACHE]
    small = {"num_gpu_blocks_override": 50, "max_model_len": 640, "max_num_batched_tokens": 256}
    found = model.run(steps, {"recompute_ratio": 1.0}, **small)
    assert tokens(found["answers"][2]) == tokens(model.plain(long))
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert found["answers"][3]["blocks"] == 0


def test_blended_blocks_of_no_group_are_found_by_a_plain_request(family: Family) -> None:
    texts, model = Texts(5), family("ministral", 64)
    passages = texts.passages(4)
    warm, asked = texts.prompt(passages), texts.prompt(passages[::-1], front=40, question=40)
    longer = asked + Asked(texts.ids(20), [])
    right = tokens(model.plain(ask([warm, asked, longer])))
    steps = [ask([warm]), ask([asked]), ask([asked]), ask([], [asked, longer]), ask([longer])]
    found = model.run(steps, {"recompute_ratio": 0.0, "match_content": False})["answers"]
    assert tokens(found[0] + found[3]) == right
    assert tokens(found[1])[0] != right[1]  # full reuse errs here, so pollution would be seen
    assert tokens(found[2]) == tokens(found[1]) and found[2][0]["cached"] >= len(asked.ids) - 33
    assert found[4][0]["cached"] >= len(asked.ids) // 32 * 32  # the blended blocks serve its next turn


def test_a_request_that_ends_while_it_is_provided_leaves_nothing(family: Family) -> None:
    """With held rows of an earlier turn that were kept for it."""
    texts, model = Texts(26), family("ministral", 64)
    passages = texts.passages(4)
    one, two = texts.prompt(passages[:2]), texts.prompt(passages[2:])
    both = one + two
    steps: list[dict[str, Any]] = [ask([one], alone=True), ask([two], alone=True), FORGET, ask([one])]
    for taken in (2, 3, 4, 5):
        steps += [{"begin": f"r{taken}", "ids": both.ids, "chunks": both.spans}]
        steps += [
            {"until": f"r{taken}", "steps": taken},
            {"abort": f"r{taken}"},
            {"until": "nobody", "steps": 8},
            CACHE,
        ]
    found = model.run(steps, {"recompute_ratio": 1.0, "budget_row_layers": 100})["answers"]
    assert [step["blocks"] for step in found[8::5]] == [0] * 4


def test_two_ranks_answer_as_one_where_both_keep_the_whole_latent(family: Family) -> None:
    """They have half of the heads that it is expanded to; one's store serves two."""
    model, asked = family("deepseek_v3"), drawn(35, 2, VOCAB)
    extra, at_once = {"recompute_ratio": 0.3}, ask(asked, **TOLD)
    one = model.run([ask(asked, alone=True), FORGET, at_once], extra)
    two = model.run([at_once], extra, **TWO_RANKS)
    close(two["answers"][0], one["answers"][2])
    check_blended(two, len(asked))


# ---- memory --------------------------------------------------------------------------------------------------------


def record(**figures: float) -> None:
    if vllm_table.RECORDED:
        vllm_table.record(Path(vllm_table.RECORDED), **figures)


def test_memory_of_a_blended_request_with_the_hybrid_manager_on_and_off(family: Family, tmp_path: Path) -> None:
    """Gemma 3 4B's layers (five in six with a window of 1,024) and a prompt of 4,096 tokens."""
    types = tuple("full_attention" if number % 6 == 5 else "sliding_attention" for number in range(34))
    model, texts = family("gemma3", 1024, types), Texts(27)
    asked = texts.prompt(texts.passages(8, 480, 500), question=4096)
    asked = Asked(asked.ids[:4096], asked.spans)
    steps = [ask([asked], sampling={"max_tokens": 1}), FORGET]
    steps += [{"begin": "r", "ids": asked.ids, "chunks": asked.spans, "sampling": {"max_tokens": 60}}]
    steps += [part for given in (1, 20, 40) for part in ({"until": "r", "tokens": given}, CACHE)]
    steps.append({"until": "r"})  # a request is counted when it ends
    used, engine = {}, {"max_model_len": 4400, "max_num_batched_tokens": 4400, "kv_cache_memory_bytes": 1 << 30}
    for off in (False, True):
        extra = {"store": f"file://{tmp_path}/{off}", "recompute_ratio": 0.05}
        result = model.run(steps, extra, **engine, disable_hybrid_kv_cache_manager=off)
        held = result["answers"][4::2]
        assert {step["groups"] for step in held} == ({1} if off else {7})
        assert result["metrics"]["vllm:cacheblend_requests"] == 1
        used[off] = max(step["bytes"] for step in held)
    figure = round(used[False] / used[True], 3)
    assert figure < 0.45
    record(hma_memory=figure)


def test_records_of_latents_are_a_tenth_of_the_expanded_cache(serve: Serve, tmp_path: Path) -> None:
    """Of DeepSeek-V2-Lite's heads; bytes are those of the folder, with everything that is stored beside records."""
    heads, head_dim, rotary_dim, layers = 16, 128, 64, 2
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers}
    shape |= {"qk_nope_head_dim": head_dim, "v_head_dim": head_dim, "q_lora_rank": None}
    model, asked = serve(make_family("deepseek_v2-yarn", tmp_path, **shape)), drawn(39, 2, VOCAB)
    found = model.run([ask(asked, alone=True)], {})
    captured = found["metrics"]["vllm:cacheblend_captured_tokens"]
    assert captured == sum(map(len, {tuple(one.ids[start:stop]) for one in asked for start, stop in one.spans}))
    stored = sum(path.stat().st_size for path in model.store.rglob("*") if path.is_file())
    expanded = layers * heads * (head_dim + rotary_dim + head_dim) * 4
    figure = round(stored / captured / expanded, 3)
    assert figure < 0.15
    record(mla_bytes=figure)
