"""A blend in vLLM against the dense oracle, which knows transformers alone: every architecture that is not refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheblend.core.select.selectors import Hkvd
from campaign import rotating
from reference import blend
from vllm_running import MODELS, Texts, Vllm, needs_vllm

pytestmark = needs_vllm

RATIO = 0.2
ATTENTION = ("products", "kernel", "pages", "pages, triton")
CORE = [*((family, "pages") for family in MODELS), ("llama", "products"), ("qwen3", "kernel"), ("llama", ATTENTION[-1])]
"""What every run draws: each family, and each way to attend."""


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(("family", "attention"), rotating([(f, a) for f in MODELS for a in ATTENTION], CORE))
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pages`: in vLLM's own cache, by PyTorch and by our kernels, which Triton interprets."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    texts = Texts(21)
    passages = texts.passages(5)
    is_interpreted = attention == "pages, triton"  # which takes minutes for four prompts of four
    prompts, picked = (1, 2) if is_interpreted else (4, 4)
    asked = [texts.prompt(texts.rng.sample(passages, picked)) for _ in range(prompts)]
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    ask: dict[str, Any] = {"ask": ids, "chunks": spans}
    steps = [{**ask, "alone": True}, {"forget": True}, {**ask, "sampling": {"max_tokens": 1, "logprobs": 8}}]
    in_pages = attention.startswith("pages")
    steps.insert(0, {"rpc": ["attend_by", "triton" if is_interpreted else "products"]})
    if attention == "kernel":
        steps[0] = {"rpc": ["attend_by", attention]}
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": RATIO, "check_layers": [1], "in_pages": in_pages}
    result = vllm.run(models[family], steps, extra, worker_extension_cls="injecting.Injecting")
    assert result["metrics"]["vllm:cacheblend_requests"] >= len(asked)
    assert "vllm:cacheblend_fallbacks" not in " ".join(result["metrics"])

    model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    selector = Hkvd(check_layers=(1,), ratios=(RATIO,))
    full = 0
    for one, answer in zip(asked, result["answers"][3], strict=True):
        found = blend(model, one.prompt, selector)  # no tokenizer, so no anchor
        right = torch.log_softmax(found.logits.double(), -1)
        (given,) = answer["logprobs"][0]
        assert answer["tokens"][0] == [int(right.argmax())]
        assert {int(token): value for token, value in given.items()} == pytest.approx(
            {int(token): float(right[int(token)]) for token in given}, abs=2e-3
        )
        with torch.no_grad():
            plain = torch.log_softmax(model(torch.tensor([one.ids])).logits[0, -1].double(), -1)
        full += bool((plain - right).abs().max() < 2e-3)
    assert full == 0  # full prefill answers otherwise, or this would show nothing
