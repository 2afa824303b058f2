"""`lab serve`: what it writes, not how fast anything is."""

import json
from pathlib import Path

import pytest

from command_line import Run, runner
from lab.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, main=main)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_agent_of_three_arms(run: Run, tmp_path: Path) -> None:
    data, out, picture = tmp_path / "passages.json", tmp_path / "agent.json", tmp_path / "agent.png"
    data.write_text(json.dumps([{"text": f"The mill number {n} stood by river {n * n}. " * 9} for n in range(9)]))
    size = ("--sessions", 2, "--turns", 4, "--results", 5, "--result-tokens", 80, "--kept", 4, "--first-reads", 3)
    how = ("--reorder", 0, "--pause", 0.5, "--json-file", out, "--plot", picture)
    done = run("agent", "-m", "nano", "--data", data, *size, *how)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert picture.stat().st_size > 0
    assert {"agent_gain", "agent_gain_marked"} <= set(result["figures"])
    arms = result["requests"]
    asked = [[(each["session"], each["turn"]) for each in requests] for requests in arms.values()]
    assert len(arms) == 3 and asked[0] == asked[1] == asked[2] and len(asked[0]) == 8
    lengths = [[each["prompt_tokens"] for each in requests] for requests in arms.values()]
    for one, other in zip(lengths[0], lengths[2], strict=True):
        assert abs(one - other) <= 8, "equal requests; chunks are tokenised apart from their neighbours"
    loaded = {arm: [sum(each["hit_tokens"].values()) for each in requests] for arm, requests in arms.items()}
    assert loaded["prefix caching"][1] > 200, "the second turn begins as the first"
    assert sum(loaded["marked"]) > 0 and max(loaded["discovered"][4:]) > 80, "the second session reads again"
    assert result["settings"]["pause_s"] == 0.5 and result["settings"]["sizes"]["sessions"] == 2
