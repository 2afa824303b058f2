"""The plug-in in unmodified vLLM whose KV cache is FP8: on CPUs with AVX-512, where vLLM has such caches."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cacheblend.core.select.selectors import Hkvd
from reference import Rounding, blend
from vllm_models import copy_model
from vllm_prompts import FORGET, Asked, Texts, ask, prompts, rpc
from vllm_running import EXTENDED, Serve, Served, check_blended, dense, needs_avx512

pytestmark = needs_avx512

RATIO = 0.2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def mixed(seed: int, count: int) -> list[Asked]:
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
    weights = load_file(models["llama"] / "model.safetensors")
    for layer in range(6):
        weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.03 + 0.007 * layer)
        weights[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.05 + 0.011 * layer)
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    quantization["kv_cache_scheme"] = SCHEME
    return copy_model(models["llama"], tmp_path_factory.mktemp("scaled"), weights, quantization_config=quantization)


def apart(answers: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[float]:
    """Of the first tokens the largest difference of log-probabilities that both name; infinite where they differ."""
    distances = []
    for one, its in zip(answers, right, strict=True):
        found, wanted = one["logprobs"][0][0], its["logprobs"][0][0]
        is_same = max(found, key=found.__getitem__) == max(wanted, key=wanted.__getitem__)
        both = found.keys() & wanted.keys()
        distances.append(max(abs(found[token] - wanted[token]) for token in both) if is_same else math.inf)
    return distances


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2", "of the checkpoint"])
@pytest.mark.feature("FP8 KV cache", "blends, within its rounding")
def test_at_ratio_one_answers_are_those_of_vllm_with_that_cache(
    serve: Serve, scaled: Path, cache: str, in_pages: bool
) -> None:
    """Blended, alone and beside others, on blocks that vLLM holds, and found by content.

    One number on the other side of a step, after a sum in another order, becomes thousands in later layers: these
    models answer at once to whatever changes. Without FP8 their log-probabilities are 3 to 12 apart from these.
    """
    model = serve(scaled) if cache == "of the checkpoint" else serve("llama", kv_cache_dtype=cache)
    asked = mixed(3, 12)
    turn = asked[-1] + asked[0]
    told: dict[str, Any] = {"sampling": {"max_tokens": 1, "logprobs": 20}}
    by_content, second = ask(asked, chunks=None, **told), ask([turn], chunks=[asked[-1].spans], **told)
    steps = [ask(asked, alone=True, **told), FORGET, ask(asked, **told), second, FORGET, by_content]
    found = model.run(steps, {"recompute_ratio": 1.0, "in_pages": in_pages})
    *right, right_turn = model.plain(ask([*asked, turn], **told))
    for step in (0, 2, 5):
        distances = apart(found["answers"][step], right)
        assert max(distances) < 1.0, distances
        assert statistics.median(distances) < 0.2, distances
    assert apart(found["answers"][3], [right_turn])[0] < 1.0
    check_blended(found, 15)
    unrounded = serve("llama").plain(by_content)
    assert statistics.median(apart(right, unrounded)) > 2.0


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
def test_at_ratio_one_the_cache_holds_the_bytes_that_vllm_writes(llama: Served, tmp_path: Path, in_pages: bool) -> None:
    """In the first layers, before sums in another order are many."""
    prompt = max(mixed(3, 12), key=lambda one: len(one.spans))
    once, told = ask([prompt], sampling={"max_tokens": 1}), {"sampling": {"max_tokens": 1}}
    found = {"plain": [ask([], [prompt], **told)], "blended": [once, FORGET, once]}
    for name, steps in found.items():
        extra = {"recompute_ratio": 1.0, "in_pages": in_pages}
        dump = rpc("dump_cache", f"{tmp_path}/{name}", 64)
        result = llama.run([*steps, dump], extra, kv_cache_dtype="fp8", **EXTENDED)
    assert result["metrics"]["vllm:cacheblend_requests"] == 1
    plain, blended = (torch.load(f"{tmp_path}/{name}") for name in found)
    full = len(prompt.ids) // plain[0].shape[2]  # the last block's rest is anything
    used = [block for block in range(1, 64) if plain[0][block].any()][:full]
    assert len(used) == full > 2
    same = {block: min(range(64), key=lambda at: int((plain[0][block] != blended[0][at]).sum())) for block in used}
    assert len(set(same.values())) == full
    for layer in range(2):
        pairs = [(plain[layer][block].int(), blended[layer][at].int()) for block, at in same.items()]
        differing = sum(int((one != other).sum()) for one, other in pairs)
        assert differing <= 1e-3 * sum(one.numel() for one, _ in pairs)


def nearest(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def cut(numbers: torch.Tensor) -> torch.Tensor:
    """As vLLM's CPU backend rounds to e4m3: towards 0."""
    found = nearest(numbers)
    beyond = found.abs() > numbers.abs()
    bytes_ = found.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(beyond, (bytes_ - beyond.to(torch.uint8)).view(torch.float8_e4m3fn).float(), found)


@pytest.mark.parametrize("attention", ["buffers", "pages", "pages, triton"])
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle(
    llama: Served, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In buffers stored rows are rounded as vLLM writes them, and compared unrounded; in pages we place them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    in_pages, is_triton = attention != "buffers", "triton" in attention
    asked = prompts(21, 1 if is_triton else 4, held=5)  # its interpreter takes minutes for four
    steps = [rpc("attend_by", "triton" if is_triton else "products"), ask(asked, alone=True)]
    steps += [FORGET, ask(asked, sampling={"max_tokens": 1, "logprobs": 8})]
    extra = {"recompute_ratio": RATIO, "check_layers": [1], "in_pages": in_pages}
    result = llama.run(steps, extra, kv_cache_dtype="fp8", **EXTENDED)
    check_blended(result, len(asked))
    selector = Hkvd(check_layers=(1,), ratios=(RATIO,))
    for one, answer in zip(asked, result["answers"][3], strict=True):
        (given,) = answer["logprobs"][0]
        errors = []
        for rounding in ({"rounding": Rounding(cut, nearest, nearest) if in_pages else Rounding(cut, cut)}, {}):
            right = torch.log_softmax(blend(dense(llama.model), one.prompt, selector, **rounding).logits.double(), -1)
            errors.append(max(abs(value - float(right[int(token)])) for token, value in given.items()))
        assert errors[0] < 0.25, errors  # sums in another order, see above
        assert errors[1] > 1.0, errors  # an oracle that does not round answers otherwise
