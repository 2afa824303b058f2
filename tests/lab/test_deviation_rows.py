"""`python -m lab evaluate --deviation-rows` end to end on a tiny model."""

import json
from pathlib import Path

import pytest

from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import make_methods
from command_line import Run, runner
from lab.cli import main
from lab.inspection import deviations
from tiny_folder import TinyShape, build_tiny

LAYERS = 3
SHAPE = TinyShape(layers=LAYERS, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=256)
PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather.",
    "Mussels grow on ropes, and the harvest stops when algae are found.",
    "A clock that shows the tide needs a wheel for the moon.",
]
ROWS = [
    {"question": "When was it lit?", "passages": PASSAGES},
    {"question": "Too long?", "passages": [" ".join(PASSAGES)] * 20},
    {"question": "What shows the tide?", "passages": PASSAGES[::-1]},
    {"question": "What grows?", "passages": PASSAGES[1:2]},
]
"""The second does not fit; of the fourth nothing is loaded at a new position."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deviation") / "tiny-llama"
    build_tiny(folder, PASSAGES, SHAPE)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> Run:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    rows = [{**row, "passages": [{"text": text} for text in row["passages"]]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    always = ("evaluate", "-m", model, "-d", "rows.jsonl", "-n", "1", "--device", "cpu")
    return runner(capsys, *map(str, always), main=main)


def test_deviation_is_measured_reported_and_not_measured_twice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ("--selector", "all", "--selector", "hkvd", "--ratio", "0.3", "--deviation-rows", "9")
    result = run(*methods, "--json-file", "all.json")
    assert result.code == 0, result.err
    assert "Deviation from full recompute, 2 rows" in result.out
    err = " ".join(result.err.split())
    assert "deviation: 9 rows were requested, 3 are available" in err
    assert "deviation: in 1 of 3 rows nothing is loaded at a new position" in err
    written = json.loads((tmp_path / "all.json").read_text())
    by_name = {method["method"]: method["deviation"] for method in written["methods"]}
    assert by_name["full"] is None
    for measure in ("kv", "attention"):
        reuse, everything = by_name["reuse"][measure], by_name["blend all"][measure]
        assert len(reuse["mean"]) == LAYERS and by_name["reuse"]["rows"] == 2
        assert max(everything["mean"]) < 1e-4
        assert min(reuse["mean"][1:]) > 1e-3
        assert all(
            low <= mean <= high for low, mean, high in zip(*(reuse[k] for k in ("low", "mean", "high")), strict=True)
        )
        assert (
            by_name["blend hkvd gradual r=0.3"]["kv"]["over_layers"]["mean"]
            < by_name["reuse"]["kv"]["over_layers"]["mean"]
        )
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert (folder / "deviation.png").stat().st_size > 10_000
    assert json.loads((folder / "summary.json").read_text())["deviation"] == written["deviation"]

    monkeypatch.setattr(deviations, "prompt_deviations", lambda *_: pytest.fail("measured again"))
    again = json.loads(run(*methods, "--json").out)
    assert {method["method"]: method["deviation"] for method in again["methods"]} == by_name


def test_without_the_option_nothing_is_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviations, "prompt_deviations", lambda *_: pytest.fail("measured"))
    result = run("--methods", "reuse", "--limit", "1", "--json-file", "all.json")
    assert result.code == 0, result.err
    assert "Deviation" not in result.out and "deviation" not in json.loads((tmp_path / "all.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--deviation-rows", "-1"), "--deviation-rows: -1 is out of range, at least 0"),
        (("--deviation-rows", "2", "--methods", "full"), "reuse and blend, and the methods are full"),
    ],
)
def test_mistakes_are_said_before_anything_is_answered(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split()) and result.out == ""
    assert not (tmp_path / "evaluations").exists()


def test_top_k_are_measured_apart_and_the_store_keeps_what_it_had(model: Path) -> None:
    rows = [QuestionRow(str(r["question"]), tuple(Text(text, "") for text in PASSAGES), ()) for r in ROWS[:1]]
    done: list[tuple[int, int]] = []
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        settings = deviations.Settings(top_k=(1, 2, None), max_tokens=1)
        methods = make_methods(["reuse"])

        def measure() -> deviations.Deviations:
            return deviations.measure_deviations(
                engine, rows, methods, 1, settings=settings, progress=lambda *at: done.append(at)
            )

        found = measure()
        blocks = engine.store.stats()
        measure()
        assert engine.store.stats().bytes == blocks.bytes
    assert done == [(1, 3), (2, 3), (3, 3)] * 2
    assert found.prompts[1] == [{}]  # one passage stands where it was computed
    assert [prompts[0]["reuse"].shape for k, prompts in found.prompts.items() if k != 1] == [(2, LAYERS)] * 2
