"""Three passages, a file of them with a question, a tiny model, a store; and a run of the command line, as fixtures."""

import json
from pathlib import Path

import pytest

from command_line import Run, runner
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
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.json")


@pytest.fixture
def store(run: Run, model: Path, data: Path, tmp_path: Path) -> Path:
    """A store with the three passages."""
    folder = tmp_path / "store"
    assert run("warm", "-m", model, "-s", folder, "-d", data).code == 0
    return folder
