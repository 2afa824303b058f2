"""The command line on a tiny model in a folder: `warm`, `ask`, `doctor`, `store`, `bench`, `demo`; text that would
steer a terminal; and how many files a reader passes on the way of one call, as docs/structure.md says."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

import cacheblend
import cacheblend.engines.hf.doctor
import cacheblend.engines.settings  # imported before it is traced
from cacheblend.bench.ttft import table
from cacheblend.cli import ask
from cacheblend.cli.doctor import QualityOptions, doctor
from cacheblend.cli.options import DeviceOptions, ModelOrShape, PassageOptions, QuestionOptions
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.hf.request import Answer, Delta
from cacheblend.engines.settings import BlendSettings
from cacheblend.store import DiskStore
from command_line import Run
from lab.nano.data import record, write
from lab.nano.scenes import Style
from serving import shallow
from store_blocks import ROOT, make_block, make_chain, make_manifest
from tiny_folder import TinyShape, build_tiny

PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather.",
    "Mussels grow on ropes, and the harvest stops when algae are found.",
    "A clock that shows the tide needs a wheel for the moon.",
]


def build_model(folder: Path) -> Path:
    """Writes a tiny model to a folder, and returns it."""
    shape = TinyShape(layers=3, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)
    build_tiny(folder, PASSAGES, shape)
    return folder


def write_rows(file: Path) -> Path:
    """Writes one row with all passages to a file, and returns it."""
    rows = [{"ctxs": [{"title": "", "text": text} for text in PASSAGES], "question": "When was it lit?"}]
    file.write_text(json.dumps(rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("cli") / "tiny-llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.json")


@pytest.fixture
def store(run: Run, model: Path, data: Path, tmp_path: Path) -> Path:
    """A store with the three passages."""
    folder = tmp_path / "store"
    assert run("warm", "-m", model, "-s", folder, "-d", data).code == 0
    return folder


@pytest.mark.parametrize("program", ["cacheblend", "lab"])
def test_help_is_quick_and_imports_nothing_heavy(program: str) -> None:
    code = (
        "import sys, time\n"
        f"from {program}.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(time.process_time(), sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    cpu_seconds, heavy = done.stdout.splitlines()[-1].split(" ", 1)
    assert heavy == "[]"
    assert float(cpu_seconds) < 0.6  # 0.15 on an idle machine


def test_warm_completes_the_store_that_outlives_the_others(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    """It was down, or had no room for what came too soon, while the nearer one took everything."""
    near, far = tmp_path / "near", tmp_path / "far"
    warm = ("warm", "--model", model, "--data", data, "--json", "--store")
    assert run(*warm, near).json["stored"] == 3
    both = f"file://{near}, file://{far}"
    assert run(*warm, both).json["stored"] == 3
    assert (run(*warm, both).json["held"], run(*warm, far).json["held"]) == (3, 3)
    assert run(*warm, tmp_path / "near").json["held"] == 3


def test_a_value_may_end_in_an_equals_sign(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    warmed = run("warm", "--model", model, "--store", tmp_path / "s", "--data", data, "--salt=YWJj=", "--json")
    assert warmed.json["stored"] == 3
    assert "the value is empty" in run("warm", "--model", model, "--store=").err


def test_version_and_a_group_without_a_command_which_shows_its_help_and_is_no_success(run: Run) -> None:
    assert run("--version").out.startswith("cacheblend 0.")
    for arguments in ([], ["store"], ["bench"], ["keys"]):
        result = run(*arguments)
        assert result.code == 2 and "Usage" in result.out


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
    assert "the same first token" in shown.err and "the answers are the same" in shown.err
    assert "no passage was stored" not in shown.err
    first = run("ask", "-m", model, "-s", store.with_name("empty"), *command[5:])
    assert "no passage was stored" in first.err and "cacheblend warm" in first.err
    for more, said in (("--no-capture", "this request stores nothing"), ("--capture", "they are being stored")):
        alone = run("ask", "-m", model, "-s", store.with_name("empty"), "-d", data, "-n", 1, more)
        assert "no passage was stored: " in alone.err and said in alone.err


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
        measure: report("--selector", f"threshold:threshold={bound}", "--measure", measure)["recomputed_tokens"]
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
    (tmp_path / "p.txt").write_text("\ufeff" + PASSAGES[0] + "\n", encoding="utf-8")
    by_file, by_text = (
        run("ask", "-m", model, "-s", "memory", "-p", passage, "-q", "Why?", "-n", 2, "--json").json
        for passage in (f"@{tmp_path / 'p.txt'}", PASSAGES[0])
    )
    assert by_file["token_ids"] == by_text["token_ids"]


def test_store_ls_stat_pin_unpin_prune_rm(run: Run, store: Path) -> None:
    chunks = run("store", "ls", store, "--json").json["chunks"]
    assert [chunk["label"] for chunk in sorted(chunks, key=lambda c: c["label"])] == [f"rows #0.{i}" for i in range(3)]
    assert all(chunk["blocks_held"] == chunk["blocks"] == 1 and not chunk["pinned"] for chunk in chunks)
    stat = run("store", "stat", store, "--json").json
    assert (stat["chunks"], stat["blocks"], stat["pinned"]) == (3, 4, 0)  # 3 passages and BOS
    shown = run("store", "ls", f"file://{store}")
    assert "1 of 1" in shown.out
    assert "tiny-llama" in shown.out
    assert "3 chunks, 4 blocks" in run("store", "stat", store).out

    # then pinned, pruned, removed
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
    assert "1 damaged things are left: the store cannot be written to, or they cannot be read" in shown.out
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


def test_unpinning_a_chunk_leaves_what_another_pinned_one_shares(run: Run, tmp_path: Path) -> None:
    chain = make_chain(4)
    with DiskStore(tmp_path / "s") as store:
        store.write_all(chain)
        for last, label in ((2, "one"), (3, "other")):
            names = tuple(block.name for block in chain[:last])
            store.put_manifest(replace(make_manifest(chain[last - 1], label), block_names=names))
    assert run("store", "pin", tmp_path / "s", "--all").code == 0
    assert run("store", "unpin", tmp_path / "s", "other").code == 0
    listed = run("store", "ls", tmp_path / "s", "--json").json["chunks"]
    assert {each["label"]: each["pinned"] for each in listed} == {"one": True, "other": False}


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


def test_bench_ttft(run: Run, tmp_path: Path) -> None:
    command = ("bench", "ttft", "--shape", "tiny", "--chunks", 2, "--chunk-tokens", 16, "--question-tokens", 4)
    result = run(*command, "--runs", 1, "--ratio", 0.5, "--ratio", 0.1, "--json-file", tmp_path / "r.json")
    assert result.code == 0
    arms = json.loads((tmp_path / "r.json").read_text())["arms"]
    assert [(arm["arm"], arm["ratio"]) for arm in arms if arm["arm"] == "blend"] == [("blend", 0.5), ("blend", 0.1)]
    assert "blend" in result.out


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
    """A demo of few and short passages, in a folder of its own, where no pretrained model is at hand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    parts = ("full recompute", "prefix caching", "full reuse", "HKVD, gradual, r = 0.15", "r = 1 is full prefill", "/7")
    assert all(part in shown.out for part in parts), shown.out
    assert "<svg" in Path("a.svg").read_text()
    assert run("store", "stat", "kept/store", "--json").json["chunks"] == 3
    rows = [json.loads(line) for line in Path("kept/questions.jsonl").read_text().splitlines()]
    assert len(rows) == 7
    asked = next(line for line in shown.out.splitlines() if " ask --model kept/" in line)
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
    assert found["pretrained"] is None


@pytest.mark.usefixtures("small_demo")
def test_a_slow_demo_asks_one_question_of_each_category(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.evaluation.demo.BUDGET_S", 0.0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["an environment/bin/cacheblend"])
    monkeypatch.setattr("cacheblend.evaluation.demo.pretrained_folder", shallow)
    Path("cacheblend-demo.png").mkdir()  # nobody asked for a picture, and it cannot be written there
    shown = run("demo", "-n", 2)
    assert shown.code == 0 and "no picture is drawn: " in shown.err
    assert "5. A pretrained model (shallow" in shown.out
    assert "Edith Calloway" in shown.out and "1902" in shown.out
    assert "\n  'an environment/bin/cacheblend' doctor --model DIR\n" in shown.out, "such that it can be called"
    assert "asked 7 of 14 questions" in shown.err
    assert "/7 " in shown.out
    assert "3. 7 questions" in shown.out


REPOSITORY = Path(__file__).parents[2]
_PACKAGE = Path(cacheblend.__file__).parent
_GUARD = "engines/hf/ambient.py"
"""Stands around each entry point, and is no step."""


def walk(call: Callable[[], Any], *, unseen: str = "", seen_from: tuple[str, ...] = ()) -> list[str]:
    """The package's files that a call enters, each time another one than before; what it starts on other threads is not
    traced. Files whose names begin with `unseen` are no steps; of calls those count that `seen_from` make, if given."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = _file_of(frame)
        if event != "call" or not name or name == _GUARD or (unseen and name.startswith(unseen)):
            return
        caller = frame.f_back
        while seen_from and caller is not None and _file_of(caller) in ("", _GUARD):
            caller = caller.f_back
        if not seen_from or caller is None or _file_of(caller) in seen_from:
            entered.append(name)

    def traced() -> None:
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(traced).result()
    return [name for name, _ in groupby(entered)]


def _file_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else ""


def test_the_read_of_a_layer_from_a_folder(tmp_path: Path) -> None:
    block, entered = make_block(1, tokens=8, shapes=[LayerShape(2, 8)] * 4), list[str]()
    with DiskStore(tmp_path / "s") as store:
        store.write(block)
        plan = Planner(ROOT, block_size=8).plan(Prompt.of([text([1, 2]), chunk(block.token_ids), text([3])]), store)
        read = store.read_layers

        def traced_read(*asked: Any) -> Any:
            answers: list[Any] = []
            entered.extend(walk(lambda: answers.append(read(*asked)), unseen="core/kernels/"))
            return answers[0]

        with LayerLoader(plan, store, block.layout, [None] * 4, read_ahead=0) as loader:
            store.read_layers = traced_read  # type: ignore[method-assign]
            loader.layer(0)
    assert list(dict.fromkeys(entered)) == [
        "store/disk/store.py",
        "store/disk/block_files.py",
        "store/base.py",
        "core/load/staging_buffers.py",
        "store/format/block_file.py",
    ], entered
    assert len(entered) <= 8, entered


def test_generate_enters_no_file_twice_but_the_prefill() -> None:
    engine_file, prefill = "engines/hf/engine.py", "core/fuse/prefill.py"
    passages = [Passage("The red scarf lies in the box. " * 3), Passage("Ann has the key of the barn. " * 3)]
    with BlendEngine.from_pretrained("nano", store="memory") as engine:
        engine.warm(passages)
        prompt = ["Answer. ", *reversed(passages), "Who has the key?"]
        engine.generate(prompt, max_new_tokens=1)  # what is imported and measured at the first request
        steps = walk(lambda: engine.generate(prompt, max_new_tokens=1), seen_from=(engine_file,))
    known = engine_file, prefill, "core/closable.py"  # the end of a with statement is no step
    assert [step for step, _ in groupby(step for step in steps if step not in known)] == [
        "engines/hf/sampling.py",
        "engines/tokens/builder.py",
        "engines/tokens/detokenizer.py",
        "engines/hf/prompts.py",
        "engines/hf/grammar.py",
        "engines/hf/background.py",
        "engines/hf/runtime.py",
        "engines/hf/prefiller.py",
        "engines/hf/request.py",
    ]


def test_doctor_enters_each_file_that_examines_once(tmp_path: Path) -> None:
    model, doctors = build_model(tmp_path / "tiny-llama"), ("cli/doctor.py", "engines/hf/doctor.py")
    # what reads options and prints is no step
    terminal = ("cli/options.py", "cli/option_groups.py", "cli/models.py", "cli/output.py", "engines/folders.py")
    options = ModelOrShape(model), DeviceOptions(device="cpu"), QuestionOptions(), QualityOptions(), PassageOptions()
    steps = walk(lambda: doctor(*options, json=True), unseen="core/", seen_from=doctors)
    assert [step for step, _ in groupby(step for step in steps if step not in (*doctors, *terminal))] == [
        "engines/checkpoint.py",
        "engines/hf/model_loader.py",
        "engines/hf/survey.py",
        "engines/tokens/builder.py",
        "engines/fingerprint.py",
        "engines/hf/live_check.py",
        "engines/settings.py",
    ]
