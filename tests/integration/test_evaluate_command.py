"""`cacheblend evaluate` on a tiny model: what it prints and writes, and what it says of mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cacheblend.cli import models
from cacheblend.data.split import split_text
from cacheblend.engines.hf import BlendEngine
from command_line import Run, runner
from evaluation_rows import PASSAGES, ROWS, engine, model

__all__ = ["engine", "model"]  # fixtures


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `evaluate` in this process, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return runner(capsys, "evaluate")


def write_rows(file: Path, **fields: Any) -> Path:
    rows = [
        {
            "question": row.question,
            "passages": [{"text": text.text} for text in row.passages],
            "answers": list(row.answers),
            "category": row.category,
            **fields,
        }
        for row in ROWS
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_the_command_reports_tables_json_and_plots(run: Run, model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    arguments = ["-m", model, "-d", data, "-n", 3, "--ratio", 0.1, "--ratio", 0.5, "--selector", "hkvd"]
    arguments += ["--selector", "profile", "--scorer", "em", "--scorer", "rouge-l", "--device", "cpu"]
    result = run(*arguments, "--json-file", tmp_path / "all.json")
    assert result.code == 0, result.err
    for part in ("Exact match", "ROUGE-L", "blend hkvd gradual r=0.5", "blend profile", "minus full", "1st token"):
        assert part in result.out
    assert "tiny-llama has no chat template: plain prompts" in result.err
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["rows"] == len(written["cells"]) == 4
    assert {"machine", "versions", "commit"} < written.keys()
    assert [method["method"] for method in written["methods"]][:3] == ["full", "prefix", "reuse"]
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith("tiny-llama-rows-")
    assert {file.name for file in folder.iterdir()} >= {"config.json", "rows.jsonl", "summary.json", "em-ttft.png"}
    again = run(*arguments, "--json")
    assert "4 of 4 rows were there already" in again.err
    assert json.loads(again.out)["cells"] == written["cells"]


def test_help_names_every_group_of_options(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for part in ("Model", "Prompt", "Methods", "Scores", "Output", "--check-layers"):
        assert part in result.out


def test_longbench_contexts_are_split(run: Run, model: Path, engine: BlendEngine, tmp_path: Path) -> None:
    context = " ".join(PASSAGES)
    (tmp_path / "lb.jsonl").write_text(json.dumps({"input": "When?", "context": context, "answers": ["1871"]}))
    result = run(
        *("-m", model, "-d", "lb.jsonl", "--chunk-tokens", 24, "-n", 1, "--methods", "full,reuse"),
        *("--json", "--device", "cpu"),
    )
    cells = json.loads(result.out)["cells"][0]["cells"]
    builder = engine.builder
    assert builder is not None
    assert cells[0]["chunks"] == len(split_text(context, lambda text: len(builder.encode(text)), 24)) > 4
    assert cells[1]["missed_tokens"] == 0


def test_rows_without_gold_answers_are_still_compared(run: Run, model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", answers=[])
    result = run("-m", model, "-d", data, "-n", 1, "--limit", 2, "--device", "cpu")
    assert result.code == 0
    assert "no row has gold answers, so there are no scores" in " ".join(result.err.split())
    assert "Agreement with full recompute" in result.out and "Exact match" not in result.out


@pytest.mark.parametrize("option", [("--check-layers", "3"), ("--out", "rows.jsonl")])
def test_what_the_config_tells_is_said_before_the_model_is_opened(
    run: Run, model: Path, tmp_path: Path, option: tuple[str, str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")  # without weights it cannot be opened
    result = run("-m", tmp_path / "bare", "-d", data, *option)
    assert result.code == 2
    assert "check layer 3 does not exist" in result.err or "is a file" in result.err


def test_the_model_that_ships_is_called_nano(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shutil.copytree(model, tmp_path / "package" / "model")
    monkeypatch.setattr("cacheblend.engines.folders._shipped_folder", shipped.resolve)
    data = write_rows(tmp_path / "rows.jsonl")
    result = run(
        "-m", "nano", "-d", data, "-n", 1, "--limit", 1, "--methods", "full", "--device", "cpu", "--scorer", "em"
    )
    assert result.code == 0, result.err
    assert "Exact match, %, nano" in result.out
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith("nano-rows-")
    assert models.model_name(shipped) == "nano"
    assert models.model_name(model) == "tiny-llama"


def test_a_wrong_file_is_said_before_the_model_is_opened(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "passages": []}')
    result = run("-m", tmp_path / "no-model", "-d", tmp_path / "rows.jsonl")
    assert result.code == 2
    assert "rows.jsonl, line 1, field 'passages': it is empty" in result.err
