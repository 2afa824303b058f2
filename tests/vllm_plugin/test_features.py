"""What else vLLM does, beside blending: structured output, speculation, quantised weights, tenants, turns, images."""

import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import vision
from cacheblend.nano import model_path
from cacheblend.store import DiskStore
from command_line import runner
from quantised import quantised
from vision_models import SHOWN, SOUND, make_qwen2_audio
from vllm_models import SHAPE, copy_model
from vllm_prompts import COUNT, FORGET, NANO_VOCAB, Asked, Texts, ask, prompts, rpc
from vllm_running import EXTENDED, SETTINGS, Serve, Vllm, check_blended, check_shadow, needs_avx512, tokens

# ---- structured output, embeddings ---------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "year": {"enum": [7, 9]}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "regex": ({"regex": "[0-9]{3}-[0-9]{3}"}, re.compile("[0-9]{3}-[0-9]{3}").fullmatch),
    "json": ({"json": SCHEMA}, lambda text: json.loads(text)["city"] in {"Bern", "Oslo"}),
    "choice": ({"choice": ["Bern", "Oslo", "Lima"]}, {"Bern", "Oslo", "Lima"}.__contains__),
}
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}  # the model would write spaces for ever


@pytest.mark.feature("structured output", "blends")
def test_constrained_answers(serve: Serve) -> None:
    """Of blended prompts, by grammars that are compiled while chunks are loaded; free ones; and at ratio 0."""
    asked = prompts(71, 3, 3, held=4, below=NANO_VOCAB)

    def constrained(kind: str | None, **more: Any) -> dict[str, Any]:
        sampling = {"max_tokens": 40, "structured": KINDS[kind][0]} if kind else {"max_tokens": 8}
        return ask(asked, sampling={"ignore_eos": False, "logprobs": 2, **sampling}, **more)

    engine = {"skip_tokenizer_init": False, "structured_outputs_config": GRAMMARS}
    model, kinds = serve(model_path(), **engine), [*KINDS, None]
    plain = model.run([constrained(kind, chunks=None) for kind in kinds], None)["answers"]
    steps = [constrained(None, alone=True)]
    for kind in kinds:
        steps += [FORGET, constrained(kind)]
    steps += [FORGET, constrained("json", options={"recompute_ratio": 0.0})]
    found = model.run(steps, {"recompute_ratio": 1.0})
    given = found["answers"][2::2]
    assert list(map(tokens, given[:-1])) == list(map(tokens, plain))
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    for kind, answers in zip((*kinds, "json"), given, strict=True):
        for one in answers:
            text = tokenizer.decode(one["tokens"][0], skip_special_tokens=True)
            assert kind is None or KINDS[kind][1](text), text
    check_blended(found, 5 * len(asked))


@pytest.mark.feature("pooling, embeddings", "plain: on_unblendable, or refused by name")
def test_a_model_that_embeds_is_refused_or_served_as_vllm_does(serve: Serve) -> None:
    model = serve(model_path(), runner="pooling", skip_tokenizer_init=False)
    step = {"embed": [one.ids for one in prompts(72, 3, 2, below=NANO_VOCAB)]}
    assert "pooling models" in model.refusal({}, step)
    found = model.run([step], {"on_unblendable": "plain"})
    assert found["answers"] == model.run([step], None)["answers"]


# ---- quantised weights: layers are vLLM's own, so whatever it quantises is used ------------------------------------


@needs_avx512
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param("int8", marks=pytest.mark.feature("quantised weights, INT8 W8A8 (compressed-tensors)", "blends")),
        pytest.param("gptq", marks=pytest.mark.feature("quantised weights, GPTQ", "blends")),
        pytest.param("awq", marks=pytest.mark.feature("quantised weights, AWQ", "blends")),
    ],
)
def test_at_ratio_one_answers_are_those_of_vllm_with_quantised_weights(
    serve: Serve, models: dict[str, Path], tmp_path: Path, scheme: str
) -> None:
    """Alone, side by side with a plain prompt, and found by content.

    Activations that are quantised (INT8), and bf16, round: a sum in another order puts a number on the other side of a
    step, and later layers answer to it. So the model has few layers, and log-probabilities are compared; those of full
    reuse say how far a wrong answer is.
    """
    texts = Texts(51)
    passages = texts.passages(5)
    asked = [texts.prompt(texts.rng.sample(passages, 3), front) for front in (0, 17, 64, 21, 30, 16)]
    takes_float32 = scheme == "int8" and not torch.cpu._is_amx_tile_supported()  # with AMX other kernels serve INT8
    weights = quantised(models["llama"], tmp_path / "model", scheme, layers=3)
    model = serve(weights, dtype="float32" if takes_float32 else "bfloat16")
    told: dict[str, Any] = {"sampling": {"max_tokens": 4, "logprobs": 20}}
    both = ask(asked, [Asked(texts.ids(150), [])], **told)
    steps = [ask(asked, alone=True, **told), FORGET, both, FORGET, {**both, "chunks": None}]
    steps += [FORGET, ask(asked, options={"recompute_ratio": 0.0}, **told)]
    result, plain = model.run(steps, {"recompute_ratio": 1.0}), model.plain(both)

    def apart(answers: list[dict[str, Any]]) -> float:
        """The median of the largest differences of the first tokens' log-probabilities; infinite: none is shared."""
        pairs = [(one["logprobs"][0][0], its["logprobs"][0][0]) for one, its in zip(answers, plain, strict=False)]
        return statistics.median(
            max((abs(mine[token] - its[token]) for token in mine.keys() & its.keys()), default=math.inf)
            for mine, its in pairs
        )

    *exact, reused = map(apart, result["answers"][::2])
    assert max(exact) < 0.2 * reused
    assert result["answers"][2][-1]["tokens"] == plain[-1]["tokens"]  # the plain one
    check_blended(result, 15)


# ---- speculative decoding: prompts are blended for the model that answers, a drafter only proposes -----------------
# With seeds vLLM's CPU build ends by itself, without the plug-in too.

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
WORDS = 8
COLD = "blends; the drafter starts cold"


@pytest.fixture(scope="session")
def terse(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has few words, so that something of what is proposed is taken."""
    weights = load_file(models["llama"] / "model.safetensors")
    silent = torch.ones(SHAPE["vocab_size"], dtype=torch.bool)
    silent[torch.randperm(SHAPE["vocab_size"], generator=torch.Generator().manual_seed(1))[:WORDS]] = False
    weights["lm_head.weight"][silent] = 0
    return copy_model(models["llama"], tmp_path_factory.mktemp("terse") / "model", weights)


def drafter(method: str, terse: Path, folder: Path) -> dict[str, Any]:
    """Speculative configurations: n-grams; the model as its own drafter, in a cache with other heads; EAGLE."""
    if method == "ngram":
        return NGRAM
    weights = load_file(terse / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name or ".layers.0." in name}
    config: dict[str, Any] = {"num_hidden_layers": 1}
    if method == "eagle":
        config["architectures"] = ["EagleLlamaForCausalLM"]
        kept = {name.removeprefix("model."): weight for name, weight in kept.items() if ".layers." in name}
        del kept["layers.0.input_layernorm.weight"]
        kept["fc.weight"] = torch.eye(SHAPE["hidden_size"]).repeat(1, 2)
    else:  # two KV heads of four
        config["num_key_value_heads"] = 2
        narrow = {
            name: weight[:64].clone() for name, weight in kept.items() if ".k_proj." in name or ".v_proj." in name
        }
        kept |= narrow
    return {"method": method, "model": str(copy_model(terse, folder, kept, **config)), "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ngram", marks=pytest.mark.feature("speculative decoding, n-grams", "blends")),
        pytest.param("eagle", marks=pytest.mark.feature("speculative decoding, EAGLE", COLD)),
        pytest.param("draft_model", marks=pytest.mark.feature("speculative decoding, draft model", COLD)),
    ],
)
def test_greedy_answers_are_those_without_speculation(serve: Serve, terse: Path, tmp_path: Path, method: str) -> None:
    """However little of a blended prompt a drafter has seen: alone, side by side, by content, and in second turns."""
    asked, texts = prompts(41, 6, 3), Texts(42)
    beside, turns = Asked(texts.ids(120), []), [Asked(one.ids + texts.ids(30), []) for one in asked[:2]]
    long: dict[str, Any] = {"sampling": {"max_tokens": 40}}
    model = serve(terse)
    right = tokens(model.plain(ask([*asked, beside, *turns], **long)))
    together = ask(asked, [beside], **long)
    steps = [ask(asked, alone=True, **long), FORGET, COUNT, together, COUNT, ask(turns, chunks=None, **long)]
    steps += [FORGET, {**together, "chunks": None}, COUNT]
    speculation = drafter(method, terse, tmp_path / "drafter")
    result = model.run(steps, {"recompute_ratio": 1.0}, speculative_config=speculation)
    alone, _, before, at_once, counted, second, _, content, last = result["answers"]
    assert tokens(alone) == right[:6]
    assert tokens(at_once) == tokens(content) == right[:7]
    assert tokens(second) == right[7:]
    blended = [found["vllm:cacheblend_requests"] for found in (before, counted, last)]
    assert blended[1] - blended[0] == 6 and blended[2] - blended[1] >= 6
    assert counted[ACCEPTED] > before[ACCEPTED]
    assert "vllm:cacheblend_fallbacks" not in " ".join(last)


@pytest.mark.may_fail("RuntimeError")
@pytest.mark.feature("speculative decoding, n-grams", "blends")
def test_failed_prompts_and_a_small_cache_beside_ngrams(serve: Serve, terse: Path) -> None:
    asked = prompts(43, 6, 3)
    long = ask(asked, sampling={"max_tokens": 48})
    model = serve(terse, speculative_config=NGRAM, enable_prefix_caching=False)
    steps = [ask(asked, alone=True), long, rpc("arm_fault", "run", 0, "error", 3), long, rpc("disarm_fault")]
    small = {"num_gpu_blocks_override": 44, "max_model_len": 1024, "block_size": 32}
    result = model.run(steps, {"recompute_ratio": 1.0}, **small, **EXTENDED)
    _, crowded, _, failed, (seen,) = result["answers"]
    assert tokens(crowded) == tokens(failed) == tokens(serve(terse, enable_prefix_caching=False).plain(long))
    assert result["metrics"][ACCEPTED] > 0
    assert seen["raised"] == 1


@pytest.mark.feature("speculative decoding, n-grams", "blends")
def test_a_prompt_that_fills_the_whole_cache_beside_ngrams_is_vllms(serve: Serve, terse: Path) -> None:
    """Beside a prompt that is loaded vLLM keeps blocks free for drafts: it would ask for ever, and others with it."""
    texts = Texts(48)
    asked = [texts.prompt(texts.passages(4, 238, 238)), texts.prompt(texts.passages(2))]
    assert 992 < len(asked[0].ids) <= 1016
    tight = {"num_gpu_blocks_override": 33, "max_model_len": 1024, "block_size": 32}
    again = ask(asked, sampling={"max_tokens": 8})
    model = serve(terse, speculative_config=NGRAM, enable_prefix_caching=False)
    result = model.run([ask(asked, alone=True), again], {"recompute_ratio": 1.0}, **tight)
    assert tokens(result["answers"][1]) == tokens(serve(terse, enable_prefix_caching=False).plain(again))
    assert result["metrics"]["vllm:cacheblend_not_blended no room in the cache"] == 1
    assert result["metrics"]["vllm:cacheblend_requests"] == 1


@pytest.mark.feature("shadow check beside speculative decoding", "blends")
def test_the_shadow_check_compares_the_tokens_that_were_taken(serve: Serve, terse: Path) -> None:
    """Of answers that grow by several tokens in a step, beyond the 16 that are compared or ending before them."""
    asked = prompts(44, 5)
    steps = [ask(asked, alone=True), COUNT]
    for length in (24, 7, 1):
        steps += [ask(asked, sampling={"max_tokens": length, "logprobs": -1}), COUNT]
    model = serve(terse, enable_prefix_caching=False, max_logprobs=-1, speculative_config=NGRAM)
    answers = model.run(steps, {"recompute_ratio": 0.3, "shadow": 1.0})["answers"]
    for number in range(3):
        before, given, after = answers[1 + 2 * number : 4 + 2 * number]
        check_shadow(terse, asked, given, before, after)
    assert answers[-1][ACCEPTED] > 0


# ---- tenants that vLLM keeps apart, turns, several answers: one engine ---------------------------------------------


@pytest.fixture(scope="module")
def cached(vllm: Vllm, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was asked and counted, by name."""
    texts = Texts(31)
    document, passages = texts.ids(300), texts.passages(6, 190, 210)

    def behind(middle: list[int], front: int = 11, end: int = 7) -> Asked:
        return Asked([*texts.ids(front), *middle, *texts.ids(end)], [[front, front + len(middle)]])

    short: dict[str, Any] = {"sampling": {"max_tokens": 2}}
    many: dict[str, Any] = {"sampling": {"max_tokens": 60, "temperature": 0.9, "n": 8, "seed": 1}}
    turn = texts.prompt([texts.ids(200), *passages[:2]], front=0)  # begins with a chunk that the store lacks
    one, several = (texts.prompt(passages[1:], front=40) for _ in range(2))
    guess = {"chunks": None, **short}
    steps: dict[str, dict[str, Any]] = {
        "secret": ask([behind(document, 9, 9)], salt="A", **short),
        "other": ask([behind(document)], salt="B", **guess),
        "nobody": ask([behind(document)], **guess),
        "wrong": ask([behind(texts.ids(300))], salt="B", **guess),
        "same": ask([behind(document)], salt="A", **guess),
        "forgotten": FORGET,
        "warm": ask([texts.prompt(passages)], **short),
        "first turn": ask([turn], sampling={"max_tokens": 40}),
        "before the turn": COUNT,
        "turn": ask([turn + Asked(texts.ids(60), [])], **short),
        "behind the turn": COUNT,
        "forgotten again": FORGET,
        "one": ask([one], **short),
        "behind one": COUNT,
        "at last": FORGET,
        "several": ask([several], **many),
        "behind several": COUNT,
    }
    extra = {"store": f"file://{tmp_path_factory.mktemp('salts')}", "recompute_ratio": 0.15, "refresh_s": 0}
    engine: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_model_len": 1600, "block_size": 32}
    answers = vllm.run(models["llama"], list(steps.values()), extra, **engine)["answers"]
    return dict(zip(steps, answers, strict=True)) | {"turn's tokens": len(turn.ids)}


def test_what_a_tenant_stored_is_found_by_nobody_else(cached: dict[str, Any]) -> None:
    """Neither by another salt nor without one; a right guess looks like a wrong one."""
    other, nobody, wrong, same = (cached[name][0]["cached"] for name in ("other", "nobody", "wrong", "same"))
    assert other == nobody == wrong == 0
    assert same > 250


def test_turns_find_vllms_cache_and_several_answers_share_one_blend(cached: dict[str, Any]) -> None:
    """A second turn behind a missed chunk; several answers in a small cache."""
    names = ("before the turn", "behind the turn", "behind one", "behind several")
    rows, preemptions = (
        [after.get(name, 0) - before.get(name, 0) for before, after in pairwise(cached[each] for each in names)]
        for name in ("vllm:cacheblend_row_layers", "vllm:num_preemptions")
    )
    assert cached["turn"][0]["cached"] >= cached["turn's tokens"] // 32 * 32 - 32
    assert rows[0] <= 64 * 6  # what is new in six layers at most, not the prompt again
    assert rows[2] <= 1.1 * rows[1] and preemptions[2] == 0
    assert len(cached["several"][0]["tokens"]) == 8


# ---- documents that `cacheblend sync` stored -----------------------------------------------------------------------


def text_of(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    words = ["lamp", "ferry", "keeper", "tower", "salt", "rope", "winter", "bell", "harbour", "stone", "letter"]
    return " ".join(f"The {rng.choice(words)} of the {rng.choice(words)} is cold." for _ in range(sentences))


def test_synchronised_documents_are_reused_marked_or_not(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same names, same dtype: documents of one chunk and of several, in another order, behind other text, inside a text
    that is tokenised as a whole; a document that was dropped since."""
    source, store = tmp_path / "docs.jsonl", f"file://{tmp_path}/store"
    sync = runner(capsys, "sync", "--model", "nano", "--store", store, "--source", str(source), "--dtype", "float32")
    texts = {"a": text_of(1, 12), "b": text_of(2, 14), "long": text_of(3, 70), "gone": text_of(4, 12)}

    def write(names: list[str]) -> None:
        source.write_text("".join(json.dumps({"id": name, "text": texts[name]}) + "\n" for name in names))

    write(list(texts))
    assert sync("--json").json["added"] == 4
    write(["a", "b", "long"])
    assert sync("--json").json["dropped"] == 1
    with DiskStore(tmp_path / "store") as opened:
        lengths = {manifest.label: len(manifest.token_ids) for manifest in opened.manifests()}
    pieces = {label: count for label, count in lengths.items() if label.startswith("long #")}
    assert len(pieces) > 1

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    ids = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    front = [*bos, *tokenizer.encode("Read this first.", add_special_tokens=False)]
    question = Asked(tokenizer.encode("Who has the boot?", add_special_tokens=False), [])
    now = tokenizer.encode("Now", add_special_tokens=False)

    def documents(*names: str) -> Asked:
        return sum((Asked(ids[name], [[0, len(ids[name])]]) for name in names), Asked([], [])) + question

    asked = {
        "marked": documents("b", "a").behind(front),
        "unmarked": documents("long", "a").behind([*front, *now]),
        # " The", where "The" is stored
        "whole": Asked(tokenizer.encode(" ".join(["Now read.", texts["long"], "Who has the boot?"])), []),
        "dropped": documents("gone").behind(front),
    }
    steps = [COUNT]
    for name, one in asked.items():
        steps += [ask([one]) if name == "marked" else ask([one], chunks=None), COUNT]
    model = serve(model_path(), skip_tokenizer_init=False, enable_prefix_caching=False)
    extra = {"recompute_ratio": 1.0, "min_match_tokens": 64, "min_reused_share": 0.0, "refresh_s": 0}
    answers = model.run(steps, extra)["answers"]
    assert [tokens(each)[0] for each in answers[1::2]] == tokens(model.plain(ask(list(asked.values()))))
    hits = [
        # of chunks; the anchor in front of them is an exact prefix of a prompt
        sum(n for key, n in counted.items() if "cacheblend_hit_tokens" in key and key.endswith((" disk", " memory")))
        for counted in answers[::2]
    ]
    found = dict(zip(asked, [after - before for before, after in pairwise(hits)], strict=True))
    assert found["marked"] == lengths["a"] + lengths["b"]
    assert found["unmarked"] == sum(pieces.values()) + lengths["a"]
    assert found["whole"] >= sum(pieces.values()) - pieces["long #1"]  # only the first piece begins with the document
    assert found["dropped"] == 0


# ---- sounds and images: what stands in front of the first of them is blended ----------------------------------------

SOUND_LINE = pytest.mark.feature("models of text and sound", "blends what stands before the first sound")
CORE = ("sound", "qwen2.5-vl")
IMAGE_LINE = pytest.mark.feature("vision-language models", "blends what stands before the first image")


@dataclass(frozen=True)
class Scene:
    """A model, the kind of its items, and the ids that stand for one in a prompt."""

    model: Path
    kind: str
    shown: tuple[int, ...]

    @property
    def engine(self) -> dict[str, Any]:
        return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {self.kind: 2}, "block_size": 32}

    def step(self, texts: Texts, count: int) -> dict[str, Any]:
        """What is asked: texts alone, then each with an item, another one, and two in both orders behind its
        passages, and one in front of them."""
        passages, item = texts.passages(5), Asked([*self.shown], [])
        # The question fills a block: vLLM computes the last block, which is not full, itself the second time.
        fronts = [texts.prompt(texts.rng.sample(passages, 3), front, question=40) for front in (17, 64, 30)[:count]]
        asked = [(one, list[int]()) for one in fronts]
        for one in fronts:
            behind = texts.prompt(texts.rng.sample(passages, 2))
            for seeds in ([1], [2], [1, 2], [2, 1]):
                more = item + Asked(texts.ids(5), []) if len(seeds) > 1 else Asked([], [])
                asked.append((one + item + behind + more, seeds))
            asked.append((one.behind([5, *self.shown]), [1]))
        return ask([one for one, _ in asked], **{self.kind: [seeds for _, seeds in asked]})


@pytest.fixture(scope="module")
def seeing_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the models of `vision_models`."""
    if not vision.is_there():
        pytest.skip(f"{vision.FOLDER} is not there, which processors of images need: make vllm")
    folder = tmp_path_factory.mktemp("seeing")
    program, env = Path(vision.__file__).with_name("vision_models.py"), {**os.environ, **SETTINGS}
    subprocess.run([sys.executable, str(program), str(folder)], check=True, env=env)
    return folder


def among(*names: str) -> pytest.MarkDecorator:
    """Runs a test in these families; those outside of the core take turns."""
    params = []
    for name in names:
        turn = [] if name in CORE else [pytest.mark.slow(list(SHOWN).index(name))]
        params.append(pytest.param(name, marks=[SOUND_LINE if name == "sound" else IMAGE_LINE, *turn]))
    return pytest.mark.parametrize("scene", params, indirect=True)


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    if request.param == "sound":
        return Scene(make_qwen2_audio(tmp_path_factory.mktemp("sound") / "model"), "audio", (SOUND,))
    return Scene(request.getfixturevalue("seeing_models") / request.param, "image", SHOWN[request.param])


@among("sound", *SHOWN)
def test_at_ratio_one_answers_are_those_of_vllm(serve: Serve, scene: Scene) -> None:
    step, model = scene.step(Texts(61), 3), serve(scene.model, **scene.engine)
    right = tokens(model.plain(step))
    assert len({str(answer) for answer in right}) > len(right) * 2 // 3  # an item that was ignored would be seen
    steps = [{**step, "alone": True}, FORGET, step, step, FORGET, COUNT, {**step, "chunks": None}]
    result = model.run(steps, {"recompute_ratio": 1.0})
    for at in (0, 2, 3, 6):
        assert tokens(result["answers"][at]) == right, at
    blended = result["metrics"]["vllm:cacheblend_requests"] - result["answers"][5]["vllm:cacheblend_requests"]
    assert blended >= 3  # equal fronts share what was blended for one of them
    check_blended(result)


@among("sound", "qwen2.5-vl", "gemma3")
def test_approximate_blocks_are_not_found_with_another_item_nor_without_blending(serve: Serve, scene: Scene) -> None:
    """At ratio 0 every answer is that of the same request in an empty cache; plain ones are vLLM's own."""
    step = scene.step(Texts(62), 2)
    count = len(step["ask"])
    plain, alone = {**step, "chunks": [[]] * count}, {**step, "alone": True}
    in_empty_caches = [{name: [values[number]] for name, values in step.items()} for number in range(2, count, 3)]
    steps = [plain, FORGET, alone]
    for one in in_empty_caches:
        steps += [FORGET, one]
    steps += [FORGET, alone, alone, plain]
    extra = {"recompute_ratio": 0.0, "match_content": False, "shadow": 1.0}
    result = serve(scene.model, **scene.engine).run(steps, extra)["answers"]
    right, first, again, after = (tokens(result[at]) for at in (0, -3, -2, -1))
    assert after == right and first == again
    assert sum(mine != its for mine, its in zip(again, right, strict=True)) >= count // 3  # full reuse errs here
    for place, answer in enumerate(again[2::3]):
        assert tokens(result[4 + 2 * place]) == [answer], place
