"""`bench serve`: what it writes, not how fast anything is."""

import json
from pathlib import Path

import pytest

from command_line import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "bench")


def test_serve_writes_its_figures(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    done = run("serve", "-m", "nano", "--chunks", 3, "--chunk-tokens", 70, "--runs", 1, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert set(result["figures"]) == {"ttft_speedup", "overhead_ms"}
    assert len(result["ttft"]["ttft_s"]["blend"]) == len(result["ttft"]["ttft_s"]["full"]) == 1
    assert result["model"].endswith("model")


def test_what_cannot_be_measured(run: Run, tmp_path: Path) -> None:
    assert "exclude each other" in run("serve", "-m", "nano", "--shape", "tiny").err
    assert run("serve", "-m", "nano", "--trace", tmp_path).code == 2


def test_the_cost_of_the_shadow_check(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    size = ("--chunks", 2, "--chunk-tokens", 70, "--runs", 2, "--requests", 4, "--clients", 2)
    done = run("serve", "-m", "nano", *size, "--shadow", 1.0, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    found = result["shadow"]
    assert result["figures"]["shadow_overhead"] == found["overhead"] < 1
    assert len(found["by_round"]) == 2 and {len(rates) for rates in found["requests_per_s"].values()} == {2}
    counted = {name.split("{")[0]: value for name, value in found["metrics"].items()}
    assert counted["cacheblend_shadow_waiting"] == 0 and counted["cacheblend_shadow_total"] > 0
