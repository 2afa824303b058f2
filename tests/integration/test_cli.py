"""The command line on a tiny model in a folder: `warm`, `ask`, `doctor`, `store`; text that would steer a terminal."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend.cli import ask
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.request import Answer, Delta
from cacheblend.engines.settings import BlendSettings
from cli_passages import PASSAGES, data, model, run, store
from command_line import Run

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


def test_version_and_a_group_without_a_command_which_shows_its_help_and_is_no_success(run: Run) -> None:
    assert run("--version").out.startswith("cacheblend 0.")
    for arguments in ([], ["store"], ["bench"], ["keys"]):
        result = run(*arguments)
        assert result.code == 2 and "Usage" in result.out


# ---- warm, ask --------------------------------------------------------------------------------------------


def test_warm_stores_each_passage_once(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    command = ("warm", "--model", model, "--store", tmp_path / "s", "--data", data)
    first, second, shown = run(*command, "--json"), run(*command, "--json"), run(*command)
    assert first.err == ""
    assert (first.json["stored"], first.json["held"]) == (3, 0)
    assert (second.json["stored"], second.json["held"]) == (0, 3)
    assert first.json["store_bytes"] == second.json["store_bytes"] > 0
    assert "3/3" in shown.err and "0 passages stored" in shown.out
    (tmp_path / "more.txt").write_text("One more.\n\nAnd one more.\n")
    assert run(*command, "-d", tmp_path / "more.txt", "--json", "--limit", 4).json["passages"] == 4


def test_warm_and_store_use_what_is_behind_the_memory(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    """The URL is a server's own: what stood in its memory would be lost with the command."""
    url = f"memory://?max_bytes=1GiB, file://{tmp_path}/s"
    warmed = run("warm", "--model", model, "--store", url, "--data", data, "--json").json
    assert warmed["stored"] == warmed["passages"] > 0 and warmed["store"] == f"file://{tmp_path}/s"
    assert run("store", "stat", url, "--json").json == run("store", "stat", tmp_path / "s", "--json").json
    again = run("warm", "--model", model, "--store", tmp_path / "s", "--data", data, "--json").json
    assert (again["stored"], again["held"]) == (0, warmed["passages"])


def test_ask_answers_from_the_store_and_stores_what_it_missed(run: Run, model: Path, data: Path, store: Path) -> None:
    command = ("ask", "-m", model, "-s", store, "-n", 4)
    found, shown = run(*command, "-d", data, "--json").json, run(*command, "-d", data)
    assert len(found["token_ids"]) <= 4
    report = found["report"]
    assert report["missed_tokens"] == 0
    assert report["loaded_tokens"] > 0.7 * report["prompt_tokens"]
    loaded = report["hit_tokens"]["disk"]
    assert 0 < report["recomputed_tokens"] < 0.15 * loaded, "after the last check: the mean over the layers is r"
    assert shown.out.strip()
    for word in ("prompt tokens", "loaded from disk", "missed", "recomputed", "first token"):
        assert word in shown.err
    asked = (*command, "-p", PASSAGES[1], "-p", "Nobody has seen this one.", "-q", "Why?", "--json")
    missed = [run(*asked, *more).json["report"]["missed_tokens"] for more in (["--no-capture"], [], [])]
    assert missed[0] == missed[1] > missed[2] == 0


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


def test_ask_takes_every_selector_with_its_settings(run: Run, model: Path, data: Path, store: Path) -> None:
    def report(*more: object) -> Any:
        return run("ask", "-m", model, "-s", store, "-d", data, "-n", 1, "--json", *more).json["report"]

    for selector in ("hkvd", "query", "hybrid", "head", "random", "none", "all"):
        found = report("--selector", selector, *(("--check-layers", 1) if selector == "hkvd" else ()))
        share = {"none": 0.0, "all": 1.0}.get(selector, 0.15)
        assert found["recomputed_tokens"] == round(share * found["hit_tokens"]["disk"]), selector
    gradual = report("--check-layers", "1,2", "--ratio", "0.5,0.25")
    one = report("--ratio", 0.25, "--check-layers", 1)
    loaded = gradual["hit_tokens"]["disk"]
    assert gradual["recomputed_tokens"] == one["recomputed_tokens"] == round(0.25 * loaded)
    assert gradual["row_layers"] == one["row_layers"] + round(0.5 * loaded) - round(0.25 * loaded)
    bounds = {"kv": 0, "k": 1e-6, "v": 1e9}
    counts = {
        measure: report("--selector", "threshold", "--measure", measure, "--threshold", bound)["recomputed_tokens"]
        for measure, bound in bounds.items()
    }
    assert counts["kv"] >= counts["k"] > counts["v"] == 0


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


__all__ = ["data", "model", "run", "store"]  # fixtures


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


def test_store_verify_reports_and_removes_damage_but_in_a_read_only_folder(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("store", "verify", store, "--json").json == {"intact_blocks": 4, "damaged": []}
    file = max((file for file in (store / "blocks").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "unlink", refused)
        shown, found = run("store", "verify", store), run("store", "verify", store, "--json")
    assert shown.code == found.code == 1
    assert "removed block" not in shown.out
    assert f"damaged block {file.stem[:12]}" in shown.out
    assert "3 blocks are intact, 0 damaged things were removed" in shown.out
    assert "1 damaged things are left, since the store cannot be written to" in shown.out
    assert found.json["intact_blocks"] == 3
    assert [damage["removed"] for damage in found.json["damaged"]] == [False]
    assert file.exists()
    result = run("store", "verify", store)
    assert result.code == 1
    assert "removed block" in result.out
    assert "3 blocks are intact, 1 damaged things were removed" in result.out
    assert run("store", "verify", store).code == 0


def test_looking_at_a_store_makes_none_and_a_file_that_is_none_is_named(run: Run, store: Path, tmp_path: Path) -> None:
    for command in (("ls",), ("verify",), ("prune", "--max-bytes", "0")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        for name in ("none", "empty"):
            result = run("store", command[0], tmp_path / name, *command[1:])
            assert result.code == 2
            assert f"there is no store in {tmp_path / name}" in result.err
        assert not (tmp_path / "none").exists()
        assert not list((tmp_path / "empty").iterdir())
    (store / "cacheblend.json").unlink()
    (store / "cacheblend.json").mkdir()
    for command in ("ls", "stat", "verify"):
        result = run("store", command, store)
        assert result.code == 2
        assert f"the store in {store} cannot be read" in result.err
        assert "Is a directory" in result.err


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
    refused = run("ask", "-m", "x", "-s", "y", "-q", "?", "--nothing[/b]")  # nor do typer's own errors
    assert refused.code == 2 and "--nothing[/b]" in refused.err


def test_an_answer_is_printed_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = ["[/b] :smile:", "\tx" + " y" * 100, " [red", "]"]

    class Engine:
        def stream(self, *_: object) -> Iterator[Delta]:
            yield from (Delta(piece) for piece in pieces)
            yield Delta("", Answer("", [], "stop", BlendReport(fallbacks=["a block of [/x] [y] was lost"])))

    answer = ask._stream(Engine(), None, None, quiet=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "".join(pieces) + "\n"
    ask._show(answer, 3, BlendSettings(), as_json=False)
    assert "fallback: a block of [/x] [y] was lost" in capsys.readouterr().err
