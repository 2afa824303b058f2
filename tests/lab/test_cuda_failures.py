"""What fails in `lab cuda` leaves the rest: arms, parts, tests, and processes that crash or hang."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import Run, runner
from cuda_bench import bench, needs_no_gpu
from lab.cli import main
from lab.gpu import context, others, process, report, run, ttft
from lab.gpu.context import Bench
from lab.gpu.parts import Part


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "cuda", main=main)


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = context.build_shape

    def build(shape: str, **options: Any) -> Any:
        if shape == "huge":
            raise torch.OutOfMemoryError("no")
        return real(shape, **options)

    monkeypatch.setattr(context, "build_shape", build)
    tried = bench()
    assert ttft._measure((ttft.Point("huge", "", 1, 8, 1, 0.0),), "large", tried)["points"] == []
    assert tried.skipped == {"large huge": "its weights do not fit on this device"}

    def full(engine: Any, prompt: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(ttft, "full_recompute", full)
    found = ttft._measure((ttft.Point("tiny", "4k", 1, 16, 1, 0.0),), "ttft", tried)
    (point,) = found["points"]
    assert {arm["store"] for arm in point["arms"]} >= {"pinned memory", "device", "disk"}
    assert all(arm["speedup_vs_full"] is None for arm in point["arms"]) and not found["figures"]
    assert tried.skipped["ttft tiny, 16 tokens, full, sdpa"] == "OutOfMemoryError: CUDA out of memory."


def test_an_arm_that_fails_leaves_the_others_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ttft.fused, []

    def sometimes(engine: Any, prompt: Any, selector: Any) -> Any:
        calls.append(engine)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access")
        return real(engine, prompt, selector)

    monkeypatch.setattr(ttft, "fused", sometimes)
    kept: list[context.Found] = []
    points = tuple(ttft.Point("tiny", key, 1, 16, 1, 0.0) for key in ("16k", "4k"))
    found = ttft._measure(points, "ttft", bench(keep=kept.append))
    assert "r = 0.05, pinned memory:\n" in found["error"]
    assert found["error"].endswith("RuntimeError: CUDA error: an illegal memory access")
    assert set(found["figures"]) == {"ttft_speedup_16k", "of_limit_16k", "ttft_speedup_4k"}
    assert len(kept) == len(found["points"]) == 2


def test_a_part_that_fails_leaves_what_it_had_and_the_others_go_on(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(tried: Bench) -> context.Found:
        tried.keep({"figures": {"place_of_bandwidth": 0.7}})
        assert json.loads((tmp_path / "cuda-cpu.json").read_text())["figures"] == {"place_of_bandwidth": 0.7}
        raise RuntimeError("ptxas died")

    def fits_not(_: Bench) -> context.Found:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    parts = {"a": fails, "b": fits_not, "c": lambda _: {"figures": {"attention_of_peak": 0.5}}}
    monkeypatch.setattr(run, "PARTS", {name: Part(each, 1.0) for name, each in parts.items()})
    done = command("--dry-run", "--folder", tmp_path)
    assert done.code == 1 and "FAILED: a" in done.err and "ptxas died" in done.err
    found = json.loads((tmp_path / "cuda-cpu.json").read_text())
    assert found["figures"] == {"place_of_bandwidth": 0.7, "attention_of_peak": 0.5}
    assert "ptxas died" in found["parts"]["a"]["error"] and "out of memory" in found["skipped"]["b"]
    assert "## a failed" in (tmp_path / "cuda-cpu.md").read_text()


def test_tests_that_fail_are_said_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "tests/gpu/test_kernels.py::test_one[a b] PASSED [ 10%]\ntests/gpu/test_cuda.py::test_two FAILED [ 20%]\n"

    def failing(command: list[str], limit_s: float, folder: Path) -> Any:
        return subprocess.CompletedProcess(command, 1, lines + "E   assert 1 == 2\n1 failed, 1 passed in 4.0s")

    monkeypatch.setattr(others, "run_program", failing)
    monkeypatch.setitem(run.PARTS, "kernels", Part(lambda _: {"figures": {"attention_of_peak": 0.5}}, 1.0))  # type: ignore[index]
    found = run.run(("tests", "kernels"), dry_run=True)
    tests = found["parts"]["tests"]
    assert tests["names"] == ["tests/gpu/test_cuda.py::test_two"] and (tests["passed"], tests["failed"]) == (1, 1)
    assert "assert 1 == 2" in report.failures(found)["tests"]
    assert found["figures"] == {"attention_of_peak": 0.5}
    assert "TESTS FAIL" in report.title(found | {"dry_run": False})


def test_tests_that_pass_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "tests/gpu/test_kernels.py::test_one[a b] PASSED [ 10%]\ntests/gpu/test_cuda.py::test_two SKIPPED (no)\n"
    monkeypatch.setattr(others, "run_program", lambda command, *_: subprocess.CompletedProcess(command, 0, lines))
    found = run.run(("tests",), dry_run=True)
    counts = {key: found["parts"]["tests"][key] for key in others.OUTCOMES}
    assert counts == {"passed": 1, "failed": 0, "errors": 0, "skipped": 1} and not report.failures(found)
    assert "1 passed, 0 failed, 0 errors, 1 skipped" in report.page(found)


# ---- processes --------------------------------------------------------------------------------------------


def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> dict[str, Any]:
    """The parts kernels and timeline in their own processes, in which `code` replaces what measures the kernels."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'lab.gpu.child' in sys.orig_argv:\n"
        "    from lab.gpu import kernels, timeline\n"
        "    def measure(bench):\n"
        "        bench.keep({'figures': {'place_of_bandwidth': 0.7}})\n"
        f"        {code}\n"
        "    kernels.measure = measure\n"
        "    timeline.measure = lambda bench: {'busy': {}}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return run.run(("kernels", "timeline"), dry_run=True, apart=True, **options)


@pytest.mark.slow
@needs_no_gpu
def test_a_process_that_crashes_takes_nothing_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = apart(tmp_path, monkeypatch, "print('here', flush=True); os.abort()")
    assert found["figures"] == {"place_of_bandwidth": 0.7} and "busy" in found["parts"]["timeline"]
    assert "its process ended with -6\n" in found["parts"]["kernels"]["error"]
    assert "here" in found["parts"]["kernels"]["error"]


@pytest.mark.slow
@needs_no_gpu
def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    monkeypatch.setitem(run.PARTS, "kernels", replace(run.PARTS["kernels"], most=2.0))  # type: ignore[index]
    found = apart(tmp_path, monkeypatch, "time.sleep(1000)")
    assert found["figures"] == {"place_of_bandwidth": 0.7}
    assert "took too long" in found["parts"]["kernels"]["error"]


def test_a_program_that_hangs_is_ended() -> None:
    """With what it started itself."""
    grandchild = "import time; time.sleep(60)"
    hangs = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {grandchild!r}]).pid, flush=True)\n"
        "time.sleep(60)"
    )
    done = others.run_program([sys.executable, "-c", hangs], 2.0, Path.cwd())
    assert done.returncode == 124 and "longer than 2 s" in done.stdout
    state = Path(f"/proc/{int(done.stdout.split()[0])}/stat")
    for _ in range(100):  # until its parent, the system's first process, has seen its end
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the program had started goes on")
