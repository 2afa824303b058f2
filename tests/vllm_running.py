"""Running vLLM with steps of `vllm_prompts`, and what has to come of it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import failing
from cacheblend.core.select.selectors import Hkvd
from reference import blend
from vllm_prompts import Asked

PLUGIN = Path(__file__).parent / "vllm_plugin"

EXTENDED: dict[str, Any] = {"worker_extension_cls": "injecting.Injecting"}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make vllm")
needs_avx512 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's kernels for it need AVX-512")

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


# ---- vLLM ----------------------------------------------------------------------------------------------------------


def run_job(program: str, path: Path, job: str, limit_s: float = 600, **environment: str) -> Any:
    """What a program of `nursery.py` wrote, or `{"code", "words"}` if it failed."""
    path.write_text(job)
    paths = [*map(str, (PLUGIN, PLUGIN.parent, PLUGIN.parents[1])), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Path(f"{path}.words").open("w") as said:
        code = subprocess.run(
            [sys.executable, "--job", program, str(path)],
            env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        ).returncode
    out, words = Path(f"{path}.out"), Path(f"{path}.words")
    return json.loads(out.read_text()) if out.is_file() else {"code": code, "words": words.read_text()[-4000:]}


class Vllm:
    """Runs jobs of `child.py` and remembers what came out of equal ones."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._done = folder, dict[str, tuple[Any, Path]]()  # and what failed in them

    def run(self, model: Path, steps: list[dict[str, Any]], extra: dict[str, Any] | None, **job: Any) -> Any:
        """`{"answers", "metrics"}`; fails with the child's own words. See `start`."""
        result = self.start(model, steps, extra, **job)
        if "answers" not in result:
            pytest.fail(f"vLLM ended with {result['code']}:\n{result['words']}")
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
        """The same, or `{"code", "words"}` of a child that failed.

        `beside`: the connectors of a `MultiConnector`, among which None is ours; None: ours alone.
        """
        job = json.dumps({"model": str(model), "engine": engine, "extra": extra, "steps": steps, "beside": beside})
        if job not in self._done:
            path = self._folder / f"job{len(self._done)}.json"
            compiles = {} if engine.get("enforce_eager", True) else {"TORCH_COMPILE_DISABLE": ""}
            self._done[job] = run_job("child", path, job, **compiles), Path(f"{path}.failed")
        result, failed = self._done[job]
        failing.take(failed)
        return result


@dataclass
class Served:
    """A model in vLLM that is started with these options; the store is a folder unless `extra` names another."""

    vllm: Vllm
    model: Path
    store: Path
    engine: dict[str, Any]

    def run(self, steps: list[dict[str, Any]], extra: dict[str, Any] | None, **more: Any) -> Any:
        """See `Vllm.run`."""
        over = extra if extra is None else {"store": f"file://{self.store}"} | extra
        return self.vllm.run(self.model, steps, over, **self.engine | more)

    def plain(self, step: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """What vLLM answers to a step without the plug-in."""
        answers: list[dict[str, Any]] = self.run([{**step, "chunks": None}], None, **more)["answers"][0]
        return answers

    def refusal(self, extra: dict[str, Any], *steps: dict[str, Any], **more: Any) -> str:
        """The words with which a start ends."""
        over = {"store": f"file://{self.store}"} | extra
        result = self.vllm.start(self.model, list(steps), over, **self.engine | more)
        assert "answers" not in result
        return str(result["words"])


Serve = Callable[..., Served]
"""A model by name or folder, and vLLM's options."""


# ---- answers -------------------------------------------------------------------------------------------------------


def tokens(step: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Of a step's answers."""
    return [answer["tokens"] for answer in step]


def close(given: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """The same tokens, and log-probabilities but for rounding."""
    assert tokens(given) == tokens(right)
    for one, other in zip(given, right, strict=True):
        for mine, its in zip(one["logprobs"][0], other["logprobs"][0], strict=True):
            assert {token: mine[token] for token in its} == pytest.approx(its, abs=2e-3)


@cache
def dense(folder: Path) -> Any:
    """A model in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


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


# ---- the shadow check ----------------------------------------------------------------------------------------------

SHADOW = "vllm:cacheblend_shadow"
MINE = " hkvd engine"  # no tenant, the selector, settings


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What has come to the check's counters, by name without the prefix."""
    return {
        name.removeprefix(SHADOW): value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith(SHADOW) and value != before.get(name, 0)
    }


def found_in(counted: dict[str, float]) -> dict[str, float]:
    """The check's own counters, without their labels; zero where nothing came."""
    names = {"": f" {MINE}", "_tokens yes": f"_tokens {MINE} yes", "_tokens no": f"_tokens {MINE} no"}
    names |= {"_kl_sum": f"_kl_sum {MINE}", "_kl_count": f"_kl_count {MINE}"}
    return {short: counted.get(name, 0) for short, name in names.items()}


@torch.no_grad()
def expected(folder: Path, asked: list[Asked], answers: list[Any]) -> dict[str, float]:
    """What the check has to find, by a dense model and by the log-probabilities that vLLM gave."""
    from cacheblend.engines.shadow import kl_divergence

    agreed = differed = 0
    kl = 0.0
    for one, answer in zip(asked, answers, strict=True):
        said = answer["tokens"][0][:16]
        full = dense(folder)(torch.tensor([one.ids + said[:-1]])).logits[0, len(one.ids) - 1 :]
        blended = torch.full((len(said), full.shape[1]), -math.inf)
        for row, found in enumerate(answer["logprobs"][0][:16]):
            for token, value in found.items():
                blended[row, int(token)] = value
        same = (full.argmax(-1) == blended.argmax(-1)).sum().item()
        agreed, differed = agreed + int(same), differed + len(said) - int(same)
        kl += kl_divergence(full[0], blended[0])
    return {"": len(asked), "_tokens yes": agreed, "_tokens no": differed, "_kl_sum": kl, "_kl_count": len(asked)}
