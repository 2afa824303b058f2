"""Deviation over rows: invariants on tiny models, means and tables by hand, what is kept in the run's folder."""

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
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Evaluation, RowResult, make_methods, summarise
from cacheblend.store import MemoryStore
from families import VOCAB, tiny_model
from lab.cli.evaluate import Deviation
from lab.inspection import inspect_prompt
from lab.inspection.deviation import relative_deviation
from lab.inspection.deviation_file import FILE, DeviationFile
from lab.inspection.deviation_plot import MOST_METHODS, draw_deviation
from lab.inspection.deviation_report import notes, table
from lab.inspection.deviations import (
    Deviations,
    by_layer,
    fused_methods,
    measure_deviations,
    prompt_deviations,
    with_deviations,
)

NAN = float("nan")
KEPT = {"reuse": np.array([[0, 0.5], [0, NAN]])}


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


def test_everything_recomputed_deviates_from_nothing_and_reuse_from_layer_1_on(engine: BlendEngine) -> None:
    found = prompt_deviations(engine, RAG, {"all": AllRows(), "reuse": NoRows()})
    assert found["all"].max() < 1e-4
    assert found["reuse"][:, 0].max() < 1e-4  # layer 0 depends on the token alone
    assert found["reuse"][:, 1:].min() > 1e-3


def test_the_figures_are_those_of_inspect(engine: BlendEngine) -> None:
    found = prompt_deviations(engine, RAG, {"reuse": NoRows(), "blend": Hkvd((1,), (0.3,))})
    seen = inspect_prompt(engine, RAG, Hkvd((1,), (0.3,)))
    for name, method in (("reuse", seen.reuse), ("blend", seen.blend)):
        assert np.allclose(found[name][0], seen.mean_deviation(method), rtol=1e-4)
        assert np.allclose(found[name][1], method.attention_deviation, rtol=1e-4)


def test_a_chunk_at_the_front_is_exact_and_says_nothing(engine: BlendEngine) -> None:
    assert prompt_deviations(engine, Prompt.of([A, QUESTION]), {"reuse": NoRows()}) == {}
    second = prompt_deviations(engine, Prompt.of([A, B, QUESTION]), {"reuse": NoRows()})["reuse"]
    assert second[0, 1:].min() > 1e-3  # of B alone; the exact rows of A do not water it down


def test_relative_by_hand() -> None:
    assert relative_deviation(np.array([[4.0, 0], [9, 36]]), np.array([2.0, 3])).tolist() == [[1, 0], [1, 2]]


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


def test_the_table_has_means_and_the_layer_of_the_largest() -> None:
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


def test_nothing_is_shown_of_a_run_that_measured_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = summary_of(1, prompts=0)
    assert all(method["deviation"] is None for method in summary["methods"])
    Deviation(1, quiet=True).show(summary)
    assert capsys.readouterr().out == ""
    assert draw_deviation(summary, tmp_path) == []


@pytest.mark.parametrize("selectors", [1, MOST_METHODS + 4])
def test_the_plot_is_drawn_of_few_and_of_many_methods(tmp_path: Path, selectors: int) -> None:
    (file,) = draw_deviation(summary_of(selectors), tmp_path, data="a$b$.jsonl")
    assert file.name == "deviation.png" and file.stat().st_size > 10_000


# ---- what is kept ---------------------------------------------------------------------------------------------


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    kept = DeviationFile(tmp_path, ["reuse"])
    kept.add(3, None, KEPT)
    kept.add(3, 10, {})
    again = DeviationFile(tmp_path, ["reuse"]).found
    assert list(again) == [(3, None), (3, 10)] and again[3, 10] == {}
    assert np.array_equal(again[3, None]["reuse"], KEPT["reuse"], equal_nan=True)


def test_of_other_methods_or_other_code_nothing_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DeviationFile(tmp_path, ["reuse"]).add(3, None, KEPT)
    assert DeviationFile(tmp_path, ["reuse", "blend"]).found == {}
    monkeypatch.setattr(provenance, "code_digest", lambda *_: "changed")
    assert DeviationFile(tmp_path, ["reuse"]).found == {}


@pytest.mark.parametrize("damage", ["{", "[]", '{"code": "', "cut", "ragged"])
def test_a_damaged_file_is_an_error(tmp_path: Path, damage: str) -> None:
    DeviationFile(tmp_path, ["reuse"]).add(3, None, KEPT)
    file = tmp_path / FILE
    content = json.loads(file.read_text())
    if damage == "cut":
        del content["prompts"][0]["top_k"]
    elif damage == "ragged":
        content["prompts"][0]["methods"]["reuse"][1] = [0.0]
    file.write_text(json.dumps(content) if damage in ("cut", "ragged") else damage)
    with pytest.raises(InvalidInputError, match=r"deviations.json: damaged .* delete it"):
        DeviationFile(tmp_path, ["reuse"])
