"""`lab cuda` on a CPU: all parts at tiny size, what it writes, what it says where it cannot measure, and what fails."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import cacheblend
from cacheblend.core.kernels.attention import AttentionSpec, attend_rows
from command_line import Run, runner
from lab.cli import main
from lab.gpu import attention_ways, context, kernels, others, profile, report, run, timeline, ttft
from lab.gpu.context import Bench
from lab.gpu.run import Part

ROOT = Path(__file__).parents[2]
SOURCE = Path(cacheblend.__file__).parents[1]
ARMS = [
    *(("blend", "pinned memory", ratio) for ratio in (0.15, 0.05, 1.0)),
    *(("blend", "pinned memory, layer graphs", ratio) for ratio in (0.15, 0.05)),
    *((name, "pinned memory", ratio) for name in ("head", "hybrid") for ratio in (0.15, 0.05)),
    *(("blend", "pinned memory, fp8 records", ratio) for ratio in (0.15, 0.05)),
    *(("blend", "device", ratio) for ratio in (0.15, 0.05)),
    *(("blend", store, ratio) for ratio in (0.15, 0.05) for store in ("disk, cold", "disk")),
]


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def bench(**given: Any) -> Bench:
    options = {"device": torch.device("cpu"), "dry_run": True, "until": 1e18, "progress": lambda what: None}
    return Bench(**(options | given))  # type: ignore[arg-type]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "cuda", main=main)


@needs_no_gpu
def test_a_dry_run_tries_all_parts_and_draws_what_it_found(command: Run, tmp_path: Path) -> None:
    asked = ["kernels", "ttft", "timeline", "profile", "tiles"]
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
    assert [(point["shape"], point["tokens"]) for point in points] == [("tiny", 96), ("tiny", 64)]
    for point in points:
        arms = [(arm["arm"], arm["store"], arm["ratio"]) for arm in point["arms"]]
        assert arms[:5] == [("full", None, None), *ARMS[:4]]
        assert {*arms[1:], *(arm for arm in ARMS if "cold" in arm[1])} == {*ARMS}  # not every disk can be cold
        assert all(arm["loaded_tokens"] == point["tokens"] and arm["runs"] == 1 for arm in point["arms"][1:])
    for each in found["parts"]["profile"]["passes"].values():
        assert each["launches"] >= len(each["kernels"]) > 3 and 0 <= each["idle"] < 1 and each["s"] > 0
    for shapes in found["parts"]["tiles"]["cases"].values():
        assert [each["own"] for each in shapes] == [True, False] and all(each["error"] < 0.06 for each in shapes)
    ceilings, first = found["parts"]["kernels"]["ceilings"], found["parts"]["profile"]["first"]
    assert ceilings.pop("sdpa").isupper() and len(ceilings) == 3 and min(ceilings.values()) > 0
    assert first["compiled"] == first["compiled_by_requests"] == 0 and first["open_s"] > 0 < first["first_s"]
    busy = found["parts"]["timeline"]["busy"]
    assert 0 < busy["compute"] <= 1 and 0 < busy["read"] <= 1
    assert "the numbers mean nothing" in done.out and "falls short" not in done.out
    assert "not measured" in done.out and found["skipped"]["vllm"] == "vLLM is not installed"
    assert set(found["parts"]["ttft"]["decoded_per_s"]) == {"pinned memory", ttft.GRAPHS}
    page = (tmp_path / "cuda-cpu.md").read_text()
    lines = (
        "Decoded by llama-3.1-8b, pinned memory, layer graphs: ",
        "| `attention_of_flash` |",
        "| tiny | 96 | r = 0.05, disk |",
        "| FlexAttention |",
        " tokens, hybrid, r = 0.15 |",
        "| window, in pages | (",
        "- vllm: vLLM is not",
        "Ceilings: ",
        "With no compiled kernel at hand the engine was opened in ",
    )
    assert all(words in page for words in lines)


@needs_no_gpu
def test_without_a_gpu_it_says_what_can_be_done(command: Run, tmp_path: Path) -> None:
    done = command("--folder", tmp_path)
    assert done.code == 2 and "--dry-run tries it at tiny size" in done.err
    assert not list(tmp_path.iterdir())


def test_wrong_options(command: Run) -> None:
    parts = "tests, kernels, ttft, timeline, profile, tiles, vllm"
    for options, message in {
        ("--part", "kernel"): f"there is no part 'kernel'; choose from {parts}",
        ("--folder", "/nowhere/at/all"): "there is no such folder",
        ("--minutes", "0"): "--minutes",
    }.items():
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
    figures = {"ttft_speedup_4k": 3.9, "of_limit_16k": 0.82}
    result = {"device": "H200", "dry_run": False, "skipped": {}, "parts": {}, "figures": figures}
    console = Console(width=80)
    with console.capture() as shown:
        console.print(report.table(result))
    lines = {line.split()[0]: line for line in shown.get().splitlines() if line.split()}
    assert "falls short" in lines["ttft_speedup_4k"] and "falls short" not in lines["of_limit_16k"]
    assert "not measured" in lines["ttft_speedup_32k"]


HAS = ("torch", "triton", "transformers", "typer", "numpy", "rich", "safetensors", "xxhash", "pytest", "hypothesis")
"""What a GPU's image has, with what these need."""


def closure(names: Iterable[str]) -> set[str]:
    """Distributions that are installed, and all that they need."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in found:
            with suppress(PackageNotFoundError):
                needs = [each for each in requires(name) or () if "extra ==" not in each]
                waiting += [re.split(r"[^\w.-]", each)[0] for each in needs]
                found.add(name)
    return found


@pytest.mark.slow
@needs_no_gpu
def test_it_runs_from_a_checkout_with_few_packages(tmp_path: Path) -> None:
    has = closure(HAS)
    of = {top: {re.sub(r"[-_.]+", "-", each).lower() for each in by} for top, by in packages_distributions().items()}
    blocked = sorted(top for top, by in of.items() if not by & has and top not in ("cacheblend", "lab"))
    assert {"redis", "fastapi", "obstore"} <= {*blocked} and not {"torch", "jinja2", "yaml"} & {*blocked}
    block = (
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        return None if name.split('.')[0] in {blocked!r} else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = map(Without, sys.meta_path)\n"
    )
    code = block + "from lab.cli import main\nmain(['cuda', '--dry-run', '--json'])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SOURCE, ROOT)))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["figures"] and {*run.PARTS} - {*found["parts"]} == {"vllm"} and not report.failures(found)
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
    others = [arm for arm in ARMS if "disk" not in arm[1]]
    for point in points:
        assert [(arm["arm"], arm["store"], arm["ratio"]) for arm in point["arms"]] == [("full", None, None), *others]
    assert len(points) == 2
    error = found["parts"]["ttft"]["error"]
    assert "OSError: the disk is gone" in error and ", in fails" in error
    # that of page-locked memory takes those with graphs, which share it, and not the one of eight-bit records
    monkeypatch.undo()
    real, codecs = ttft.BlendEngine.warm, set[str]()

    def raw_fails(self: Any, *args: Any) -> Any:
        codecs.add(self.config.codec)
        if self.store.tier_names == ("memory",) and self.config.codec == "raw":
            raise OSError("no memory")
        return real(self, *args)

    monkeypatch.setattr(ttft.BlendEngine, "warm", raw_fails)
    (point,) = ttft._measure((ttft.Point("tiny", "", 1, 16, 1, 0.0),), bench())["points"]
    assert codecs == {"raw", "fp8"} and "pinned memory, fp8 records" in {arm["store"] for arm in point["arms"]}
    assert not {"pinned memory", ttft.GRAPHS} & {arm["store"] for arm in point["arms"]}


# ---- attention --------------------------------------------------------------------------------------------


@needs_no_gpu
def test_other_ways_of_attention_are_beside_ours() -> None:
    ways = kernels.measure_attention(bench(), kernels.DRY)
    for layout in ("scattered", "runs of 16"):
        found = ways[layout]["ways"]
        assert set(found) == set(attention_ways.WAYS)
        for name in ("cacheblend", "PyTorch, masks by group", "PyTorch, one mask", "FlexAttention"):
            assert found[name]["error"] <= 1e-5 and found[name]["of_flash"] > 0, name
        for name in ("PyTorch varlen", "flash-attn varlen", "vLLM varlen"):
            assert "Error: " in found[name]["skipped"], name


def over_runs(query: Any, pages: Any, begins: Any, seen: Any, table: Any, scale: float) -> torch.Tensor:
    """What a kernel over sequences in pages computes: the last row of each sees its last key."""
    out = torch.empty_like(query)
    for number, length in enumerate(seen.tolist()):
        rows = slice(int(begins[number]), int(begins[number + 1]))
        count = rows.stop - rows.start
        keys, values = (part[table[number].long()].flatten(0, 1)[:length].transpose(0, 1) for part in pages)
        at = torch.arange(length - count, length)
        out[rows] = attend_rows(query[rows].transpose(0, 1), keys, values, at, AttentionSpec(scale))
    return out


def test_ways_over_runs_ask_for_what_the_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def torchs(
        query, keys, values, begins, none, longest, most, *, scale, window_size, enable_gqa, seqused_k, block_table
    ):
        assert none is None and window_size == (-1, 0) and enable_gqa
        assert (longest, most) == (int(begins.diff().max()), int(seqused_k.max()))
        return over_runs(query, (keys, values), begins, seqused_k, block_table, scale)

    def flash_attns(query, keys, values, begins, ends, longest, most, *, softmax_scale, causal, block_table):
        assert causal and ends.dtype == torch.int32
        return over_runs(query, (keys, values), begins, ends.diff(), block_table, softmax_scale)

    def vllms(query, keys, values, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, **more):
        assert (
            more["causal"] and max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(seqused_k.max())
        )
        pages = keys, values
        return over_runs(query, pages, cu_seqlens_q, seqused_k, more["block_table"], more["softmax_scale"])

    modules = {
        "torch.nn.attention.varlen": SimpleNamespace(varlen_attn=torchs),
        "flash_attn": SimpleNamespace(flash_attn_varlen_func=flash_attns),
        "vllm.vllm_flash_attn": SimpleNamespace(flash_attn_varlen_func=vllms),
    }
    monkeypatch.setattr(attention_ways, "import_module", modules.__getitem__)
    sizes = kernels.Sizes(600, 50, 4, 2, 32, torch.float32, 1)
    for layout in kernels.measure_attention(bench(), sizes).values():
        for name in ("PyTorch varlen", "flash-attn varlen", "vLLM varlen"):
            assert layout["ways"][name].get("error", 1.0) <= 1e-5, layout["ways"][name]


def test_attention_that_differs_is_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: attention_ways.Rows) -> attention_ways.Call:
        return lambda: attention_ways.plain(rows)() + 1

    monkeypatch.setattr(kernels, "WAYS", {"cacheblend": wrong, "FlexAttention": wrong})
    found = kernels.measure(bench())
    assert "attention of scattered: differs from PyTorch by 1" in found["error"]
    assert set(found["figures"]) == {"place_of_bandwidth"}


# ---- the first token --------------------------------------------------------------------------------------


def test_points_keep_their_rounds_and_take_as_long_as_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # A point that is short of time keeps its rounds
    monkeypatch.setattr(ttft, "timed", lambda arm, prompt, model: (1.0, None))
    tried = bench()
    monkeypatch.setattr(context.Bench, "left_s", property(lambda self: -1.0))
    monkeypatch.setattr(context.Bench, "has_time", lambda self, what, seconds: True)
    found = ttft._measure((ttft.Point("tiny", "", 1, 16, 5, 1.0),), tried)
    assert {arm["runs"] for arm in found["points"][0]["arms"]} == {1}
    assert tried.skipped["ttft tiny, 16 tokens, rounds"] == "time was up after 1 of 5"
    # Points are expected to take as long as those before
    asked: list[float] = []
    monkeypatch.setattr(context.Bench, "has_time", lambda self, what, seconds: asked.append(seconds) or True)
    monkeypatch.setattr(ttft, "_measure_point", lambda *_: [])
    clock = iter([0.0, 30.0, 30.0, 40.0])
    monkeypatch.setattr(ttft, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # not that of other threads
    ttft._measure(tuple(ttft.Point("tiny", "", 1, 16, 5, seconds) for seconds in (10.0, 20.0)), bench())
    assert asked == [5.0, 5.0, 0.5 * 3 * 20.0]


# ---- time, and the device ---------------------------------------------------------------------------------


def test_what_there_is_no_time_for_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # What there is no time for is skipped and said
    found = run.run(("kernels", "ttft"), dry_run=True, minutes=0.001)
    assert set(found["skipped"]) == {"kernels", "ttft"} and "were left" in found["skipped"]["ttft"]
    assert not found["figures"] and not found["parts"]
    late = bench(until=0.0)
    assert ttft.measure(late) == {"figures": {}, "points": []}
    assert list(late.skipped) == ["ttft tiny"]
    # Later parts keep the time that they need at least
    monkeypatch.setattr(run, "PARTS", {name: replace(part, missing=lambda: "") for name, part in run.PARTS.items()})
    running = run.Run(1000.0, False, print, print)
    names = list(run.PARTS)
    until = {name: running.task(name, names[place + 1 :]).until for place, name in enumerate(names)}
    assert until["vllm"] == 1000
    kept = sum(run.PARTS[name].least + run.GRACE_S for name in ("profile", "tiles", "vllm"))
    assert until["timeline"] == 1000 - kept == until["ttft"] + 20 + run.GRACE_S


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
    copied = [("read", 0, 50), ("copy", 100, 300), ("compute", 300, 310)]
    assert lanes == [*copied, ("place", 300, 400), ("compute", 350, 500)]


def test_the_profilers_events_are_summed_by_kernel() -> None:
    def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)

    events = [
        *(event("gemm", start, start + 10) for start in (100, 105, 150)),
        event("_attend", 160, 190),
        event("aten::mm", 0, 500, "DeviceType.CPU"),
    ]
    found = profile.summary(events, is_cuda=True)
    assert found["launches"] == 4 and found["device_s"] == pytest.approx(9e-5)
    assert found["idle"] == pytest.approx(1 - 55 / 90)  # two overlap
    assert [(name, count, round(1e6 * taken)) for name, count, taken in found["kernels"]] == [
        *(("gemm", 3, 30), ("_attend", 1, 30))
    ]
    assert profile.summary(events, is_cuda=False)["kernels"][0][:2] == ["aten::mm", 1]
    assert profile.summary([], is_cuda=True)["launches"] == 0


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ttft.build_shape

    def build(shape: str, **options: Any) -> Any:
        if shape == "huge":
            raise torch.OutOfMemoryError("no")
        return real(shape, **options)

    monkeypatch.setattr(ttft, "build_shape", build)
    tried = bench()
    assert ttft._measure((ttft.Point("huge", "", 1, 8, 1, 0.0),), tried)["points"] == []
    assert tried.skipped == {"ttft huge": "its weights do not fit on this device"}

    def full(engine: Any, prompt: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(ttft, "full_recompute", full)
    found = ttft._measure((ttft.Point("tiny", "4k", 1, 16, 1, 0.0),), tried)
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
    found = ttft._measure(points, bench(keep=kept.append))
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

    parts = {"a": fails, "b": fits_not, "c": lambda _: {"figures": {"attention_of_flash": 0.5}}}
    monkeypatch.setattr(run, "PARTS", {name: Part(each, 1.0) for name, each in parts.items()})
    done = command("--dry-run", "--folder", tmp_path)
    assert done.code == 1 and "FAILED: a" in done.err and "ptxas died" in done.err
    found = json.loads((tmp_path / "cuda-cpu.json").read_text())
    assert found["figures"] == {"place_of_bandwidth": 0.7, "attention_of_flash": 0.5}
    assert "ptxas died" in found["parts"]["a"]["error"] and "out of memory" in found["skipped"]["b"]
    assert "## a failed" in (tmp_path / "cuda-cpu.md").read_text()


def test_tests_that_fail_are_said_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests that fail are said and the rest is measured
    case = '<testcase classname="tests.gpu.test_kernels" name="test_{}">{}</testcase>'

    def writing(code: int, said: str, *inside: str) -> Any:
        def program(command: list[str], limit_s: float, folder: Path) -> Any:
            (report,) = [word.partition("=")[2] for word in command if word.startswith("--junitxml=")]
            cases = "".join(case.format(number, each) for number, each in enumerate(inside))
            Path(report).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
            return subprocess.CompletedProcess(command, code, said)

        return program

    monkeypatch.setattr(others, "run_program", writing(1, "E   assert 1 == 2", "", "<failure/>", "<error/>"))
    monkeypatch.setitem(run.PARTS, "kernels", Part(lambda _: {"figures": {"attention_of_flash": 0.5}}, 1.0))  # type: ignore[index]
    found = run.run(("tests", "kernels"), dry_run=True)
    tests = found["parts"]["tests"]
    assert tests["names"] == [f"tests.gpu.test_kernels::test_{number}" for number in (1, 2)]
    assert (tests["passed"], tests["failed"], tests["errors"]) == (1, 1, 1)
    assert "assert 1 == 2" in report.failures(found)["tests"]
    assert found["figures"] == {"attention_of_flash": 0.5}
    assert "TESTS FAIL" in report.title(found | {"dry_run": False})
    # Tests that pass are no error
    monkeypatch.setattr(others, "run_program", writing(0, "", "", "<skipped/>"))
    found = run.run(("tests",), dry_run=True)
    counts = {key: found["parts"]["tests"][key] for key in others.OUTCOMES}
    assert counts == {"passed": 1, "failed": 0, "errors": 0, "skipped": 1} and not report.failures(found)
    assert "1 passed, 0 failed, 0 errors, 1 skipped" in report.page(found)


# ---- processes --------------------------------------------------------------------------------------------


def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> dict[str, Any]:
    """The parts kernels and timeline in their own processes, in which `code` replaces what measures the kernels."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'lab.gpu.run' in sys.orig_argv:\n"
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
def test_a_process_that_crashes_or_hangs_takes_nothing_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = apart(tmp_path, monkeypatch, "print('here', flush=True); os.abort()")
    assert found["figures"] == {"place_of_bandwidth": 0.7} and "busy" in found["parts"]["timeline"]
    assert "its process ended with -6\n" in found["parts"]["kernels"]["error"]
    assert "here" in found["parts"]["kernels"]["error"]
    # One that hangs is ended
    monkeypatch.setattr(run, "GRACE_S", 0.1)
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
