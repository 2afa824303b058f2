"""`bench cuda` on a CPU: its logic at tiny size, what it writes, and what it says where it cannot measure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cacheblend
from cacheblend.bench.cuda import kernels, others, run, timeline, ttft
from cacheblend.bench.cuda.context import Bench
from cacheblend.core.errors import InvalidInputError
from command_line import Run, runner

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
SOURCE = Path(cacheblend.__file__).parents[1]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "bench", "cuda")


def bench(**given: Any) -> Bench:
    options = {"device": torch.device("cpu"), "dry_run": True, "until": 1e18, "progress": lambda what: None}
    return Bench(**(options | given))  # type: ignore[arg-type]


@needs_no_gpu
def test_a_dry_run_tries_all_parts_and_draws_what_it_found(command: Run, tmp_path: Path) -> None:
    parts = ["kernels", "ttft", "timeline", "vllm"]
    done = command("--dry-run", "--folder", tmp_path, *(word for part in parts for word in ("--part", part)))
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"cuda-cpu.json", "cuda-cpu-ttft.png", "cuda-cpu-timeline.png"}
    found = json.loads((tmp_path / "cuda-cpu.json").read_text())
    assert found["dry_run"] and found["machine"] and found["commit"] is not None
    assert set(found["parts"]) == set(parts)
    assert set(found["figures"]) == set(run.BARS) - {"vllm_ttft_speedup_16k", "ttft_speedup_32k"}
    assert set(found["parts"]["kernels"]["placing"]) == {"raw", "int8", "fp8", "int4"}
    for point in found["parts"]["ttft"]["points"]:
        arms = [(arm["arm"], arm["store"], arm["ratio"]) for arm in point["arms"]]
        blends = [("blend", "pinned memory", ratio) for ratio in ttft.RATIOS]
        assert arms == [("full", None, None), *blends, ("blend", "device", 0.15), ("blend", "disk", 0.15)]
        assert all(arm["loaded_tokens"] == point["tokens"] for arm in point["arms"][1:])
    busy = found["parts"]["timeline"]["busy"]
    assert 0 < busy["compute"] <= 1 and 0 < busy["read"] <= 1
    assert "the numbers mean nothing" in done.out and "falls short" not in done.out
    assert "not measured" in done.out and "vllm" in found["skipped"]


@needs_no_gpu
def test_without_a_gpu_it_says_what_can_be_done(command: Run, tmp_path: Path) -> None:
    done = command("--folder", tmp_path)
    assert done.code == 2 and "--dry-run tries it at tiny size" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--part", "kernel"), "there is no part 'kernel'; choose from tests, kernels, ttft, timeline, vllm"),
        (("--folder", "/nowhere/at/all"), "there is no such folder"),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_wrong_options(command: Run, options: tuple[str, ...], message: str) -> None:
    done = command("--dry-run", *options)
    assert done.code == 2 and message in done.err


def test_what_there_is_no_time_for_is_skipped_and_said() -> None:
    found = run.run(("kernels", "ttft"), dry_run=True, minutes=0.001)
    assert set(found["skipped"]) == {"kernels", "ttft"} and "were left" in found["skipped"]["ttft"]
    assert not found["figures"]
    late = bench(until=0.0)
    assert ttft.measure(late) == {"figures": {}, "points": []}
    assert list(late.skipped) == ["ttft tiny"]


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ttft.build_shape

    def build(shape: str, **options: Any) -> Any:
        if shape == "huge":
            raise torch.OutOfMemoryError("no")
        return real(shape, **options)

    monkeypatch.setattr(ttft, "build_shape", build)
    monkeypatch.setattr(ttft, "DRY", (ttft.Point("huge", "", 1, 8, 1, 0.0), ttft.Point("tiny", "4k", 1, 16, 1, 0.0)))
    tried = bench()
    found = ttft.measure(tried)
    assert [point["shape"] for point in found["points"]] == ["tiny"] and set(found["figures"]) == {"ttft_speedup_4k"}
    assert tried.skipped == {"ttft huge": "its weights do not fit on this device"}
    monkeypatch.setattr(run, "PARTS", {"a": lambda _: kernels.measure(bench()), "b": build_nothing})
    both = run.run(dry_run=True)
    assert "out of memory" in both["skipped"]["b"] and "a" in both["parts"]


def build_nothing(_: Bench) -> dict[str, Any]:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


def test_tests_that_fail_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], limit_s: float, folder: Path) -> Any:
        return subprocess.CompletedProcess(command, 1, "1 failed, 3 passed, 2 skipped in 4.0s")

    monkeypatch.setattr(others, "_run", failing)
    with pytest.raises(InvalidInputError, match=r"tests/gpu fails on this device(?s:.)*1 failed"):
        run.run(("tests",), dry_run=True)


def test_a_program_that_hangs_is_ended() -> None:
    hangs = "print('here', flush=True); import time; time.sleep(60)"
    done = others._run([sys.executable, "-c", hangs], 1.0, Path.cwd())
    assert done.returncode == 124 and "here" in done.stdout and "longer than 1 s" in done.stdout


def test_a_part_that_is_run_later_is_added_to_the_same_commit_only(tmp_path: Path) -> None:
    def result(commit: str, part: str, **more: Any) -> dict[str, Any]:
        found = {"commit": commit, "device": "H200", "dry_run": False, "figures": {part: 1.0}, "parts": {part: {}}}
        return found | {"skipped": {}} | more

    path = tmp_path / "cuda-h200.json"
    first = result("abc", "kernels", skipped={"vllm": "not here", "ttft llama": "no time"})
    assert run.merged(path, first) == first
    path.write_text(json.dumps(first))
    both = run.merged(path, result("abc", "ttft"))
    assert set(both["parts"]) == set(both["figures"]) == {"kernels", "ttft"}
    assert both["skipped"] == {"vllm": "not here"}
    assert set(run.merged(path, result("def", "ttft"))["parts"]) == {"ttft"}
    assert set(run.merged(path, result("abc", "ttft") | {"device": "H100"})["parts"]) == {"ttft"}
    path.write_text(json.dumps(first | {"commit": "abc+"}))
    assert set(run.merged(path, result("abc+", "ttft"))["parts"]) == {"ttft"}
    path.write_text("{")
    assert set(run.merged(path, result("abc", "ttft"))["parts"]) == {"ttft"}


def test_what_falls_short_is_named() -> None:
    from rich.console import Console

    result = {
        "device": "H200",
        "dry_run": False,
        "skipped": {},
        "figures": {"ttft_speedup_4k": 3.9, "of_limit_16k": 0.8},
    }
    console = Console(width=80)
    with console.capture() as shown:
        console.print(run.table(result))
    lines = {line.split()[0]: line for line in shown.get().splitlines() if line.split()}
    assert "falls short" in lines["ttft_speedup_4k"] and "falls short" not in lines["of_limit_16k"]
    assert "not measured" in lines["ttft_speedup_32k"]


def test_events_of_a_device_are_put_into_lanes() -> None:
    def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)

    events = [
        event("cacheblend: begin", 1000.0, 1001.0, "DeviceType.CPU"),
        event("aten::mm", 1010.0, 1020.0, "DeviceType.CPU"),
        event("Memcpy HtoD (Pinned -> Device)", 1100.0, 1300.0),
        event("Memcpy DtoD (Device -> Device)", 1300.0, 1310.0),
        event("_place_kernel", 1300.0, 1400.0),
        event("ampere_bf16_gemm", 1350.0, 1500.0),
    ]
    found = timeline.slices_of(events, [(0.0, 5e-5)], is_cuda=True)
    lanes = [(each.lane, round(1e6 * each.start_s), round(1e6 * each.end_s)) for each in found]
    assert lanes == [
        ("read", 0, 50),
        ("copy", 100, 300),
        ("compute", 300, 310),
        ("place", 300, 400),
        ("compute", 350, 500),
    ]


@needs_no_gpu
def test_it_runs_from_a_checkout_with_few_packages(tmp_path: Path) -> None:
    """Of what a GPU's image has: torch, Triton, transformers, typer, rich, safetensors, xxhash and their own needs."""
    blocked = ["redis", "obstore", "fastapi", "uvicorn", "starlette", "langchain", "openai", "vllm"]
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    parts = ", ".join(repr(word) for part in ("kernels", "ttft", "timeline") for word in ("--part", part))
    code = block + f"from cacheblend.cli import main\nmain(['bench', 'cuda', '--dry-run', '--json', {parts}])"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"]
    assert not list(tmp_path.iterdir())
