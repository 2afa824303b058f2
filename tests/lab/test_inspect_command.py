"""`python -m lab inspect` end to end on a tiny model: what it prints, what it writes, how it fails."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, runner
from lab.cli import main
from tiny_folder import TinyShape, build_tiny

PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather.",
    "Mussels grow on ropes, and the harvest stops when <b>algae</b> & worms are found.",
    "A clock that shows the tide needs a wheel for the moon.",
]
SHAPE = TinyShape(layers=4, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)
FIGURES = [
    "attention-by-chunk.png",
    "attention-deviation-by-layer.png",
    "attention-deviation-by-ratio.png",
    "kv-deviation-distribution.png",
    "kv-deviation.png",
    "rank-correlation.png",
]
ASK = ("--question", "When was it lit?", "--system", "Answer from the passages.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "tiny-llama"
    build_tiny(folder, PASSAGES, SHAPE)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys, "inspect", main=main)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"ctxs": [{"title": "", "text": text} for text in PASSAGES], "question": "When was it lit?"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    return file


def is_picture(file: Path) -> bool:
    return file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 10_000


def test_inspect_shows_every_layer(run: Run, model: Path, data: Path) -> None:
    result = run("-m", model, "-d", data, "--no-curve", "--system", "Answer.", "--check-layers", 1)
    assert result.code == 0
    layers = re.findall(r"^ +(\d) +0\.\d{3} ", result.out, re.MULTILINE)
    assert layers == ["0", "1", "2", "3"]
    assert re.search(r"blend recomputes \d+ \(1\d\.\d %\)", result.out)
    assert "note:" not in result.out


def test_inspect_writes_figures_page_and_numbers(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "a" / "figures"
    result = run("-m", model, "-d", data, "--system", "Answer.", "-r", 0.3, "--check-layers", 1, "--out", out, "--json")
    assert result.code == 0
    assert sorted(file.name for file in out.iterdir()) == sorted([*FIGURES, "heat_map.html", "inspection.json"])
    assert all(is_picture(out / name) for name in FIGURES)
    assert sorted(result.json["files"]) == sorted(str(file) for file in out.iterdir())

    page = (out / "heat_map.html").read_text()
    shown = "".join(re.findall(r'<span data-at="\d+"[^>]*>([^<]*)</span>', page))
    assert "&lt;" in shown and "<b>algae" not in page

    numbers = json.loads((out / "inspection.json").read_text())
    assert len(numbers["tokens"]) == result.json["prompt_tokens"] == len(numbers["kv_deviation"]["blend"][3])
    assert "".join(numbers["tokens"]).count(PASSAGES[1]) == 1
    assert len(numbers["recomputed"]) == round(0.3 * result.json["loaded_tokens"])
    assert list(numbers["attention_deviation_by_ratio"]) == ["hkvd", "random"]
    assert result.json["layers"][2] == numbers["layers"][2]


@pytest.mark.parametrize("selector", ["query", "hybrid", "head", "all", "none"])
def test_inspect_takes_every_selector(run: Run, model: Path, data: Path, tmp_path: Path, selector: str) -> None:
    result = run("-m", model, "-d", data, "--selector", selector, "--no-curve", "--json")
    assert result.code == 0
    last = result.json["layers"][-1]
    assert last["attention_deviation"]["blend"] <= last["attention_deviation"]["reuse"] * 1.5
    if selector == "all":
        assert last["attention_deviation"]["blend"] < 1e-4
        assert result.json["recomputed_tokens"] == result.json["loaded_tokens"]


def test_inspect_of_some_layers(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("-m", model, "-d", data, "--no-curve", "--json")
    assert [layer["layer"] for layer in run(*options, "--layers", "3,0-1").json["layers"]] == [0, 1, 3]
    first = run(*options, "--layers", "0", "--out", tmp_path / "first")
    assert first.code == 0  # nothing deviates there, and everything is drawn all the same
    assert is_picture(tmp_path / "first" / "kv-deviation.png")


def test_inspect_stores_the_passages(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run("-m", model, "-d", data, "-s", store, "--no-curve").code == 0
    assert list(store.rglob("*.safetensors"))


def test_inspect_without_matplotlib(run: Run, model: Path, data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("-m", model, "-d", data, "--no-curve", "--out", tmp_path / "out")
    assert result.code == 0
    assert "pip install 'cacheblend[plot]'" in result.err
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["heat_map.html", "inspection.json"]


def test_a_chunk_that_is_exact_is_named(run: Run, model: Path) -> None:
    result = run("-m", model, "--no-curve", "-q", "When?", "-p", PASSAGES[0], "-p", PASSAGES[1])
    assert result.code == 0
    assert "note: chunk 1 is an exact prefix" in result.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-q", "When?"), "no passage to inspect"),
        (("-p", PASSAGES[0]), "no question"),
        (("-q", "When?", "-p", PASSAGES[0]), "nothing of this prompt is reused at a new position"),
        ((*ASK, "-p", PASSAGES[0], "--max-prompt-tokens", 9), "inspection takes 9"),
        ((*ASK, "-p", PASSAGES[0], "--layers", "1-x"), "not '1-x'"),
        ((*ASK, "-p", PASSAGES[0], "--layers", "3-2"), "not '3-2'"),
        ((*ASK, "-p", PASSAGES[0], "--layers", "1,4"), "layers 0..3"),
        ((*ASK, "-p", PASSAGES[0], "--out", "{file}"), "cannot be made"),
        ((*ASK, "-p", PASSAGES[0], "--check-layers", 4), "check layer 4 does not exist"),
        ((*ASK, "-p", PASSAGES[0], "-r", 2), "0..1"),
        ((*ASK, "-p", PASSAGES[0] * 50), "context 512"),
    ],
)
def test_bad_input(run: Run, model: Path, data: Path, options: tuple[object, ...], message: str) -> None:
    result = run("-m", model, *(str(data) if option == "{file}" else option for option in options))
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") <= 2


def test_a_model_that_cannot_be_blended(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = run("-m", tmp_path, *ASK, "-p", PASSAGES[0], "--json")
    assert result.code == 2
    assert "error" in result.json
