"""`lab sync`: what it counts."""

import json
from pathlib import Path

import pytest

from cacheblend.nano import model_path
from command_line import runner
from lab.cli import main
from random_words import text_of


def test_sync_counts_what_is_computed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "passages.txt"
    data.write_text("\n\n".join(text_of(seed, 12) for seed in range(80)))
    bench = runner(capsys, "sync", "--model", str(model_path()), "--data", str(data), "--json", main=main)
    found = bench("--documents", 9, "--tokens", 400, "--chunk-tokens", 64, "--json-file", tmp_path / "out.json").json
    assert 0 < found["figures"]["sync_recomputed"] < 0.6
    assert found["without_edits"]["computed_tokens"] == 0 and len(found["by_edit"]) == 9
    assert json.loads((tmp_path / "out.json").read_text())["figures"] == found["figures"]
    assert "9 are needed" not in bench("--documents", 2, "--tokens", 50).out
    assert "documents of 400 tokens, 900 are needed" in bench("--documents", 900, "--tokens", 400).json["error"]
