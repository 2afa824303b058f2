"""The command line on a tiny model in a folder: what it prints, what it leaves behind, how it fails."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheblend.cli import app, ask, main
from cacheblend.cli.output import error_text
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.request import Answer, Delta
from cacheblend.engines.settings import Settings
from command_line import Run, runner
from tiny_folder import TinyShape, build_tiny

PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather.",
    "Mussels grow on ropes, and the harvest stops when algae are found.",
    "A clock that shows the tide needs a wheel for the moon.",
]
SHAPE = TinyShape(layers=3, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny-llama"
    build_tiny(folder, PASSAGES, SHAPE)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"ctxs": [{"title": "", "text": text} for text in PASSAGES], "question": "When was it lit?"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    return file


@pytest.fixture
def store(run: Run, model: Path, data: Path, tmp_path: Path) -> Path:
    """A store with the three passages."""
    folder = tmp_path / "store"
    assert run("warm", "-m", model, "-s", folder, "-d", data).code == 0
    return folder


# ---- help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [[], ["warm"], ["ask"], ["doctor"], ["demo"], ["bench"], ["bench", "ttft"], ["store"]]
    + [["store", name] for name in ("ls", "stat", "verify", "prune", "pin", "unpin", "rm")],
)
def test_every_command_has_help(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from cacheblend.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(time.process_time(), sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cpu_seconds, heavy = done.stdout.splitlines()[-1].split(" ", 1)
    assert heavy == "[]"
    assert float(cpu_seconds) < 0.6  # 0.15 on an idle machine


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("cacheblend 0.")


# ---- warm, ask --------------------------------------------------------------------------------------------


def test_warm_stores_each_passage_once(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    command = ("warm", "--model", model, "--store", tmp_path / "s", "--data", data, "--json")
    first, second = run(*command), run(*command)
    assert first.err == ""
    assert (first.json["stored"], first.json["held"]) == (3, 0)
    assert (second.json["stored"], second.json["held"]) == (0, 3)
    assert first.json["store_bytes"] == second.json["store_bytes"] > 0


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


# ---- store ------------------------------------------------------------------------------------------------


def test_store_ls_and_stat(run: Run, store: Path) -> None:
    chunks = run("store", "ls", store, "--json").json["chunks"]
    assert [chunk["label"] for chunk in sorted(chunks, key=lambda c: c["label"])] == [f"rows #0.{i}" for i in range(3)]
    assert all(chunk["blocks_held"] == chunk["blocks"] == 1 and not chunk["pinned"] for chunk in chunks)
    stat = run("store", "stat", store, "--json").json
    assert (stat["chunks"], stat["blocks"], stat["pinned"]) == (3, 4, 0)  # 3 passages and BOS
    shown = run("store", "ls", f"file://{store}")
    assert "1 of 1" in shown.out
    assert "tiny-llama" in shown.out
    assert "3 chunks, 4 blocks" in run("store", "stat", store).out


def test_store_pin_unpin_prune_rm(run: Run, store: Path) -> None:
    chunk = run("store", "ls", store, "--json").json["chunks"][0]
    assert run("store", "pin", store, chunk["chunk"][:10], "--json").json == {"pinned": [chunk["chunk"]]}
    assert run("store", "prune", store, "--max-bytes", "1KiB", "--json").json["blocks"] == 1
    left = run("store", "ls", store, "--json").json["chunks"]
    assert [(c["chunk"], c["pinned"]) for c in left] == [(chunk["chunk"], True)]
    assert run("store", "unpin", store, chunk["label"]).code == 0
    assert run("store", "rm", store, "--all", "--json").json == {"removed": [chunk["chunk"]]}
    assert run("store", "stat", store, "--json").json["blocks"] == 0


def test_store_verify_reports_and_removes_damage(run: Run, store: Path) -> None:
    assert run("store", "verify", store, "--json").json == {"intact_blocks": 4, "damaged": []}
    file = max((file for file in (store / "blocks").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = run("store", "verify", store)
    assert result.code == 1
    assert "removed block" in result.out
    assert "3 blocks are intact, 1 damaged things were removed" in result.out
    assert run("store", "verify", store).code == 0


def test_store_verify_of_a_read_only_folder_removes_nothing_and_says_so(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = max((file for file in (store / "blocks").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refused)
    shown, found = run("store", "verify", store), run("store", "verify", store, "--json")
    assert shown.code == found.code == 1
    assert "removed block" not in shown.out
    assert f"damaged block {file.stem[:12]}" in shown.out
    assert "3 blocks are intact, 0 damaged things were removed" in shown.out
    assert "1 damaged things are left, since the store cannot be written to" in shown.out
    assert found.json["intact_blocks"] == 3
    assert [damage["removed"] for damage in found.json["damaged"]] == [False]
    assert file.exists()


def test_looking_at_a_store_makes_none(run: Run, tmp_path: Path) -> None:
    for command in (("ls",), ("verify",), ("prune", "--max-bytes", "0")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        for name in ("none", "empty"):
            result = run("store", command[0], tmp_path / name, *command[1:])
            assert result.code == 2
            assert f"there is no store in {tmp_path / name}" in result.err
        assert not (tmp_path / "none").exists()
        assert not list((tmp_path / "empty").iterdir())


# ---- text from outside ------------------------------------------------------------------------------------

TITLES = ["Mercury [disambiguation]", "x [/b]", "[red]all[/red] :smile:"]


@pytest.fixture
def odd(run: Run, model: Path, tmp_path: Path) -> Path:
    """A folder "a [b" with a model "m [/b] [i]", a store "s [/i]" and passages, all with markup in their names."""
    folder = tmp_path / "a [b"
    shutil.copytree(model, folder / "m [/b] [i]")
    rows = [
        {"ctxs": [{"title": title, "text": text} for title, text in zip(TITLES, PASSAGES, strict=True)]}
        | {"question": "Why [/red]?"}
    ]
    (folder / "d [u].json").write_text(json.dumps(rows))
    result = run("warm", "-m", folder / "m [/b] [i]", "-s", folder / "s [/i]", "-d", folder / "d [u].json")
    assert result.code == 0
    assert "s [/i] takes" in result.out.replace("\n", " ")
    return folder


def test_titles_and_paths_with_markup_are_shown_as_they_are(run: Run, odd: Path) -> None:
    store, model = odd / "s [/i]", odd / "m [/b] [i]"
    shown = run("store", "ls", store).out
    assert all(title in shown for title in [*TITLES, "b] [i]"])
    for title in TITLES:
        assert title in run("store", "pin", store, title).out
        assert title in run("store", "unpin", store, title).out
    assert "s [/i]: 3 chunks" in run("store", "stat", store).out.replace("\n", " ")
    assert "b] [i]" in run("doctor", "--model", model).out
    result = run("ask", "-m", model, "-s", store, "-d", odd / "d [u].json", "-n", 2, "--compare")
    assert result.code == 0
    assert "same first token" in result.err or "another first token" in result.err
    bench = ("bench", "ttft", "-m", model, "--chunks", 2, "--chunk-tokens", 8, "--question-tokens", 2, "--runs", 1)
    assert "b] [i]" in run(*bench, "--arms", "full").out
    assert all(title in run("store", "rm", store, "--all").out for title in TITLES[:1])
    assert "s [/i] lists no chunk" in run("store", "ls", store).out.replace("\n", " ")


def test_labels_cannot_steer_the_terminal(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": PASSAGES[0], "title": "a\x1b[2Jb\nc"}))
    assert run("warm", "-m", model, "-s", tmp_path / "s", "-d", tmp_path / "d.jsonl").code == 0
    assert "a\ufffd[2Jb c" in run("store", "ls", tmp_path / "s").out
    assert "a\ufffd[2Jb c" in run("store", "pin", tmp_path / "s", "--all").out


def test_an_answer_is_printed_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = ["[/b] :smile:", "\tx" + " y" * 100, " [red", "]"]

    class Engine:
        def stream(self, *_: object) -> Iterator[Delta]:
            yield from (Delta(piece) for piece in pieces)
            yield Delta("", Answer("", [], "stop", BlendReport(fallbacks=["a block of [/x] [y] was lost"])))

    answer = ask._stream(Engine(), None, None, quiet=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "".join(pieces) + "\n"
    ask._show(answer, 3, Settings(), as_json=False)
    assert "fallback: a block of [/x] [y] was lost" in capsys.readouterr().err


def test_typers_own_errors_show_markup_as_it_is(run: Run) -> None:
    result = run("ask", "-m", "x", "-s", "y", "-q", "?", "--nothing[/b]")
    assert result.code == 2
    assert "--nothing[/b]" in result.err


# ---- doctor, bench, demo ----------------------------------------------------------------------------------


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


# ---- bad input --------------------------------------------------------------------------------------------


TINY = ("bench", "ttft", "--shape", "tiny", "--chunks", 2, "--chunk-tokens", 8, "--question-tokens", 2, "--runs", 1)
LEVELS = ("--check-layers", "1,2")
BAD = [
    (["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{tmp}/none.json"], "none.json cannot be read"),
    (["warm", "-m", "{model}", "-s", "memory", "-d", "{data}"], "ends with this command"),
    (["warm", "-m", "{tmp}/none", "-s", "{tmp}/s", "-d", "{data}"], "is no folder"),
    (["warm", "-m", "{tmp}", "-s", "{tmp}/s", "-d", "{data}"], "config.json"),
    (["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{data}", "--anchor", "x"], "anchor must be one of"),
    (
        ["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{data}", "--block-size", "0"],
        "--block-size: 0 is out of range, 1..",
    ),
    (["ask", "-m", "{model}", "-s", "memory"], "no question"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-r", "1.5"], "0..1, got 1.5"),
    (["ask", "-m", "{model}", "-s", "gs://x", "-q", "?"], "gs"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--selector", "best"], "'best'"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--check-layers", "9"], "check layer 9"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-r", "0.5,0.2"], "2 ratios need as many"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", *LEVELS, "-r", "0.2,0.5"], "must not rise"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", *LEVELS, "-r", "1,0", "--selector", "head"], "hkvd"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--selector", "threshold"], "needs a bound"),
    (["ask", "-m", "{model}", "-s", "{data}", "-q", "?"], "is not a folder"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", "@{tmp}/[/b]"], "[/b]: the file cannot be read"),
    (["store", "ls", "{data}"], "is not a folder"),
    (["store", "ls", "{tmp}/none [/b]"], "none [/b]: check the path"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--dtype", "int8"], "int8"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--device", "moon"], "moon"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-n", "0"], "--max-tokens: 0 is out of range, 1.."),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", ""], "-p: the value is empty"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", "@{tmp}/none"], "cannot be read"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--chat"], "no chat template"),
    (["ask", "-m", "{model}", "-s", "memory", "-d", "{data}", "--row", "7"], "rows 0..0, not 7"),
    (["ask", "-m", "{model}", "-s", "memory", "-p", "word " * 900, "-q", "?"], "context"),
    (["store", "stat", "memory"], "name a folder"),
    (["store", "prune", "{tmp}", "--max-bytes", "much"], "not a size"),
    (["doctor"], "--model"),
    (["doctor", "--shape", "round"], "no shape is called"),
    (["bench", "ttft"], "model"),
    (["bench", "ttft", "--shape", "tiny", "--json-file", "{tmp}/no/r.json"], "no folder"),
    (["bench", "ttft", "--shape", "tiny", "--json-file", "{tmp}"], "it is a folder"),
    (["bench", "memory", "--shape", "tiny", "--json-file", "{tmp}"], "it is a folder"),
    (["bench", "plan", "--json-file", "{tmp}"], "it is a folder"),
    (["bench", "ttft", "--shape", "tiny", "--plot", "x.png"], "give --sweep"),
    (["bench", "ttft", "--shape", "tiny", "--sweep", "ratio", "--plot", "{tmp}/x.txt"], "'x.txt'"),
    (["bench", "ttft", "--shape", "tiny", "--sweep", "time"], "'time'"),
    (["bench", "ttft", "--shape", "tiny", "--chunks", "100"], "51264 tokens"),
    (["demo", "--ratio", "2"], "0..1"),
    (["demo", "--plot", "{tmp}/x.txt"], "'x.txt'"),
    (["demo", "--plot", "{tmp}/no/x.png"], "no folder"),
    (["demo", "--keep", "{tmp}"], "exists already"),
    (["demo", "--keep", "{data}/kept"], "the folder cannot be made: Not a directory"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[" ".join(c[:1] + c[-2:])[:40] for c, _ in BAD])
def test_a_users_error_is_one_line(
    run: Run, model: Path, data: Path, tmp_path: Path, command: list[str], message: str
) -> None:
    filled = [part.format(model=model, data=data, tmp=tmp_path) for part in command]
    result = run(*filled)
    assert result.code == 2
    assert result.out == ""
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_a_folder_that_is_no_store_file(run: Run, store: Path) -> None:
    (store / "cacheblend.json").unlink()
    (store / "cacheblend.json").mkdir()
    for command in ("ls", "stat", "verify"):
        result = run("store", command, store)
        assert result.code == 2
        assert f"the store in {store} cannot be read" in result.err
        assert "Is a directory" in result.err


def test_the_systems_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x/[/b]")

    monkeypatch.setattr("cacheblend.bench.plan.run", full)
    result = run("bench", "plan")
    assert result.code == 2
    assert result.err == "error: /x/[/b]: No space left on device\n"
    assert error_text(OSError(5, "Input/output error")) == "Input/output error"
    assert error_text(OSError("said so")) == "said so"
    assert error_text(OSError()) == "OSError"


def test_what_cannot_be_written_is_said_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend.bench.ttft.run", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, everything may be written
    result = run(*TINY, "--json-file", tmp_path / "r.json")
    assert result.code == 2
    assert result.err == f"error: {tmp_path / 'r.json'} cannot be written: permission denied\n"


def test_errors_as_json(run: Run, tmp_path: Path) -> None:
    result = run("ask", "-m", tmp_path / "none", "-s", "memory", "-q", "?", "--json")
    assert result.code == 2
    assert "is no folder" in result.json["error"]
    assert result.err == ""


def test_a_wrong_option_is_typers_to_explain(run: Run) -> None:
    result = run("warm", "--nonsense")
    assert result.code == 2
    assert "--nonsense" in result.err


def test_as_a_process(model: Path, data: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from cacheblend.cli import main; main()"]
    options = ["-m", str(model), "-s", str(tmp_path / "s"), "-d", str(data), "--json"]
    warmed = subprocess.run([*program, "warm", *options], capture_output=True, text=True, check=True)
    assert json.loads(warmed.stdout)["stored"] == 3
    failed = subprocess.run([*program, "store", "ls", str(tmp_path / "none")], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == f"error: there is no store in {tmp_path / 'none'}: check the path\n"


def test_a_port_that_another_server_took_meanwhile_is_an_error_before_any_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both may bind a port while neither listens; the second must not say that it serves."""
    from cacheblend.cli import serve
    from cacheblend.serve.settings import ServeSettings

    monkeypatch.setattr("cacheblend.serve.app.create_app", lambda engine, settings: None)
    with serve.bind("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with serve.bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(InvalidInputError, match=f"--port {port}: the server cannot listen there"):
                serve._run(None, ServeSettings(), "127.0.0.1", second)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_a_host_of_several_addresses_is_served_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.cli import serve

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 0)) for n in (1, 2, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with serve.bind("several", 0) as sockets:
        names = [bound.getsockname() for bound in sockets]
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1
    assert all(bound.fileno() == -1 for bound in sockets)


@pytest.mark.parametrize("arguments", [[], ["store"], ["bench"], ["bench", "vllm"], ["keys"]])
def test_a_group_without_a_command_shows_its_help_and_is_no_success(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "Usage" in capsys.readouterr().out
