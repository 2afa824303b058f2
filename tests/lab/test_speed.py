"""What measures prefills and stores: what is written, not how good or fast anything is."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from cacheblend.bench import ttft
from cacheblend.core.plan.codec import CODECS
from cacheblend.nano import model_path
from command_line import Run, runner
from lab.cli import main
from lab.speed import core, memory, plan
from random_words import text_of
from redis_server import needs_redis, redis_server


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


def test_sync_counts_what_is_computed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "passages.txt"
    data.write_text("\n\n".join(text_of(seed, 12) for seed in range(80)))
    bench = runner(capsys, "sync", "--model", str(model_path()), "--data", str(data), "--json", main=main)
    found = bench("--documents", 9, "--tokens", 400, "--chunk-tokens", 64, "--json-file", tmp_path / "out.json").json
    assert 0 < found["figures"]["sync_recomputed"] < 0.6
    assert found["without_edits"]["computed_tokens"] == 0 and len(found["by_edit"]) == 9
    assert json.loads((tmp_path / "out.json").read_text())["figures"] == found["figures"]
    assert "9 are needed" not in bench("--documents", 2, "--tokens", 50).out
    assert "documents of 400 tokens, 900 are needed" in bench("--documents", 900, "--tokens", 400).json["error"]
