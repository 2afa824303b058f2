"""The command line's benchmark of first tokens, and its demo: what they print, draw and leave behind."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from cacheblend.bench.ttft import table
from cli_passages import run
from command_line import Run
from lab.nano.data import record, write
from lab.nano.scenes import Style

__all__ = ["run"]  # a fixture


def test_bench_ttft(run: Run, tmp_path: Path) -> None:
    command = ("bench", "ttft", "--shape", "tiny", "--chunks", 2, "--chunk-tokens", 16, "--question-tokens", 4)
    result = run(*command, "--runs", 1, "--ratio", 0.5, "--ratio", 0.1, "--json-file", tmp_path / "r.json")
    assert result.code == 0
    arms = json.loads((tmp_path / "r.json").read_text())["arms"]
    assert [(arm["arm"], arm["ratio"]) for arm in arms if arm["arm"] == "blend"] == [("blend", 0.5), ("blend", 0.1)]
    assert "blend" in result.out


TINY = ("bench", "ttft", "--shape", "tiny", "--chunks", 2, "--chunk-tokens", 8, "--question-tokens", 2, "--runs", 1)


def test_a_sweep_is_drawn(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cacheblend.bench.ttft.SWEEPS", {"chunks": (1, 2), "ratio": (0.1, 0.9)})
    few = (*TINY, "--arms", "full,blend")
    result = run(*few, "--sweep", "chunks")
    assert "the curves are in bench-ttft-chunks.png" in result.err
    assert Path("bench-ttft-chunks.png").stat().st_size > 1000
    assert "1 x 8" in result.out
    assert "2 x 8" in result.out
    found = run(*few, "--sweep", "ratio", "-r", 0, "-r", 0.5, "-r", 1, "--plot", "x.svg", "--json")
    assert [arm["ratio"] for arm in found.json["arms"] if arm["arm"] == "blend"] == [0, 0.5, 1]
    assert "<svg" in Path("x.svg").read_text()
    found = run(*few, "--sweep", "ratio", "-r", 0.3, "--json")
    assert [arm["ratio"] for arm in found.json["arms"] if arm["arm"] == "blend"] == [0.1, 0.9]


def test_a_sweep_without_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cacheblend.bench.ttft.SWEEPS", {"chunks": (1,)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*TINY, "--arms", "full", "--sweep", "chunks")
    assert result.code == 0
    assert "pip install 'cacheblend[plot]'" in result.err
    assert "1 x 8" in result.out
    assert not list(tmp_path.iterdir())


def test_every_point_of_a_sweep_is_checked_before_one_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.bench.ttft.SWEEPS", {"chunk-tokens": (8, 40_000)})
    monkeypatch.setattr("cacheblend.bench.ttft._measure", lambda *_: pytest.fail("measured"))
    result = run(*TINY, "--sweep", "chunk-tokens")
    assert result.code == 2
    assert "80034 tokens" in result.err
    assert "32768" in result.err


@pytest.mark.parametrize("seconds", [0.0123, 9.9996, 12.3456, 99.999, 1234.56])
def test_the_bench_table_fits_80_columns(seconds: float) -> None:
    arms = [
        {"arm": name, "ratio": 0.123457 if name == "blend" else None, "store": "memory", "speedup_vs_full": 123.456}
        | {"ttft_s": {"median": seconds, "min": seconds, "max": seconds}, "load_s": seconds}
        | {"loaded_tokens": 131072, "recomputed_tokens": 131072}
        for name in ("full", "prefix", "reuse", "blend", "miss")
    ]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(table({"model": "m [/b] [i]", "prompt": {"chunks": 1024, "chunk_tokens": 131072}, "arms": arms}))
    text = console.export_text()
    assert "…" not in text
    assert "m [/b] [i]" in text
    assert re.search("TTFT, s +min +max +gain +load, s +loaded +again", text)
    assert re.search(r"blend 0.123457 +memory .* 123\.46 .* 131072 +131072", text)
    assert "again: recomputed" in text


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A demo of few and short passages, in a folder of its own."""
    file = tmp_path / "demo.jsonl"
    write(file, [record(1, 2, 0, Style(3, 60, dense=1.0, hard=0.4, chains=0.9))])
    monkeypatch.setattr("cacheblend.evaluation.demo.DATA", file)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.usefixtures("small_demo")
def test_demo(run: Run) -> None:
    pytest.importorskip("matplotlib")
    shown = run("demo", "--questions", 1, "--keep", "kept", "--plot", "a.svg")
    assert shown.code == 0
    for text in (
        "full recompute",
        "prefix caching",
        "full reuse",
        "HKVD, gradual, r = 0.15",
        "/7 ",
        "r = 1 is full prefill",
    ):
        assert text in shown.out
    assert "<svg" in Path("a.svg").read_text()
    assert run("store", "stat", "kept/store", "--json").json["chunks"] == 3
    rows = [json.loads(line) for line in Path("kept/questions.jsonl").read_text().splitlines()]
    assert len(rows) == 7
    asked = next(line for line in shown.out.splitlines() if line.startswith("  cacheblend ask "))
    again = run(*shlex.split(asked)[1:], "--json").json
    assert again["report"]["hit_tokens"]["disk"] > 100
    assert again["report"]["missed_tokens"] == 0


@pytest.mark.usefixtures("small_demo")
def test_demo_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("demo", "-n", 1, "--ratio", 0.4, "--json")
    found = result.json
    assert "pip install 'cacheblend[plot]'" in result.err
    assert found["plot"] is None
    assert not list(Path().iterdir())
    assert all(invariant["holds"] for invariant in found["invariants"])
    assert [method["kind"] for method in found["methods"]][:3] == ["full", "prefix", "reuse"]
    hkvd = found["methods"][-1]
    assert hkvd["title"] == "HKVD, one check, r = 0.4"
    assert 0.35 < hkvd["recomputed"] < 0.45
    for number, method in enumerate(found["methods"]):  # its figures are those of its answers
        cells = [(row["category"], row["cells"][number], row["answers"]) for row in found["evaluation"]["cells"]]
        right = {category: [cell["answer"] in answers] for category, cell, answers in cells}
        assert method["right"] == right
    assert len(found["passages"]) == 3
    assert sorted(found["questions"][0]["order"]) == [1, 2, 3]
    assert run("demo", "-n", 1, "--ratio", 0.4, "--json").json["questions"] == found["questions"]


@pytest.mark.usefixtures("small_demo")
def test_a_slow_demo_asks_one_question_of_each_category(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.evaluation.demo.BUDGET_S", 0.0)
    shown = run("demo", "-n", 2)
    assert shown.code == 0
    assert "asked 7 of 14 questions" in shown.err
    assert "/7 " in shown.out
    assert "3. 7 questions" in shown.out
