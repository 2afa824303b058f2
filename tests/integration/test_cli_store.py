"""The command line's `store`, and titles, paths and answers whose text would steer what shows them."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend.cli import ask
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.request import Answer, Delta
from cacheblend.engines.settings import BlendSettings
from cli_passages import PASSAGES, data, model, run, store
from command_line import Run

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


def test_a_folder_that_is_no_store_file(run: Run, store: Path) -> None:
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


def test_typers_own_errors_show_markup_as_it_is(run: Run) -> None:
    result = run("ask", "-m", "x", "-s", "y", "-q", "?", "--nothing[/b]")
    assert result.code == 2
    assert "--nothing[/b]" in result.err
