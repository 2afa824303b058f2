"""The plug-in in unmodified vLLM whose KV cache is FP8: on CPUs with AVX-512, where vLLM has such caches."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cacheblend.core.select.selectors import Hkvd
from reference import Rounding, blend
from vllm_running import EXTENDED, FORGET, Served, Texts, Vllm, ask, check_blended

pytestmark = [
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's FP8 caches on CPUs need AVX-512"),
]

RATIO = 0.2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def asked(seed: int, count: int) -> list[Any]:
    """Prompts of few passages, some with none; fronts that fill a block of vLLM's and fronts that do not."""
    texts = Texts(seed)
    passages = texts.passages(6)
    return [
        texts.prompt(texts.rng.sample(passages, texts.rng.randint(0, 4)), texts.rng.choice([0, 17, 64]))
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def scaled(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scales for an FP8 cache, other ones in each layer."""
    model, folder = models["llama"], tmp_path_factory.mktemp("scaled")
    weights = load_file(model / "model.safetensors")
    for layer in range(6):
        weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.03 + 0.007 * layer)
        weights[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.05 + 0.011 * layer)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": SCHEME,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def first_logprobs(step: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each answer's first token, by token."""
    return [answer["logprobs"][0][0] for answer in step]


def apart(found: dict[str, float], expected: dict[str, float]) -> float:
    """The largest difference of what both name; infinite where they answer otherwise."""
    is_same = max(found, key=found.__getitem__) == max(expected, key=expected.__getitem__)
    both = found.keys() & expected.keys()
    return max(abs(found[token] - expected[token]) for token in both) if is_same else math.inf


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2", "of the checkpoint"])
@pytest.mark.feature("FP8 KV cache", "blends, within its rounding")
def test_at_ratio_one_answers_are_those_of_vllm_with_that_cache(
    vllm: Vllm, models: dict[str, Path], scaled: Path, tmp_path: Path, cache: str, in_pages: bool
) -> None:
    """Blended, alone and beside others, on blocks that vLLM holds, and found by content.

    One number on the other side of a step, after a sum in another order, becomes thousands in later layers: these
    models answer at once to whatever changes. Without FP8 their log-probabilities are 3 to 12 apart from these.
    """
    by_command = cache != "of the checkpoint"
    model = models["llama"] if by_command else scaled
    engine = {"kv_cache_dtype": cache} if by_command else {}
    prompts = asked(3, 12)
    turn = prompts[-1].ids + prompts[0].ids
    told: dict[str, Any] = {"sampling": {"max_tokens": 1, "logprobs": 20}}
    by_content = ask(prompts, chunks=None, **told)
    plain = vllm.run(model, [{**by_content, "ask": [*by_content["ask"], turn]}], None, **engine)
    second = {"ask": [turn], "chunks": [prompts[-1].spans], **told}
    steps = [ask(prompts, alone=True, **told), FORGET, ask(prompts, **told), second, FORGET, by_content]
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "in_pages": in_pages}
    found = vllm.run(model, steps, extra, enable_prefix_caching=True, **engine)
    *expected, expected_turn = first_logprobs(plain["answers"][0])
    for step in (0, 2, 5):
        pairs = zip(first_logprobs(found["answers"][step]), expected, strict=True)
        distances = [apart(mine, its) for mine, its in pairs]
        assert max(distances) < 1.0, distances
        assert statistics.median(distances) < 0.2, distances
    assert apart(first_logprobs(found["answers"][3])[0], expected_turn) < 1.0
    check_blended(found, 15)
    unrounded = vllm.run(model, [by_content], None, kv_cache_dtype="auto" if by_command else "bfloat16")
    pairs = zip(first_logprobs(unrounded["answers"][0]), expected, strict=True)
    assert statistics.median(apart(its, mine) for its, mine in pairs) > 2.0


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
def test_at_ratio_one_the_cache_holds_the_bytes_that_vllm_writes(llama: Served, tmp_path: Path, in_pages: bool) -> None:
    """In the first layers, before sums in another order are many."""
    prompt = max(asked(3, 12), key=lambda one: len(one.spans))
    dumped, how = {}, {"kv_cache_dtype": "fp8", **EXTENDED}
    extra = {"recompute_ratio": 1.0, "in_pages": in_pages}
    once = ask([prompt], sampling={"max_tokens": 1})
    for name in ("plain", "blended"):
        dump = {"rpc": ["dump_cache", f"{tmp_path}/{name}", 64]}
        steps = [{**once, "chunks": [[]]}, dump] if name == "plain" else [once, FORGET, once, dump]
        result = llama.run(steps, extra, **how)
        dumped[name] = torch.load(f"{tmp_path}/{name}")
    assert result["metrics"]["vllm:cacheblend_requests"] == 1
    plain, blended = dumped["plain"], dumped["blended"]
    full = len(prompt.ids) // plain[0].shape[2]  # the last block's rest is anything
    used = [block for block in range(1, 64) if plain[0][block].any()][:full]
    assert len(used) == full > 2
    same = {block: min(range(64), key=lambda at: int((plain[0][block] != blended[0][at]).sum())) for block in used}
    assert len(set(same.values())) == full
    for layer in range(2):
        pairs = [(plain[layer][block].int(), blended[layer][at].int()) for block, at in same.items()]
        differing = sum(int((one != other).sum()) for one, other in pairs)
        assert differing <= 1e-3 * sum(one.numel() for one, _ in pairs)


def cut(numbers: torch.Tensor) -> torch.Tensor:
    """As vLLM's CPU backend rounds to e4m3: towards 0."""
    found = nearest(numbers)
    beyond = found.abs() > numbers.abs()
    bytes_ = found.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(beyond, (bytes_ - beyond.to(torch.uint8)).view(torch.float8_e4m3fn).float(), found)


def nearest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("attention", ["buffers", "pages", "pages, triton"])
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle(
    llama: Served, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In buffers stored rows are rounded as vLLM writes them, and compared unrounded; in pages we place them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    texts = Texts(21)
    passages = texts.passages(5)
    count = 1 if "triton" in attention else 4  # its interpreter takes minutes for four
    prompts = [texts.prompt(texts.rng.sample(passages, 4)) for _ in range(count)]
    steps = [{"rpc": ["attend_by", "triton" if "triton" in attention else "products"]}, ask(prompts, alone=True)]
    steps += [FORGET, ask(prompts, sampling={"max_tokens": 1, "logprobs": 8})]
    extra = {"recompute_ratio": RATIO, "check_layers": [1]}
    extra["in_pages"] = in_pages = attention != "buffers"
    result = llama.run(steps, extra, kv_cache_dtype="fp8", **EXTENDED)
    check_blended(result, len(prompts))

    model = AutoModelForCausalLM.from_pretrained(llama.model, dtype=torch.float32)
    selector = Hkvd(check_layers=(1,), ratios=(RATIO,))
    rounding = Rounding(cut, nearest, nearest) if in_pages else Rounding(cut, cut)
    errors, without = [], []
    for one, answer in zip(prompts, result["answers"][3], strict=True):
        (given,) = answer["logprobs"][0]
        for found, how_far in (
            (blend(model, one.prompt, selector, rounding=rounding), errors),
            (blend(model, one.prompt, selector), without),
        ):
            right = torch.log_softmax(found.logits.double(), -1)
            how_far.append(max(abs(value - float(right[int(token)])) for token, value in given.items()))
    assert max(errors) < 0.25, errors  # sums in another order, see above
    assert min(without) > 1.0, without  # an oracle that does not round answers otherwise


def test_what_is_stored_does_not_depend_on_the_cache(llama: Served, tmp_path: Path) -> None:
    """Names and bytes: servers with other caches share a folder, and each finds what the other stored."""
    prompts = asked(7, 6)
    alone = ask(prompts, alone=True)
    files = {}
    for cache in ("auto", "fp8", "fp8_e5m2"):
        extra = {"store": f"file://{tmp_path}/{cache}", "recompute_ratio": 1.0}
        llama.run([alone], extra, kv_cache_dtype=cache)
        folder = tmp_path / cache
        files[cache] = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    blocks = [path for path in files["auto"] if path.suffix == ".kv"] or [*files["auto"]]
    assert len(blocks) >= 5
    for cache in ("fp8", "fp8_e5m2"):
        assert [*files[cache]] == [*files["auto"]]
        same = [files[cache][path].read_bytes() == files["auto"][path].read_bytes() for path in blocks]
        assert all(same)
    extra = {"store": f"file://{tmp_path}/auto", "recompute_ratio": 1.0}
    found = llama.run([alone], extra, kv_cache_dtype="fp8")
    assert found["metrics"].get("vllm:cacheblend_captured_tokens", 0) == 0
    assert found["metrics"]["vllm:cacheblend_requests"] >= 4
