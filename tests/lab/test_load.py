"""`lab load`, `lab controller` and `lab evict`: what they write, not how fast anything is."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from cacheblend.bench import ttft
from command_line import Run, runner
from lab.cli import main
from redis_server import needs_redis, redis_server


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, main=main)


TINY = ("--shape", "tiny", "--chunk-tokens", 64, "--runs", 1)


@needs_redis
def test_load_writes_every_figure(run: Run, tmp_path: Path) -> None:
    with redis_server() as server:
        out = tmp_path / "load.json"
        options = ("--chunks", 3, "--folder", tmp_path, "--redis", server.url, "--json-file", out)
        done = run("load", *TINY, *options)
    assert done.code == 0, done.err
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {
        "pipelined_over_max",
        "serial_over_max",
        "disk_read_share",
        "cold_read_share",
        "direct_read_share",
        "warm_of_kept",
        "cold_of_kept",
        "direct_of_kept",
        "redis_read_share",
        "int8_bytes",
        "fp8_bytes",
        "int4_bytes",
    }
    assert figures["int8_bytes"] <= 0.53 and figures["int4_bytes"] <= 0.3
    for way in ("disk, warm", "disk, cold", "redis"):
        assert f"{way}: " in done.err + done.out
    assert list(tmp_path.iterdir()) == [out]  # nothing is left on the disk


@pytest.mark.slow
def test_controller_writes_a_grid(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A device is throttled to ten times a prefill's time: where bfloat16 is emulated, that takes minutes.
    monkeypatch.setattr(ttft, "build_shape", partial(ttft.build_shape, dtype=torch.float32))
    out = tmp_path / "controller.json"
    done = run("controller", *TINY, "--chunk-tokens", 16, "--chunks", 2, "--chunks", 5, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert len(result["cells"]) == 20
    assert set(result["figures"]) == {"controller_worst", "slow_device_over_full"}
    assert all(cell["reason"] for cell in result["cells"])
    assert [cell["load_over_prefill"] for cell in result["cells"][::2]] == [0.1, 0.3, 1.0, 3.0, 10.0] * 2
    assert [cell["behind_memory"] for cell in result["cells"]] == [False, True] * 10
    arms = [set(cell["seconds"]) for cell in result["cells"][:2]]
    assert arms[0] < arms[1] and any(name.startswith("memory") for name in arms[1] - arms[0])


def test_what_cannot_be_measured(run: Run, tmp_path: Path) -> None:
    assert "size" in run("evict", "--trace", tmp_path, "--size", 2).err
    assert "name a model folder with --model, or a shape with --shape" in run("load").err


def test_store_writes_every_figure_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "store.json"
    done = run("store", "--blocks", 200, "--folder", tmp_path, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert set(result["figures"]) == {"lookup_us", "open_s", "bytes_per_block"}
    assert len(result["first_s"]) == len(result["again_s"]) == 200
    assert list(tmp_path.iterdir()) == [out]
