"""Evaluations that are killed and go on where they stopped, and what makes a run another one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Settings, evaluate, make_methods
from evaluation_rows import PASSAGES, ROWS, SHAPE, engine, model
from tiny_folder import build_tiny

__all__ = ["engine", "model"]  # fixtures

KILLED = """
import os, signal, sys
from pathlib import Path
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Settings, evaluate, make_methods
from cacheblend.evaluation.records import ROWS as FILE
sys.path.insert(0, sys.argv[3])
from test_evaluate_resuming import ROWS

def kill(stage, done, total):
    if stage == "answering" and done == 2:
        (file,) = Path(sys.argv[2]).glob(f"*/{FILE}")
        with file.open("ab") as stream:  # the beginning of a third line
            stream.write(file.read_bytes()[:40])
        os.kill(os.getpid(), signal.SIGKILL)

with BlendEngine.from_pretrained(sys.argv[1], device="cpu") as engine:
    evaluate(engine, ROWS, make_methods(), settings=Settings(max_tokens=3), out=Path(sys.argv[2]), progress=kill)
"""


def test_a_killed_run_goes_on_where_it_stopped(model: Path, engine: BlendEngine, tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r})\n{KILLED}"
    done = subprocess.run([sys.executable, "-c", code, str(model), str(tmp_path), str(here)], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    answered: list[tuple[int, int]] = []

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "answering":
            answered.append((done, total))

    settings = Settings(max_tokens=3)
    resumed = evaluate(engine, ROWS, make_methods(), settings=settings, out=tmp_path, progress=watch)
    assert (resumed.resumed, resumed.torn) == (2, True)
    assert answered == [(2, 4), (3, 4), (4, 4)]
    assert len(list(tmp_path.iterdir())) == 1
    fresh = evaluate(engine, ROWS, make_methods(), settings=settings)
    assert [_untimed(row) for row in resumed.rows] == [_untimed(row) for row in fresh.rows]
    again = evaluate(engine, ROWS, make_methods(), settings=settings, out=tmp_path)
    assert (again.resumed, again.torn, again.rows) == (4, False, resumed.rows)


def _untimed(row: Any) -> Any:
    return replace(row, machine="", cells=[replace(cell, ttft_s=0, total_s=0, kl=None) for cell in row.cells])


def test_other_data_settings_or_weights_are_another_run(model: Path, engine: BlendEngine, tmp_path: Path) -> None:
    build_tiny(tmp_path / "other" / "tiny-llama", PASSAGES, SHAPE, seed=1)
    out = tmp_path / "out"
    methods, settings = make_methods(["full"]), Settings(max_tokens=1)
    evaluate(engine, ROWS[:1], methods, settings=settings, out=out)
    evaluate(engine, [replace(ROWS[0], answers=("1872",))], methods, settings=settings, out=out)
    evaluate(engine, [replace(ROWS[0], question="Why?")], methods, settings=settings, out=out)
    evaluate(engine, ROWS[:1], methods, settings=Settings(max_tokens=2), out=out)
    evaluate(engine, ROWS[:1], make_methods(["full", "reuse"]), settings=settings, out=out)
    with BlendEngine.from_pretrained(tmp_path / "other" / "tiny-llama", device="cpu") as other:
        evaluate(other, ROWS[:1], methods, settings=settings, out=out)
    assert len(list(out.iterdir())) == 6
    assert evaluate(engine, ROWS[:1], methods, settings=settings, out=out).resumed == 1


def test_other_code_or_libraries_are_another_run(
    engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods, settings = make_methods(["full"]), Settings(max_tokens=1)
    first = evaluate(engine, ROWS[:1], methods, settings=settings, out=tmp_path)
    assert set(first.config["libraries"]) >= {"torch", "transformers"}
    assert f"{torch.get_num_threads()} thread" in first.rows[0].machine
    monkeypatch.setattr(provenance, "code_digest", lambda parts: "changed")
    evaluate(engine, ROWS[:1], methods, settings=settings, out=tmp_path)
    versions = provenance.versions()
    monkeypatch.setattr(provenance, "versions", lambda: versions | {"transformers": "4.0"})
    evaluate(engine, ROWS[:1], methods, settings=settings, out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_digest_is_of_source_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "engines").mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "engines" / "provenance.py"))
    found = set()
    for name, text in (("a", "1"), ("a", "2"), ("b", "2")):
        file = package / "engines" / f"{name}.py"
        file.write_text(text)
        (package / "engines" / "notes.txt").write_text(f"{name}{text}")
        provenance.code_digest.cache_clear()
        digest = provenance.code_digest(("engines",))
        assert digest == provenance.code_digest(("engines",))
        found.add(digest)
        file.unlink()
    provenance.code_digest.cache_clear()
    assert len(found) == 3
