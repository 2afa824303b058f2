"""Parts of `lab cuda` that run another program: the tests on a GPU, and vLLM."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lab.checkout import ROOT, environment
from lab.gpu.context import Bench, Found

_TAGS = {"failure": "failed", "error": "errors", "skipped": "skipped"}
OUTCOMES = ("passed", *_TAGS.values())
END_S = 15.0
"""What a program has to end by itself once it is asked to."""

_TESTS = ("tests/gpu/test_kernels.py", "tests/gpu/test_cuda.py", "tests/gpu")
"""Kernels first and eight bits last, should there not be time for all."""


def tests_miss() -> str:
    """What the tests lack here; "": nothing."""
    has_all = (ROOT / "tests" / "gpu").is_dir() and find_spec("pytest") is not None
    return "" if has_all else "they need a checkout and pytest"


def tests(bench: Bench) -> Found:
    """tests/gpu, side by side where xdist is installed: how many passed, failed and were skipped; `error` names those
    that failed."""
    beside = ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal"] if find_spec("xdist") is not None else []
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder:
        report = Path(folder) / "junit.xml"
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--color=no", f"--junitxml={report}", *beside]
        done = run_program([sys.executable, "-m", "pytest", *_TESTS, *options], bench.left_s - END_S, ROOT)
        outcomes = _outcomes(report)
    names = [name for name, outcome in outcomes if outcome in ("failed", "errors")]
    found: Found = {each: sum(outcome == each for _, outcome in outcomes) for each in OUTCOMES}
    if done.returncode == 124 and not names:
        bench.skipped["tests, the rest"] = f"they took too long; {len(outcomes)} were done"
    elif done.returncode:
        what = f"pytest ended with {done.returncode}; {len(names)} of {len(outcomes)} fail"
        found |= {"names": names, "error": "\n".join([what, *names, done.stdout[-3000:]])}
    return found


def _outcomes(report: Path) -> list[tuple[str, str]]:
    """(test, outcome) of pytest's report, which it writes when it ends or is interrupted."""
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    found = []
    for case in cases:
        outcome = next((_TAGS[each.tag] for each in case if each.tag in _TAGS), "passed")
        found.append((f"{case.get('classname')}::{case.get('name')}", outcome))
    return found


def vllm_misses() -> str:
    """What the comparison in vLLM lacks here; "": nothing."""
    return "" if find_spec("vllm") is not None else "vLLM is not installed"


def vllm(bench: Bench) -> Found:
    """The plug-in's `lab vllm ttft` at 16,384 tokens."""
    if bench.dry_run:
        bench.skipped["vllm"] = "a dry run starts no servers"
        return {}
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder:
        out = Path(folder) / "vllm.json"
        what = ["--shape", "llama-3.1-8b", "--chunks", "32", "--chunk-tokens", "512", "--runs", "3"]
        command = [sys.executable, "-m", "lab", "vllm", "ttft", *what, "--json-file", str(out)]
        done = run_program(command, bench.left_s - END_S, Path.cwd(), temporary=folder)
        if done.returncode:
            return {"error": f"lab vllm ttft ended with {done.returncode}\n{done.stdout[-3000:]}"}
        found: dict[str, Any] = json.loads(out.read_text())
    return {"figures": {"vllm_ttft_speedup_16k": found["figures"]["ttft_speedup"]}, "ttft": found}


def run_program(
    command: list[str], limit_s: float, folder: Path, temporary: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """The end of a program in a folder, with its output; `temporary`: of its temporary files.

    One that takes longer than its limit is ended with all that it started, and ends with 124.
    """
    variables = environment() | ({} if temporary is None else {"TMPDIR": temporary})
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=words, stderr=subprocess.STDOUT, start_new_session=True
        )
        code, more = 124, f"\nit took longer than {limit_s:.0f} s"
        try:
            code, more = process.wait(max(1.0, limit_s)), ""
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(process)
        words.seek(0)
        return subprocess.CompletedProcess(command, code, words.read() + more)


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Ends a program that leads a process group, and everything in it; one that has ended leaves nobody behind.

    It is interrupted first, so that it can end its servers and remove its files.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group has the number of its first process
    process.wait()
