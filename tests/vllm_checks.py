"""What tests of the shadow check inside vLLM ask, and what it has to find, by a dense model."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cacheblend.engines.shadow import kl_divergence
from vllm_running import COUNT as COUNT
from vllm_running import EXTENDED as EXTENDED
from vllm_running import Asked, Texts
from vllm_running import ask as ask

NAME = "vllm:cacheblend_shadow"
MINE = " hkvd engine"  # no tenant, the selector, settings


def prompts(seed: int, count: int, passages: int = 4) -> list[Asked]:
    texts = Texts(seed)
    held = texts.passages(6)
    return [texts.prompt(texts.rng.sample(held, passages)) for _ in range(count)]


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What has come to the check's counters, by name without the prefix."""
    return {
        name.removeprefix(NAME): value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith(NAME) and value != before.get(name, 0)
    }


@cache
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def expected(folder: Path, asked: list[Asked], answers: list[Any]) -> dict[str, float]:
    """What the check has to find, by a dense model and by the log-probabilities that vLLM gave."""
    agreed = differed = 0
    kl = 0.0
    for one, answer in zip(asked, answers, strict=True):
        tokens = answer["tokens"][0][:16]
        full = reference(folder)(torch.tensor([one.ids + tokens[:-1]])).logits[0, len(one.ids) - 1 :]
        blended = torch.full((len(tokens), full.shape[1]), -math.inf)
        for row, found in enumerate(answer["logprobs"][0][:16]):
            for token, value in found.items():
                blended[row, int(token)] = value
        same = (full.argmax(-1) == blended.argmax(-1)).sum().item()
        agreed, differed = agreed + int(same), differed + len(tokens) - int(same)
        kl += kl_divergence(full[0], blended[0])
    return {"": len(asked), "_tokens yes": agreed, "_tokens no": differed, "_kl_sum": kl, "_kl_count": len(asked)}


def found_in(counted: dict[str, float]) -> dict[str, float]:
    """The check's own counters, without their labels; zero where nothing came."""
    names = {"": f" {MINE}", "_tokens yes": f"_tokens {MINE} yes", "_tokens no": f"_tokens {MINE} no"}
    names |= {"_kl_sum": f"_kl_sum {MINE}", "_kl_count": f"_kl_count {MINE}"}
    return {short: counted.get(name, 0) for short, name in names.items()}
