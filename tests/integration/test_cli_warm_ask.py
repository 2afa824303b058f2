"""The command line's help, `warm`, `ask` and `doctor` on a tiny model in a folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend.cli import main
from cli_passages import PASSAGES, data, model, run, store
from command_line import Run

__all__ = ["data", "model", "run", "store"]  # fixtures

ROOT = Path(__file__).parents[2]


# ---- help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["cacheblend", "lab"])
def test_help_is_quick_and_imports_nothing_heavy(program: str) -> None:
    code = (
        "import sys, time\n"
        f"from {program}.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(time.process_time(), sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    cpu_seconds, heavy = done.stdout.splitlines()[-1].split(" ", 1)
    assert heavy == "[]"
    assert float(cpu_seconds) < 0.6  # 0.15 on an idle machine


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("cacheblend 0.")


@pytest.mark.parametrize("arguments", [[], ["store"], ["bench"], ["keys"]])
def test_a_group_without_a_command_shows_its_help_and_is_no_success(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "Usage" in capsys.readouterr().out


# ---- warm, ask --------------------------------------------------------------------------------------------


def test_warm_stores_each_passage_once(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    command = ("warm", "--model", model, "--store", tmp_path / "s", "--data", data, "--json")
    first, second = run(*command), run(*command)
    assert first.err == ""
    assert (first.json["stored"], first.json["held"]) == (3, 0)
    assert (second.json["stored"], second.json["held"]) == (0, 3)
    assert first.json["store_bytes"] == second.json["store_bytes"] > 0


def test_warm_and_store_use_what_is_behind_the_memory(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    """The URL is a server's own: what stood in its memory would be lost with the command."""
    url = f"memory://?max_bytes=1GiB, file://{tmp_path}/s"
    warmed = run("warm", "--model", model, "--store", url, "--data", data, "--json").json
    assert warmed["stored"] == warmed["passages"] > 0 and warmed["store"] == f"file://{tmp_path}/s"
    assert run("store", "stat", url, "--json").json == run("store", "stat", tmp_path / "s", "--json").json
    again = run("warm", "--model", model, "--store", tmp_path / "s", "--data", data, "--json").json
    assert (again["stored"], again["held"]) == (0, warmed["passages"])


def test_warm_takes_several_files_and_a_limit(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("One more.\n\nAnd one more.\n")
    command = ("warm", "-m", model, "-s", tmp_path / "s", "-d", data, "-d", tmp_path / "more.txt", "--json")
    assert run(*command, "--limit", 4).json["passages"] == 4


def test_warm_shows_its_progress_on_stderr(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    command = ("warm", "-m", model, "-s", tmp_path / "s", "-d", data)
    for stored in (3, 0):  # the second time all are held
        result = run(*command)
        assert "3/3" in result.err
        assert f"{stored} passages stored" in result.out


def test_ask_answers_from_the_store(run: Run, model: Path, data: Path, store: Path) -> None:
    found = run("ask", "-m", model, "-s", store, "-d", data, "-n", 4, "--json").json
    assert len(found["token_ids"]) <= 4
    report = found["report"]
    assert report["missed_tokens"] == 0
    assert report["loaded_tokens"] > 0.7 * report["prompt_tokens"]
    loaded = report["hit_tokens"]["disk"]
    assert 0 < report["recomputed_tokens"] < 0.15 * loaded, "after the last check: the mean over the layers is r"


def test_ask_stores_what_it_missed(run: Run, model: Path, store: Path) -> None:
    command = ("ask", "-m", model, "-s", store, "-p", PASSAGES[1], "-p", "Nobody has seen this one.", "-q", "Why?")
    reports = [run(*command, "-n", 1, "--json").json["report"] for _ in range(2)]
    assert reports[0]["missed_tokens"] > 0
    assert reports[1]["missed_tokens"] == 0


def test_ask_without_capture_stores_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    command = ("ask", "-m", model, "-s", tmp_path / "s", "-p", PASSAGES[0], "-q", "Why?", "-n", 1, "--no-capture")
    reports = [run(*command, "--json").json["report"] for _ in range(2)]
    assert reports[1]["missed_tokens"] == reports[0]["missed_tokens"] > 0


def test_ask_shows_answer_and_report(run: Run, model: Path, data: Path, store: Path) -> None:
    result = run("ask", "-m", model, "-s", store, "-d", data, "-n", 4)
    assert result.out.strip()
    for word in ("prompt tokens", "loaded from disk", "missed", "recomputed", "first token"):
        assert word in result.err


def test_ask_compares_with_full_recompute(run: Run, model: Path, data: Path, store: Path) -> None:
    command = ("ask", "-m", model, "-s", store, "-d", data, "-n", 4, "--compare", "--ratio", 1)
    found = run(*command, "--json").json
    other = found["full_recompute"]
    assert other["token_ids"] == found["token_ids"]
    assert other["answer"] == found["answer"]
    assert other["first_token"]["kl"] < 1e-8
    assert other["first_token"]["top_1"]
    shown = run(*command)
    assert "full recompute" in shown.out
    assert "the same first token" in shown.err


@pytest.mark.parametrize("selector", ["hkvd", "query", "hybrid", "head", "random", "none", "all"])
def test_ask_takes_every_selector(run: Run, model: Path, data: Path, store: Path, selector: str) -> None:
    checks = ("--check-layers", 1) if selector == "hkvd" else ()
    found = run("ask", "-m", model, "-s", store, "-d", data, "-n", 1, "--selector", selector, *checks, "--json").json
    share = {"none": 0.0, "all": 1.0}.get(selector, 0.15)
    assert found["report"]["recomputed_tokens"] == round(share * found["report"]["hit_tokens"]["disk"])


def test_ask_filters_gradually(run: Run, model: Path, data: Path, store: Path) -> None:
    command = ("ask", "-m", model, "-s", store, "-d", data, "-n", 1, "--json")
    levels = ("--check-layers", "1,2", "--ratio", "0.5,0.25")
    gradual = run(*command, *levels).json["report"]
    one = run(*command, "--ratio", 0.25, "--check-layers", 1).json["report"]
    loaded = gradual["hit_tokens"]["disk"]
    assert gradual["recomputed_tokens"] == one["recomputed_tokens"] == round(0.25 * loaded)
    assert gradual["row_layers"] == one["row_layers"] + round(0.5 * loaded) - round(0.25 * loaded)


def test_ask_takes_measure_and_threshold(run: Run, model: Path, data: Path, store: Path) -> None:
    command = ("ask", "-m", model, "-s", store, "-d", data, "-n", 1, "--json", "--selector", "threshold")
    counts = {
        (measure, bound): run(*command, "--measure", measure, "--threshold", bound).json["report"]["recomputed_tokens"]
        for measure, bound in (("kv", 0), ("k", 1e-6), ("v", 1e9))
    }
    assert counts[("kv", 0)] >= counts[("k", 1e-6)] > counts[("v", 1e9)] == 0


def test_the_system_prompt_as_anchor(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    options = ("-m", model, "-s", tmp_path / "s", "-d", data, "--anchor", "system", "--system", "Be brief.", "--json")
    assert run("warm", *options).json["stored"] == 3
    report = run("ask", *options, "-n", 1).json["report"]
    assert report["missed_tokens"] == 0
    assert report["hit_tokens"]["prefix"] > 10  # system prompt and first passage


def test_passages_from_files(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PASSAGES[0] + "\n")
    by_file, by_text = (
        run("ask", "-m", model, "-s", "memory", "-p", passage, "-q", "Why?", "-n", 2, "--json").json
        for passage in (f"@{tmp_path / 'p.txt'}", PASSAGES[0])
    )
    assert by_file["token_ids"] == by_text["token_ids"]


def test_as_a_process(model: Path, data: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from cacheblend.cli import main; main()"]
    options = ["-m", str(model), "-s", str(tmp_path / "s"), "-d", str(data), "--json"]
    warmed = subprocess.run([*program, "warm", *options], capture_output=True, text=True, check=True)
    assert json.loads(warmed.stdout)["stored"] == 3
    failed = subprocess.run([*program, "store", "ls", str(tmp_path / "none")], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == f"error: there is no store in {tmp_path / 'none'}: check the path\n"


# ---- doctor -----------------------------------------------------------------------------------------------


def test_doctor(run: Run, model: Path, tmp_path: Path) -> None:
    shown = run("doctor", "--model", model)
    assert shown.code == 0
    assert "half pairing, 16 of 16 dims" in shown.out
    assert "yes, this model can be blended" in shown.out
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_text("")
    refused = run("doctor", "--model", tmp_path, "--json")
    assert refused.code == 1
    assert refused.json["blendable"] is False
