"""Deviation over rows: invariants on tiny models, means and tables by hand, what is kept; the command end to end."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows
from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Evaluation, RowResult, make_methods, summarise
from cacheblend.store import MemoryStore
from command_line import Run, runner
from families import VOCAB, tiny_model
from lab.cli import main
from lab.cli.evaluation import Deviation
from lab.inspection import deviations
from lab.inspection.deviation_report import MOST_METHODS, draw_deviation, notes, table
from lab.inspection.deviations import (
    Deviations,
    by_layer,
    fused_methods,
    measure_deviations,
    prompt_deviations,
    with_deviations,
)
from lab.inspection.inspection import inspect_prompt
from tiny_folder import TinyShape, build_tiny

NAN = float("nan")


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


A, B = chunk(ids(30, 1)), chunk(ids(18, 2))
FRONT, QUESTION = text(ids(7, 3)), text(ids(9, 4))
RAG = Prompt.of([FRONT, A, B, QUESTION])


@pytest.fixture(scope="module")
def engine() -> BlendEngine:
    config = BlendConfig(block_size=16, capture=False, anchor="none")
    return BlendEngine(tiny_model("llama"), store=MemoryStore(), config=config)


# ---- one prompt -------------------------------------------------------------------------------------------


def test_deviation_of_one_prompt(engine: BlendEngine) -> None:
    # Everything recomputed deviates from nothing and reuse from layer 1 on
    found = prompt_deviations(engine, RAG, {"all": AllRows(), "reuse": NoRows()})
    assert found["all"].max() < 1e-4
    assert found["reuse"][:, 0].max() < 1e-4  # layer 0 depends on the token alone
    assert found["reuse"][:, 1:].min() > 1e-3
    # The figures are those of inspect
    found = prompt_deviations(engine, RAG, {"reuse": NoRows(), "blend": Hkvd((1,), (0.3,))})
    seen = inspect_prompt(engine, RAG, Hkvd((1,), (0.3,)))
    for name, method in (("reuse", seen.reuse), ("blend", seen.blend)):
        assert np.allclose(found[name][0], seen.mean_deviation(method), rtol=1e-4)
        assert np.allclose(found[name][1], method.attention_deviation, rtol=1e-4)
    # A chunk at the front is exact and says nothing
    assert prompt_deviations(engine, Prompt.of([A, QUESTION]), {"reuse": NoRows()}) == {}
    second = prompt_deviations(engine, Prompt.of([A, B, QUESTION]), {"reuse": NoRows()})["reuse"]
    assert second[0, 1:].min() > 1e-3  # of B alone; the exact rows of A do not water it down


# ---- many ---------------------------------------------------------------------------------------------------


def test_means_and_intervals_by_hand() -> None:
    first, second = np.array([[0, 1.0], [0.2, NAN]]), np.array([[0, 3.0], [0.4, NAN]])
    found = by_layer([{"reuse": first}, {}, {"reuse": second}])["reuse"]
    assert found["rows"] == 2  # nothing was loaded of the one between
    assert found["kv"]["mean"] == [0, 2] and (found["kv"]["low"], found["kv"]["high"]) == ([0, 1], [0, 3])
    assert found["kv"]["over_layers"] == {"mean": 1, "low": 0.5, "high": 1.5}
    assert found["attention"]["mean"] == [pytest.approx(0.3), None]
    assert found["attention"]["low"][1] is None
    assert found["attention"]["over_layers"]["mean"] == pytest.approx(0.3)  # of the layers that say something
    assert by_layer([{}, {}]) == {} and by_layer([]) == {}


def test_what_cannot_be_measured(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="reuse and blend, and the methods are full, map-reduce"):
        fused_methods(make_methods(["full", "map-reduce"]))
    with pytest.raises(InvalidInputError, match="at least 1 row, got -3"):
        measure_deviations(engine, [], make_methods(["reuse"]), -3)
    assert [method.label.name for method in fused_methods(make_methods())] == ["reuse", "blend hkvd gradual r=0.15"]


# ---- table, notes, plot --------------------------------------------------------------------------------------


def summary_of(selectors: int, prompts: int = 2, asked: int = 2) -> dict[str, Any]:
    methods = make_methods(["full", "reuse", "blend"], ratios=[0.1 + 0.01 * i for i in range(selectors)])
    rows = [RowResult(number, str(number), "", [], []) for number in range(3)]
    summary = summarise(Evaluation({"model": "$tiny"}, tuple(method.label for method in methods), (None,), rows))
    found = [
        {method.label.name: np.array([[0, 0.125, 0.25], [0, 0.75, NAN]]) + i for method in fused_methods(methods)}
        for i in range(prompts)
    ]
    return with_deviations(summary, Deviations(asked, {None: [*found, {}]}))


def test_the_table_has_means_and_the_layer_of_the_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The table has means and the layer of the largest
    summary = summary_of(1, prompts=1, asked=5)
    assert [method["deviation"] is None for method in summary["methods"]] == [True, False, False]
    console = Console(width=80, file=StringIO(), record=True)
    console.print(table(summary))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "Deviation from full recompute, 1 rows" in lines
    assert "reuse 0.125 0.250, 2 0.375 0.750, 1" in lines
    assert notes(summary) == [
        "deviation: 5 rows were requested, 2 are available",
        "deviation: in 1 of 2 rows nothing is loaded at a new position, so there is nothing to measure",
    ]
    json.dumps(summary, allow_nan=False)
    # Nothing is shown of a run that measured nothing
    summary = summary_of(1, prompts=0)
    assert all(method["deviation"] is None for method in summary["methods"])
    Deviation(1, quiet=True).show(summary)
    assert capsys.readouterr().out == ""
    assert draw_deviation(summary, tmp_path) == []


@pytest.mark.parametrize("selectors", [1, MOST_METHODS + 4])
def test_the_plot_is_drawn_of_few_and_of_many_methods(tmp_path: Path, selectors: int) -> None:
    (file,) = draw_deviation(summary_of(selectors), tmp_path, data="a$b$.jsonl")
    assert file.name == "deviation.png" and file.stat().st_size > 10_000


# ---- the command --------------------------------------------------------------------------------------------

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
                engine, rows, methods, 1, settings=settings, advance=lambda *at: done.append(at)
            )

        found = measure()
        blocks = engine.store.stats()
        measure()
        assert engine.store.stats().bytes == blocks.bytes
    assert done == [(1, 3), (2, 3), (3, 3)] * 2
    assert found.prompts[1] == [{}]  # one passage stands where it was computed
    assert [prompts[0]["reuse"].shape for k, prompts in found.prompts.items() if k != 1] == [(2, LAYERS)] * 2
