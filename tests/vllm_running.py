"""What the tests of the plug-in share: tiny models, prompts, and a way to run vLLM on them."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cacheblend.core.plan.prompt import Prompt, chunk, text

CHILD = Path(__file__).parent / "vllm_plugin" / "child.py"
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make vllm")


def blends_beyond_windows() -> bool:
    """Prompts longer than a sliding window are blended: not on vLLM 0.29, see `compat.longest_prompt`."""
    from cacheblend.engines.vllm.compat import FAILS_REQUESTS

    return FAILS_REQUESTS


SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=160),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, norm_topk_prob=True),
}


def make_models(folder: Path) -> dict[str, Path]:
    """Tiny random models whose tokens depend on far context: large embeddings, attention that looks something up."""
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for label, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 0.5 if "embed" in label or "lm_head" in label else weight.shape[1] ** -0.5
                scale *= 1.8 if "q_proj" in label or "k_proj" in label else 1
                torch.nn.init.normal_(weight, 0, scale)
        found[name] = folder / name
        model.save_pretrained(found[name])
    return found


class Texts:
    """Random token ids: passages that recur, and what stands around them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def ids(self, tokens: int) -> list[int]:
        return [self.rng.randrange(20, 2000) for _ in range(tokens)]

    def passages(self, count: int, fewest: int = 70, most: int = 150) -> list[list[int]]:
        return [self.ids(self.rng.randint(fewest, most)) for _ in range(count)]

    def prompt(self, passages: list[list[int]], front: int = 21, between: int = 2, question: int = 17) -> "Asked":
        """Plain text, the passages in this order, a question."""
        return Asked([(self.ids(front), False)], passages, self, between, question)


class Asked:
    """A prompt and the spans of its passages."""

    def __init__(
        self,
        parts: list[tuple[list[int], bool]],
        passages: list[list[int]],
        texts: Texts,
        between: int,
        question: int,
    ) -> None:
        for passage in passages:
            parts += [(passage, True), (texts.ids(between), False)]
        parts.append((texts.ids(question), False))
        self.ids: list[int] = []
        self.spans: list[list[int]] = []
        for ids, is_passage in parts:
            if is_passage:
                self.spans.append([len(self.ids), len(self.ids) + len(ids)])
            self.ids += ids

    @property
    def prompt(self) -> Prompt:
        """As the core knows it."""
        parts, at = [], 0
        for start, stop in self.spans:
            parts += [text(self.ids[at:start]), chunk(self.ids[start:stop])]
            at = stop
        return Prompt.of([*parts, text(self.ids[at:])])


class Vllm:
    """Runs jobs of `child.py` and remembers what came out of equal ones."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._done = folder, dict[str, Any]()

    def run(self, model: Path, steps: list[dict[str, Any]], extra: dict[str, Any] | None, **engine: Any) -> Any:
        """`{"answers", "metrics"}`; fails with the child's own words."""
        result = self.start(model, steps, extra, **engine)
        if "answers" not in result:
            pytest.fail(f"vLLM ended with {result['code']}:\n{result['words'][-4000:]}")
        return result

    def start(self, model: Path, steps: list[dict[str, Any]], extra: dict[str, Any] | None, **engine: Any) -> Any:
        """The same, or `{"code", "words"}` of a child that failed."""
        job = json.dumps({"model": str(model), "engine": engine, "extra": extra, "steps": steps})
        if job in self._done:
            return self._done[job]
        path = self._folder / f"job{len(self._done)}.json"
        path.write_text(job)
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if engine.get("tensor_parallel_size", 1) > 1:
            settings |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        ran = subprocess.run(
            [sys.executable, str(CHILD), str(path)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        out = Path(f"{path}.out")
        if out.is_file():
            self._done[job] = json.loads(out.read_text())
        else:
            self._done[job] = {"code": ran.returncode, "words": ran.stdout + ran.stderr}
        return self._done[job]
