"""`lab codecs`, `lab random-shapes` and `lab core`: what they write, not how good anything is."""

import json
from pathlib import Path

import pytest

from cacheblend.bench import ttft
from cacheblend.core.plan.codec import CODECS
from command_line import Run, runner
from lab.cli import main
from lab.speed import core, memory, plan


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, main=main)


def test_codecs_are_compared_on_the_model_that_ships(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "codecs.json"
    done = run("codecs", "--limit", 1, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert [(line["how"], line["codec"]) for line in result["arms"]] == [
        (how, codec) for how in ("blend", "reuse") for codec in CODECS
    ]
    assert result["arms"][0]["same_answer"] == 100
    assert set(result["figures"]) == {f"{codec}_top_1" for codec in CODECS if codec != "raw"}
    assert {"machine", "versions", "commit"} < result.keys()
    assert "1 questions; full recompute is right" in done.out


def test_random_shapes_measure_every_selector(run: Run) -> None:
    options = ("--prompts", 1, "--chunks", 2, "--chunk-tokens", 16, "--plain-tokens", 4, "--question-tokens", 4)
    result = run("random-shapes", *options, "--json").json
    arms = {arm["arm"]: arm for arm in result["arms"]}
    assert {"reuse", "blend all"} < set(arms) and len(arms) == 8
    assert arms["blend all"]["deviation"]["kv"]["over_layers"]["mean"] < 1e-4
    assert "random tokens refer" in result["caveat"]
    assert "Random weights and ids" in run("random-shapes", *options).out


def test_core_holds_every_figure_to_its_bar(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(settings: ttft.TtftSettings) -> dict[str, object]:
        found = [{"arm": "full", "ratio": None, "store": None}, {"arm": "miss", "ratio": None, "store": None}]
        found += [{"arm": "blend", "ratio": r, "store": s} for r in settings.ratios for s in ("memory", "disk")]
        seconds = {"full": 6.0, "miss": 7.0, "blend": 1.0}
        return {"arms": [a | {"ttft_s": {"median": seconds[str(a["arm"])]}, "speedup_vs_full": 6.0} for a in found]}

    monkeypatch.setattr(ttft, "run", arms)
    monkeypatch.setattr(plan, "run", lambda **_: {"plan_s": {"median": 0.01}})
    monkeypatch.setattr(memory, "run", lambda _: {"excess_over_kv": 2.0})
    steps: list[tuple[int, int]] = []
    result = core.run(ttft.TtftSettings(shape="tiny"), lambda *step: steps.append(step))
    assert steps == [(n, core.PARTS) for n in range(1, core.PARTS + 1)]
    reached = {figure["what"]: figure["reached"] for figure in result["figures"]}
    assert reached["full / blend, r = 0.15"] and not reached["full / blend, r = 0.05"]
    assert not reached["all miss / full"] and not reached["(peak of blend - peak of full) / KV cache"]
    shown = run("core", "--shape", "tiny")
    assert shown.code == 0 and "NO" in shown.out and "6/6" in shown.err
