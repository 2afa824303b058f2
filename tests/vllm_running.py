"""What the tests of the plug-in share: tiny models, prompts, and a way to run vLLM on them."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
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

import failing
from cacheblend.core.plan.prompt import Prompt, chunk, text

NURSERY = Path(__file__).parent / "vllm_plugin" / "nursery.py"
STAND_IN = NURSERY.with_name("warm_python.py")
LIMIT_S = 600

NANO_VOCAB = 1200
"""Ids below it are of the shipped model's ordinary tokens."""
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make vllm")


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


SETTINGS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
"""The environment of a process that runs vLLM. Even an eager engine compiles the function that ranks log-probabilities,
which takes longer than most jobs."""


class Texts:
    """Random token ids: passages that recur, and what stands around them."""

    def __init__(self, seed: int, below: int = 2000) -> None:
        self.rng, self._below = random.Random(seed), below

    def ids(self, tokens: int) -> list[int]:
        return [self.rng.randrange(20, self._below) for _ in range(tokens)]

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


class Nursery:
    """A process of `nursery.py`; to be closed.

    Attributes:
        python: what stands in for the interpreter, see there.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nursery-")
        folder = Path(self._folder.name)
        self.python = folder / "python"
        code = f"#!{sys.executable} -IS\nADDRESS = {str(folder / 'socket')!r}\n{STAND_IN.read_text()}"
        self.python.write_text(code)
        self.python.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as asked:
            asked.bind(str(folder / "socket"))
            asked.listen(128)  # from now on programs can be started, and wait for the imports
            env = os.environ | SETTINGS
            del env["TORCH_COMPILE_DISABLE"]  # some programs compile
            self._process = subprocess.Popen(
                [sys.executable, str(NURSERY), str(asked.fileno()), str(self.python)],
                env=env,
                stdin=subprocess.PIPE,
                pass_fds=[asked.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


class Vllm:
    """Runs jobs of `child.py` and remembers what came out of equal ones."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._done = folder, dict[str, Any]()
        self._failed: dict[str, Path] = {}  # what failed in the jobs that are done

    def run(
        self,
        model: Path,
        steps: list[dict[str, Any]],
        extra: dict[str, Any] | None,
        *,
        beside: list[dict[str, Any] | None] | None = None,
        **engine: Any,
    ) -> Any:
        """`{"answers", "metrics"}`; fails with the child's own words.

        `beside`: the connectors of a `MultiConnector`, among which None is ours; None: ours alone.
        """
        result = self.start(model, steps, extra, beside=beside, **engine)
        if "answers" not in result:
            pytest.fail(f"vLLM ended with {result['code']}:\n{result['words'][-4000:]}")
        return result

    def start(
        self,
        model: Path,
        steps: list[dict[str, Any]],
        extra: dict[str, Any] | None,
        *,
        beside: list[dict[str, Any] | None] | None = None,
        **engine: Any,
    ) -> Any:
        """The same, or `{"code", "words"}` of a child that failed."""
        job = json.dumps({"model": str(model), "engine": engine, "extra": extra, "steps": steps, "beside": beside})
        if job in self._done:
            failing.take(self._failed[job])
            return self._done[job]
        path = self._folder / f"job{len(self._done)}.json"
        path.write_text(job)
        self._failed[job] = Path(f"{path}.failed")
        code = self.run_program("child", path, compiles=not engine.get("enforce_eager", True))
        out, words = Path(f"{path}.out"), Path(f"{path}.words")
        self._done[job] = json.loads(out.read_text()) if out.is_file() else {"code": code, "words": words.read_text()}
        return self._done[job]

    def run_program(self, program: str, job: Path, *, compiles: bool = False) -> int:
        """How `program`, a module beside `nursery.py`, ended with this job; what it printed is in `JOB.words`.

        `compiles`: `torch.compile` does what it says.
        """
        env = os.environ | SETTINGS
        if compiles:
            del env["TORCH_COMPILE_DISABLE"]
        with Path(f"{job}.words").open("w") as words:
            ran = subprocess.run(
                [sys.executable, "--job", program, str(job)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        failing.take(Path(f"{job}.failed"))
        return ran.returncode
