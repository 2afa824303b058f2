"""A blend in vLLM against the dense oracle, which knows transformers alone: every architecture that is not refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from campaign import rotating
from vllm_running import EXTENDED, FORGET, MODELS, Texts, Vllm, ask, check_blended, check_oracle

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
    attend_by = {"pages": "products", "pages, triton": "triton"}.get(attention, attention)
    steps: list[dict[str, Any]] = [{"rpc": ["attend_by", attend_by]}, ask(asked, alone=True), FORGET]
    steps.append(ask(asked, sampling={"max_tokens": 1, "logprobs": 8}))
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.2, "check_layers": [1]}
    result = vllm.run(models[family], steps, extra | {"in_pages": attention.startswith("pages")}, **EXTENDED)
    check_blended(result, len(asked))
    model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    assert check_oracle(model, asked, result["answers"][3]) == 0
