"""Parts of `bench cuda` that run another program: the tests on a GPU, and vLLM."""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cacheblend
from cacheblend.bench.cuda.context import Bench
from cacheblend.core.errors import InvalidInputError

_OUTCOMES = ("passed", "failed", "errors", "skipped")


def tests(bench: Bench) -> dict[str, Any]:
    """tests/gpu of the checkout that this package lies in; without one they are skipped.

    Raises:
        InvalidInputError: a test fails: nothing that would be measured could be believed.
    """
    root = Path(cacheblend.__file__).resolve().parents[2]
    if not (root / "tests" / "gpu").is_dir() or find_spec("pytest") is None:
        bench.skipped["tests"] = "they need a checkout and pytest"
        return {}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    done = _run(command, bench.left_s, root)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    if done.returncode:
        raise InvalidInputError(f"tests/gpu fails on this device, so nothing is measured:\n{done.stdout[-3000:]}")
    return {outcome: counts.get(outcome, 0) for outcome in _OUTCOMES}


def vllm(bench: Bench) -> dict[str, Any]:
    """The plug-in's `bench vllm ttft` at 16,384 tokens."""
    if find_spec("vllm") is None:
        bench.skipped["vllm"] = "vLLM is not installed"
        return {}
    if bench.dry_run:
        bench.skipped["vllm"] = "a dry run starts no servers"
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "vllm.json"
        what = ["--shape", "llama-3.1-8b", "--chunks", "32", "--chunk-tokens", "512", "--runs", "3"]
        command = [sys.executable, "-m", "cacheblend", "bench", "vllm", "ttft", *what, "--json-file", str(out)]
        done = _run(command, bench.left_s, Path.cwd())
        if done.returncode:
            bench.skipped["vllm"] = f"bench vllm ttft ended with {done.returncode}: {done.stdout[-500:]}"
            return {}
        found: dict[str, Any] = json.loads(out.read_text())
    return {"figures": {"vllm_ttft_speedup_16k": found["figures"]["ttft_speedup"]}, "ttft": found}


def _run(command: list[str], limit_s: float, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The program's end, with its output; one that takes longer ends with 124."""
    source = str(Path(cacheblend.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, limit_s),
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 124, f"{output}\nit took longer than {limit_s:.0f} s")
