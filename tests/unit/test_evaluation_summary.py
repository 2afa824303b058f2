"""Figures, tables and plots of results made by hand."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cacheblend.evaluation import Cell, Evaluation, RowResult, make_methods, make_scorers, summarise, with_cells
from cacheblend.evaluation.plots import draw
from cacheblend.evaluation.report import notes, tables

METHODS = make_methods(["full", "reuse", "blend"], ratios=[0.1, 0.3])
SCORERS = make_scorers(["em", "f1"], lambda text: [])


def cell(method: int, answer: str, seconds: float, compute: float, top_k: int | None = None) -> Cell:
    name = METHODS[method].label.name
    return Cell(
        name, top_k, 4, "", answer, [len(answer)], seconds, seconds, 100, total_compute=compute, top_1=method != 1
    )


def row(number: int, gold: str | None, answers: list[str], category: str, top_k: int | None = None) -> RowResult:
    cells = [cell(i, answer, 1.0 / (i + 1), 1.0 / (i + 2), top_k) for i, answer in enumerate(answers)]
    return RowResult(number, str(number), category, [] if gold is None else [gold], cells)


def evaluation(rows: list[RowResult], top_k: tuple[int | None, ...] = (None,)) -> Evaluation:
    return Evaluation({"model": "tiny"}, tuple(method.label for method in METHODS), top_k, rows)


ROWS = [
    row(0, "ann", ["ann", "bob", "ann", "ann"], "direct"),
    row(1, "ann", ["ann", "ann", "ann", "ann"], "direct"),
    row(2, "carl", ["bob", "bob", "carl", "carl"], "cross"),
    row(3, None, ["x", "y", "x", "x"], "cross"),
]


def rendered(summary: dict[str, object], width: int = 80) -> str:
    console = Console(width=width, record=True, file=StringIO())
    for table in tables(summary):
        console.print(table)
    return console.export_text()


def test_quality_differences_and_categories() -> None:
    summary = summarise(evaluation(ROWS), SCORERS)
    full, reuse, blend, _ = summary["methods"]
    assert full["scores"]["em"]["all"]["mean"] == pytest.approx(2 / 3)
    assert reuse["scores"]["em"]["all"]["mean"] == pytest.approx(1 / 3)
    assert blend["scores"]["em"]["all"]["n"] == 3  # the row without a gold answer counts for no scorer
    difference = blend["scores"]["em"]["all"]["difference"]
    assert (difference["mean"], difference["n"]) == (pytest.approx(1 / 3), 3)
    assert difference["low"] == 0 and difference["high"] == 1
    assert full["scores"]["em"]["all"]["difference"]["mean"] == 0
    assert reuse["scores"]["em"]["by_category"]["direct"]["mean"] == 0.5
    assert blend["scores"]["f1"]["by_category"]["cross"]["difference"]["mean"] == 1


def test_time_compute_and_agreement() -> None:
    full, reuse, blend, _ = summarise(evaluation(ROWS), SCORERS)["methods"]
    assert (reuse["speedup"], full["speedup"]) == (2, 1)
    assert blend["ttft_s"]["median"] == pytest.approx(1 / 3)
    assert blend["total_compute"] == pytest.approx(1 / 4)
    assert reuse["agreement"]["top_1"]["all"]["mean"] == 0
    assert blend["agreement"]["top_1"]["all"] == {"n": 4, "mean": 1, "low": 1, "high": 1, "difference": None}
    assert reuse["agreement"]["same_answer"]["all"]["mean"] == 1  # as many letters: the ids of this test
    assert reuse["agreement"]["equal_tokens"]["all"]["mean"] == 1
    assert blend["agreement"]["equal_tokens"]["all"]["mean"] == 0.75  # one of four answers differs, at once
    assert blend["agreement"]["same_answer"]["by_category"]["cross"]["mean"] == 0.5


def test_what_was_left_out_is_said() -> None:
    skipped = replace(ROWS[0], number=4, cells=[replace(c, skipped="too long") for c in ROWS[0].cells[3:]])
    cut = replace(ROWS[0], number=5, cells=[], too_long=[(None, "the prompt has 900 tokens")])
    missed = replace(ROWS[0], number=6, cells=[replace(c, missed_tokens=7) for c in ROWS[0].cells[1:2]])
    summary = summarise(evaluation([*ROWS, skipped, cut, missed]), SCORERS)
    assert notes(summary) == [
        "1 of 7 rows have no gold answers and are not scored",
        "1 of 7 prompts exceed the model's context and were skipped",
        "reuse: 1 rows missed passages in the store; enlarge the store",
        "blend hkvd gradual r=0.3: 1 rows skipped: a prompt of its own exceeds the context",
    ]
    assert [method["rows"] for method in summary["methods"]] == [4, 5, 4, 4]


def test_without_any_gold_answer_agreement_is_still_reported() -> None:
    rows = [replace(row, answers=[]) for row in ROWS]
    summary = summarise(evaluation(rows), SCORERS)
    assert summary["methods"][0]["scores"]["em"]["all"] is None
    assert "there are no scores" in notes(summary)[0]
    text = rendered(summary)
    assert "Exact match" not in text and "Agreement with full recompute" in text


def test_tables_name_every_method_and_figure() -> None:
    text = rendered(summarise(evaluation(ROWS), SCORERS))
    for part in (
        "Exact match",
        "F1 by words",
        "blend hkvd gradual r=0.3",
        "66.7 [0.0, 100.0]",
        "+33.3",
        "cross",
        "1st token",
    ):
        assert part in text


def test_eighty_columns_show_every_figure_whole() -> None:
    longer = {method.label.name: method.label.name.replace("hkvd gradual", "hybrid @1,2") for method in METHODS}
    labels = tuple(replace(method.label, name=longer[method.label.name]) for method in METHODS)
    rows = [replace(of, cells=[replace(c, method=longer[c.method]) for c in of.cells]) for of in ROWS]
    text = rendered(summarise(Evaluation({"model": "tiny"}, labels, (None,), rows), SCORERS))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in ("compute, %", "tokens", "KL", "+33.3 [+0.0, +100.0]", "75.0"):
        assert part in text


def test_times_of_several_machines_are_said_to_be_mixed() -> None:
    rows = [replace(of, machine="a processor, 2 threads" if of.number == 3 else "a processor, 1 thread") for of in ROWS]
    assert summarise(evaluation(rows), SCORERS)["machines"] == {
        "a processor, 1 thread": 3,
        "a processor, 2 threads": 1,
    }
    (line,) = [line for line in notes(summarise(evaluation(rows), SCORERS)) if "times" in line]
    assert "a processor, 2 threads: 1 rows" in line
    assert "quality is not affected" in line
    same = [replace(of, machine="a processor, 1 thread") for of in ROWS]
    assert not any("times" in line for line in notes(summarise(evaluation(same), SCORERS)))


def test_a_run_without_full_has_no_differences() -> None:
    labels = tuple(method.label for method in METHODS[1:])
    rows = [replace(row, cells=row.cells[1:]) for row in ROWS]
    summary = summarise(Evaluation({"model": "tiny"}, labels, (None,), rows), SCORERS)
    reuse = summary["methods"][0]
    assert reuse["speedup"] is None
    assert reuse["scores"]["em"]["all"]["difference"] is None
    assert reuse["agreement"]["same_answer"]["all"] is None
    assert rendered(summary)


def test_every_cell_is_written_with_its_scores() -> None:
    found = evaluation(ROWS)
    cells = with_cells(summarise(found, SCORERS), found, SCORERS)["cells"]
    assert cells[2]["cells"][0]["scores"] == {"em": 0, "f1": 0}
    assert cells[2]["cells"][2]["scores"] == {"em": 1, "f1": 1}
    assert "scores" not in cells[3]["cells"][0]


def test_plots_are_drawn_for_what_there_is(tmp_path: Path) -> None:
    files = draw(summarise(evaluation(ROWS), SCORERS), tmp_path, data="rows.json")
    assert [file.name for file in files] == [
        f"{s}-{axis}.png" for s in ("em", "f1") for axis in ("ratio", "ttft", "compute")
    ]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)


def test_without_scores_agreement_is_drawn_and_chunks_where_they_vary(tmp_path: Path) -> None:
    rows = [
        replace(
            row(0, None, ["a", "b", "a", "a"], "", 2), cells=[cell(i, "a", 1, 1, k) for k in (2, 4) for i in range(4)]
        )
    ]
    files = draw(summarise(evaluation(rows, (2, 4)), SCORERS), tmp_path)
    assert [file.name for file in files] == [f"top_1-{axis}.png" for axis in ("ratio", "ttft", "compute", "chunks")]


@pytest.mark.filterwarnings("error")
def test_numbers_of_passages_that_never_fitted_are_not_drawn(tmp_path: Path) -> None:
    rows = [row(0, "a", ["a", "b", "a", "a"], "", 2), row(1, "a", ["a", "a", "a", "a"], "", 2)]
    files = draw(summarise(evaluation(rows, (2, 9)), SCORERS), tmp_path)
    assert "em-compute.png" in {file.name for file in files}
    nothing = [replace(of, cells=[], too_long=[(2, "long")]) for of in rows]
    assert draw(summarise(evaluation(nothing, (2,)), SCORERS), tmp_path) == []
