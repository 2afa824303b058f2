"""`cacheblend sync`, as a user runs it: reports, refusals, a process that is killed."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cacheblend.store import DiskStore
from campaign import share
from command_line import Run, runner
from random_words import text_of
from serving import shallow


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "sync", "--model", str(shallow()))


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_folder_from_its_first_sync_to_its_end(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    source, store = tmp_path / "docs", tmp_path / "s"
    if is_relative:
        monkeypatch.chdir(tmp_path)
        store = Path("kv2")
    source.mkdir()
    for name in "abc":
        (source / f"{name}.txt").write_text(text_of(ord(name), 80))
    (source / "picture.png").write_bytes(b"")
    common = ("--store", store, "--source", source, "--chunk-tokens", 128)
    planned = run(*common, "--dry-run", "--json").json
    done = run(*common, "--json").json
    assert planned["computed_tokens"] == done["computed_tokens"] > 0 and done["added"] == 3
    assert done["skipped"] == ["1 files *.png"]
    (source / "b.txt").write_text(text_of(ord("b"), 80) + " One more.")
    (source / "c.txt").unlink()
    changed = run(*common)
    assert "1 documents kept, 0 added, 1 changed, 0 restored, 1 dropped" in " ".join(changed.out.split())
    (source / "a.txt").write_bytes(b"\xff")
    failed = run(*common, "--json")
    assert failed.code == 1 and failed.json["kept"] == 1 and "not UTF-8" in failed.json["failed"]["a.txt"]
    for file in source.iterdir():
        file.unlink()
    refused = run(*common)
    assert refused.code == 2 and "--max-drop 1" in refused.err
    assert run(*common, "--max-drop", 1, "--json").json["dropped"] == 2
    with DiskStore(store, read_only=True) as left:
        assert left.manifests() == [] and left.documents.roots() == []


def test_standard_input_and_what_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    common = ("--store", tmp_path / "s", "--source", "-", "--json")
    piped(b'{"id": "a", "text": "One bell."}\n')
    assert run(*common).json["added"] == 1
    piped(b'{"id": "a", "text": "One bell."}\n{"id": "a", "text": "Two."}\n')
    assert "standard input, line 2: an earlier line has the id 'a'" in run(*common).json["error"]
    piped(b'{"id": "a", "text": "One bell."}\n')
    assert run(*common).json["kept"] == 1
    piped(b"")
    assert run(*common, "--salt", "another").json["other_models"] == 1
    assert "the store 'memory' ends" in run("--store", "memory", "--source", tmp_path, "--json").json["error"]
    assert "does not exist" in run("--store", tmp_path / "s", "--source", tmp_path / "no", "--json").json["error"]


def test_a_killed_sync_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    count = max(20, share(60))
    rows = [{"id": str(number), "text": text_of(number, 300)} for number in range(count)]
    source, store = tmp_path / "d.jsonl", tmp_path / "s"
    source.write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "cacheblend", "sync", "--model", str(shallow()), "--store", str(store)]
    process = subprocess.Popen(
        [*command, "--source", str(source)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not len(list((store / "manifests").glob("*.json"))) > count * 2 // 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait(30)
    with DiskStore(store) as left:
        held = len(left.manifests())
        assert left.verify() == []
    done = run("--store", store, "--source", source, "--json").json
    assert done["documents"] == count and done["missing_documents"] == 0
    assert 0 < done["computed_chunks"] <= done["chunks"] - held
    assert run("--store", store, "--source", source, "--json").json["kept"] == count
