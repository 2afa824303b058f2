"""The profile's way from `doctor --quality` to the answers, on tiny models with random weights."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.profile import Profile
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.evaluation import gate
from command_line import Run, runner
from gate_rows import WORDS, built, passages, surroundings

__all__ = ["built", "surroundings"]  # fixtures

GATE = ("--threshold", 0.6, "--max-tokens", 3)


@pytest.fixture
def model(built: Path, tmp_path: Path) -> Path:
    """A copy that may get a profile."""
    return shutil.copytree(built, tmp_path / "tiny-llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    lines = [
        {"question": f"Which {WORDS[i]}?", "passages": [{"text": t} for t in passages(i)], "answers": [WORDS[i]]}
        for i in range(14)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys)


def test_from_the_gate_to_an_answer(run: Run, model: Path, data: Path) -> None:
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "--ratio", 1, "--json")
    result = run(*command)
    found = result.json
    assert (result.code, result.err, found["verdict"]) == (0, "", "passed")
    assert found["profile"] == str(model / PROFILE_NAME)
    assert found["chosen"]["settings"] == {"selector": "hkvd", "recompute_ratio": 1.0, "check_layers": [1]}
    assert (found["rows"].pop("search"), found["rows"].pop("confirmation"), found["passage_sets"]) == (7, 7, 14)
    assert set(found["rows"].values()) == {0}
    assert found["chosen"]["measured"]["f1_rows"] == 7

    profile = read_profile(model / PROFILE_NAME)
    assert profile.measured.data == data.name
    assert (profile.measured.rows, profile.measured.threshold, profile.measured.agreement) == (7, 0.6, 1.0)
    ask = ("ask", "-m", model, "-s", "memory", "-p", WORDS[0], "-p", WORDS[1], "-q", "Which?", "-n", 2, "--json")
    assert run(*ask).json["settings"]["recompute_ratio"] == 1.0
    assert str(model / PROFILE_NAME) in run(*ask).json["settings"]["source"]
    by_hand = run(*ask, "--ratio", 0.2).json["settings"]
    assert by_hand == {"source": "given by the caller", "selector": "hkvd", "recompute_ratio": 0.2}
    with BlendEngine.from_pretrained(model) as opened:
        assert opened.config == BlendConfig(recompute_ratio=1.0, check_layers=(1,)).on("cpu")
        assert opened.settings.profile == profile
    with BlendEngine.from_pretrained(model, config=BlendConfig(selector="none")) as opened:
        assert opened.config.selector == "none"
    shown = "".join(run("doctor", "-m", model).out.split())
    assert f"profile{model / PROFILE_NAME}" in shown and "profiletheprofile" not in shown


def test_a_model_that_no_setting_passes_on_is_not_blended(
    run: Run, model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "none", "--selector", "hkvd")
    found = run(*command, "-r", 0.05)
    assert found.code == 1
    assert "no setting was shown to hold 60 %" in found.out
    assert "profile written" in found.out
    assert read_profile(model / PROFILE_NAME).blend is False

    store = tmp_path / "store"
    ask = ("ask", "-m", model, "-s", store, "-p", "A lamp and a rope.", "-p", "Salt.", "-q", "Which?", "-n", 2)
    run(*ask)
    caplog.clear()
    answered = run(*ask, "--json").json
    report = answered["report"]
    loaded = report["hit_tokens"]["memory"] + report["hit_tokens"]["disk"]
    assert report["recomputed_tokens"] == loaded > 0, "everything but the exact prefix"
    assert answered["settings"]["selector"] == "all"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "nothing is blended" in run(*ask).err
    assert "nothing is blended" in " ".join(run("doctor", "-m", model).out.split())
    told = run(*ask, "--ratio", 0, "--json").json
    assert told["report"]["recomputed_tokens"] == 0
    with BlendEngine.from_pretrained(model, store=store) as opened:
        prompt = opened.prompt(["Look. ", Passage("A lamp and a rope."), Passage("Salt."), " Which?"])
        assert opened.prefill(prompt).report.recomputed_tokens > 0
        assert opened.prefill(prompt, ratio=0.0).report.recomputed_tokens == 0


def test_a_dry_run_writes_nothing(run: Run, model: Path, data: Path) -> None:
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "all", "--dry-run")
    shown = run(*command)
    assert shown.code == 0
    assert "--dry-run" in shown.out
    assert run(*command, "--json").json["profile"] is None
    assert not (model / PROFILE_NAME).exists()


def test_too_few_rows_leave_the_profile_alone(run: Run, model: Path, data: Path) -> None:
    (model / PROFILE_NAME).write_text("{")
    shown = run("doctor", "--quality", "-m", model, "-d", data, "--selector", "all", "--max-tokens", 1)
    assert shown.code == 1
    assert "too few rows to decide: 14 rows" in shown.out
    assert "598" in shown.out
    assert (model / PROFILE_NAME).read_text() == "{"


def test_a_folder_that_cannot_be_written_to(
    run: Run, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> int:
        if self.parent == model:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *arguments, **options)

    original = Path.write_text
    monkeypatch.setattr(Path, "write_text", refuse)  # whoever runs the tests may write anywhere
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "--ratio", 1)
    refused = run(*command)
    assert refused.code == 2
    assert "--profile FILE" in refused.err
    elsewhere = tmp_path / "mine.json"
    assert run(*command, "--profile", elsewhere).code == 0
    assert isinstance(read_profile(elsewhere), Profile)
    ask = (
        "ask",
        "-m",
        model,
        "-s",
        "memory",
        "-p",
        "A lamp.",
        "-q",
        "Which?",
        "-n",
        1,
        "--json",
        "--profile",
        elsewhere,
    )
    assert str(elsewhere) in run(*ask).json["settings"]["source"]
    assert "would not be used" in run(*ask, "--ratio", 0.5).json["error"]


def test_a_profile_of_other_weights_and_a_damaged_one(
    run: Run, model: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "--ratio", 1)
    assert run(*gate).code == 0
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    caplog.clear()
    with BlendEngine.from_pretrained(model) as opened:
        assert opened.config == BlendConfig().on("cpu")
    assert "other weights" in caplog.text
    assert "other weights" in " ".join(run("doctor", "-m", model).out.split())

    (model / PROFILE_NAME).write_text('{"format": 1}')
    with pytest.raises(InvalidInputError, match=r"blend-profile\.json, field 'blend': it is missing"):
        BlendEngine.from_pretrained(model)
    refused = run("doctor", "-m", model, "--json")
    assert (refused.code, refused.json["blendable"]) == (1, False)
    assert run(*gate).code == 0, "measuring anew is the way out"
    assert BlendEngine.from_pretrained(model).config.recompute_ratio == 1.0


def test_the_model_that_ships_is_examined_by_name(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.engines.folders._shipped_folder", model.resolve)
    found = run("doctor", "-m", "nano", "--json").json
    assert (found["model"], found["blendable"]) == ("nano", True)


def test_a_setting_that_is_no_faster_is_said_to_be_that(
    run: Run, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any, **options: Any) -> Any:
        sample, report = original(*arguments, **options)
        return gate.Sample(**{**vars(sample), "ttft_s": 2.0, "full_ttft_s": 1.0}), report

    original = gate.compare
    monkeypatch.setattr(gate, "compare", slow)
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "all", "--dry-run")
    shown = run(*command, "--anchor", "none", "--no-chat")
    assert shown.code == 0
    assert "not faster than full recompute (0.50 x its speed" in shown.out
    assert "7 confirmed rows have gold answers: the F1 bound decides with them" in shown.out
