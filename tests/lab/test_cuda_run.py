"""`lab cuda` on a CPU: all parts at tiny size, what it writes, and what it says where it cannot measure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cacheblend
from command_line import Run, runner
from cuda_bench import needs_no_gpu
from lab.cli import main
from lab.gpu import report, run

ROOT = Path(__file__).parents[2]
SOURCE = Path(cacheblend.__file__).parents[1]
ARMS = [
    ("pinned memory", 0.15),
    ("pinned memory", 0.05),
    ("pinned memory", 1.0),
    ("device", 0.15),
    ("device", 0.05),
    *((store, ratio) for ratio in (0.15, 0.05) for store in ("disk, cold", "disk")),
]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "cuda", main=main)


@needs_no_gpu
def test_a_dry_run_tries_all_parts_and_draws_what_it_found(command: Run, tmp_path: Path) -> None:
    asked = ["kernels", "ttft", "timeline", "large"]
    done = command("--dry-run", "--folder", tmp_path, *(word for part in [*asked, "vllm"] for word in ("--part", part)))
    assert done.code == 0, done.err
    files = {f"cuda-cpu{end}" for end in (".json", ".md", "-ttft.png", "-timeline.png")}
    assert {path.name for path in tmp_path.iterdir()} == files
    found = json.loads((tmp_path / "cuda-cpu.json").read_text())
    assert found["dry_run"] and found["machine"] and found["commit"] is not None
    assert set(found["parts"]) == set(asked) and not report.failures(found)
    assert set(found["figures"]) == set(report.BARS) - {"vllm_ttft_speedup_16k", "ttft_speedup_32k"}
    assert set(found["parts"]["kernels"]["placing"]) == {"raw", "int8", "fp8", "int4"}
    points = report.points_of(found)
    assert [(point["shape"], point["tokens"]) for point in points] == [("tiny", 96), ("tiny", 64), ("tiny", 32)]
    for point in points:
        arms = [(arm["arm"], arm["store"], arm["ratio"]) for arm in point["arms"]]
        assert arms[:5] == [("full", None, None)] + [("blend", store, ratio) for store, ratio in ARMS[:4]]
        cold = {("blend", store, ratio) for store, ratio in ARMS if "cold" in store}
        assert {*arms[1:], *cold} == {("blend", store, ratio) for store, ratio in ARMS}  # not every disk can be cold
        assert all(arm["loaded_tokens"] == point["tokens"] and arm["runs"] == 1 for arm in point["arms"][1:])
    busy = found["parts"]["timeline"]["busy"]
    assert 0 < busy["compute"] <= 1 and 0 < busy["read"] <= 1
    assert "the numbers mean nothing" in done.out and "falls short" not in done.out
    assert "not measured" in done.out and found["skipped"]["vllm"] == "vLLM is not installed"
    page = (tmp_path / "cuda-cpu.md").read_text()
    for words in (
        "| `attention_of_peak` |",
        "| tiny | 96 | r = 0.05, disk |",
        "| FlexAttention |",
        "- vllm: vLLM is not",
    ):
        assert words in page


@needs_no_gpu
def test_without_a_gpu_it_says_what_can_be_done(command: Run, tmp_path: Path) -> None:
    done = command("--folder", tmp_path)
    assert done.code == 2 and "--dry-run tries it at tiny size" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--part", "kernel"),
            "there is no part 'kernel'; choose from tests, kernels, ttft, timeline, vllm, compiled, large",
        ),
        (("--folder", "/nowhere/at/all"), "there is no such folder"),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_wrong_options(command: Run, options: tuple[str, ...], message: str) -> None:
    done = command("--dry-run", *options)
    assert done.code == 2 and message in done.err


def test_a_part_that_is_run_later_is_added_to_the_same_commit_only(tmp_path: Path) -> None:
    def result(commit: str, part: str, **more: Any) -> dict[str, Any]:
        found = {"commit": commit, "device": "H200", "dry_run": False, "figures": {part: 1.0}}
        found["parts"] = {part: {"figures": {part: 1.0}}}
        return found | {"skipped": {}} | more

    path = tmp_path / "cuda-h200.json"
    first = result("abc", "kernels", skipped={"vllm": "not here", "ttft llama": "no time", "kernels, one way": "no"})
    assert run.read(path) is None and run.merged(None, first) == first
    path.write_text(json.dumps(first))
    assert run.read(path) == first
    both = run.merged(first, result("abc", "ttft"))
    assert set(both["parts"]) == set(both["figures"]) == {"kernels", "ttft"}
    assert both["skipped"] == {"vllm": "not here", "kernels, one way": "no"}
    again = run.merged(first, {**result("abc", "kernels"), "figures": {}, "parts": {"kernels": {"error": "no"}}})
    assert not again["figures"]  # those of the part that was run again are gone
    assert set(run.merged(first, result("def", "ttft"))["parts"]) == {"ttft"}
    assert set(run.merged(first, result("abc", "ttft") | {"device": "H100"})["parts"]) == {"ttft"}
    assert set(run.merged(first | {"commit": "abc+"}, result("abc+", "ttft"))["parts"]) == {"ttft"}
    path.write_text("{")
    assert run.read(path) is None


def test_what_falls_short_is_named() -> None:
    from rich.console import Console

    result = {
        "device": "H200",
        "dry_run": False,
        "skipped": {},
        "parts": {},
        "figures": {"ttft_speedup_4k": 3.9, "of_limit_16k": 0.8},
    }
    console = Console(width=80)
    with console.capture() as shown:
        console.print(report.table(result))
    lines = {line.split()[0]: line for line in shown.get().splitlines() if line.split()}
    assert "falls short" in lines["ttft_speedup_4k"] and "falls short" not in lines["of_limit_16k"]
    assert "not measured" in lines["ttft_speedup_32k"]


@pytest.mark.slow
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
    code = block + f"from lab.cli import main\nmain(['cuda', '--dry-run', '--json', {parts}])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SOURCE, ROOT)))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"]
    assert not list(tmp_path.iterdir())


@needs_no_gpu
def test_a_store_that_fails_takes_its_own_arms_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the result says where it failed, and for which commit: the one that the environment names."""
    from cacheblend.store import DiskStore

    def fails(self: DiskStore, *args: Any, **options: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(DiskStore, "put_manifest", fails)
    monkeypatch.setenv("CACHEBLEND_COMMIT", "0123456789ab")
    found = run.run(("ttft",), dry_run=True)
    assert found["commit"] == "0123456789ab"
    points = report.points_of(found)
    for point in points:
        assert [(arm["store"], arm["ratio"]) for arm in point["arms"]] == [(None, None), *ARMS[:5]]
    assert len(points) == 2
    error = found["parts"]["ttft"]["error"]
    assert "OSError: the disk is gone" in error and ", in fails" in error
