"""What the tests of the plug-in share: tiny models, prompts, and a way to run vLLM on them."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import failing
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.selectors import Hkvd
from reference import blend

NURSERY = Path(__file__).parent / "vllm_plugin" / "nursery.py"
STAND_IN = NURSERY.with_name("warm_python.py")
LIMIT_S = 600

EXTENDED: dict[str, Any] = {"worker_extension_cls": "injecting.Injecting"}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
COUNT: dict[str, Any] = {"count": True}
FORGET: dict[str, Any] = {"forget": True}

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


def make_opt(folder: Path) -> Path:
    """A tiny model that adds positions to its embeddings, and cannot be blended."""
    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64}
    config = OPTConfig(**shape, num_hidden_layers=2, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


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


def ask(asked: Sequence[Asked], **more: Any) -> dict[str, Any]:
    """A step of `child.py`: all of them at once, with the spans of their passages."""
    return {"ask": [one.ids for one in asked], "chunks": [one.spans for one in asked], **more}


def tokens(step: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Of a step's answers."""
    return [answer["tokens"] for answer in step]


def close(given: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """The same tokens, and log-probabilities but for rounding."""
    assert tokens(given) == tokens(right)
    for one, other in zip(given, right, strict=True):
        for mine, its in zip(one["logprobs"][0], other["logprobs"][0], strict=True):
            assert {token: mine[token] for token in its} == pytest.approx(its, abs=2e-3)


def check_oracle(model: Any, asked: Sequence[Asked], answers: list[dict[str, Any]], within: float = 2e-3) -> int:
    """Answers of prompts of which a fifth was recomputed, selected at layer 1: each one's first token and its
    log-probabilities are the dense oracle's. Returns of how many full prefill's are the same: those show nothing."""
    alike = 0
    for one, answer in zip(asked, answers, strict=True):
        right = torch.log_softmax(blend(model, one.prompt, Hkvd((1,), (0.2,))).logits.double(), -1)
        given = {int(token): value for token, value in answer["logprobs"][0][0].items()}
        assert answer["tokens"][0][0] == int(right.argmax())
        assert given == pytest.approx({token: float(right[token]) for token in given}, abs=within)
        with torch.no_grad():
            plain = torch.log_softmax(model(torch.tensor([one.ids])).logits[0, -1].double(), -1)
        alike += bool((plain - right).abs().max() < 2 * within)
    return alike


def check_blended(result: dict[str, Any], requests: int = 1) -> None:
    """At least so many requests were blended, and no blend failed."""
    assert result["metrics"]["vllm:cacheblend_requests"] >= requests
    assert "vllm:cacheblend_fallbacks" not in " ".join(result["metrics"])


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
        env = os.environ | SETTINGS
        if not engine.get("enforce_eager", True):
            del env["TORCH_COMPILE_DISABLE"]
        with Path(f"{path}.words").open("w") as said:
            code = subprocess.run(
                [sys.executable, "--job", "child", str(path)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        failing.take(Path(f"{path}.failed"))
        out, words = Path(f"{path}.out"), Path(f"{path}.words")
        self._done[job] = json.loads(out.read_text()) if out.is_file() else {"code": code, "words": words.read_text()}
        return self._done[job]


class Served:
    """A model in vLLM that is started with these options; see `Vllm.run`. The store is a folder unless `extra` names
    another."""

    def __init__(self, vllm: Vllm, model: Path, store: Path, **engine: Any) -> None:
        self._vllm, self.model, self._store, self._engine = vllm, model, store, engine

    def run(self, steps: list[dict[str, Any]], extra: dict[str, Any] | None, **more: Any) -> Any:
        return self._vllm.run(self.model, steps, self._over(extra), **self._engine | more)

    def start(self, steps: list[dict[str, Any]], extra: dict[str, Any] | None, **more: Any) -> Any:
        return self._vllm.start(self.model, steps, self._over(extra), **self._engine | more)

    def _over(self, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        return extra if extra is None else {"store": f"file://{self._store}"} | extra
