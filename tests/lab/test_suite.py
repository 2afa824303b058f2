"""The suite's figures from cells made by hand; what is run; what is finished."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation.records import CONFIG, ROWS, Cell, RowResult
from lab.nano.scenes import CATEGORIES
from lab.suite.figures import ACROSS, BARS, at_equal_compute, figures
from lab.suite.suite import (
    ABLATIONS,
    HOP_RATIOS,
    SWEEP_RATIOS,
    Suite,
    finished_seeds,
    lean_selector,
    sweep_methods,
)

METHODS = ("full", "reuse", "blend", "blend lean", "random rows")
COMPUTE = {"full": 1.0, "reuse": 0.02, "blend": 0.16, "blend lean": 0.11, "random rows": 0.162}
PER_CATEGORY = 10
HELD = {"holds": True, "rows": 800}


def make_rows(wrong: dict[tuple[str, str], int] | None = None, without: tuple[str, ...] = ()) -> list[RowResult]:
    """All right but the first so many of (method, category); no cell of the categories in `without`."""
    plain = {("reuse", "cross"): 8} | {("random rows", category): 7 for category in ACROSS}
    wrong = plain | (wrong or {})
    rows = []
    for category in CATEGORIES:
        for number in range(PER_CATEGORY):
            cells = [
                Cell(method, None, 3, answer="no" if number < wrong.get((method, category), 0) else "yes")
                for method in METHODS
                if category not in without
            ]
            cells = [Cell(**asdict(cell) | {"total_compute": COMPUTE[cell.method]}) for cell in cells]
            rows.append(RowResult(len(rows), f"1-{len(rows)}", category, ["yes"], cells))
    return rows


def test_every_bar_has_a_figure_and_holds_where_all_is_well() -> None:
    found = figures(make_rows(), HELD)
    assert set(found["bars"]) == set(BARS)
    assert set(found["figures"]) == {*BARS, "random_compute"}
    assert all(bar["ok"] is True for bar in found["bars"].values())
    assert found["figures"]["full_min"] == 100
    assert found["figures"]["reuse_cross_loss"] == 80
    assert found["figures"]["blend_over_random"] == 70
    assert found["figures"]["random_compute"] == pytest.approx(16.2)
    assert found["figures"]["gate_holds"] is True
    assert found["bars"]["gate_holds"]["n"] == 800
    assert found["bars"]["blend_compute"] == {
        "value": pytest.approx(16), "bar": 17, "at": "most", "ok": True,
        "low": pytest.approx(16), "high": pytest.approx(16), "n": 100,
    }  # fmt: skip


def test_a_worst_figure_carries_its_category_and_that_one_s_interval() -> None:
    bar = figures(make_rows({("blend", "chain"): 1, ("blend", "local"): 2}), HELD)["bars"]["blend_worst_loss"]
    assert (bar["value"], bar["category"], bar["n"], bar["ok"]) == (20, "local", PER_CATEGORY, False)
    assert 0 <= bar["low"] < 20 < bar["high"] <= 60


@pytest.mark.parametrize("category", ["chain2", "chain3", "list"])
def test_no_category_is_spared(category: str) -> None:
    found = figures(make_rows({("blend", category): 4, ("blend lean", category): 4}), HELD)["bars"]
    assert (found["blend_worst_loss"]["value"], found["blend_worst_loss"]["category"]) == (40, category)
    for key in ("blend_worst_loss", "blend_loss", "lean_loss"):
        assert found[key]["ok"] is False
    assert found["lean_loss"]["value"] == 4


def test_intervals_of_differences_are_paired() -> None:
    wrong = {("full", "cross"): 5, ("reuse", "cross"): 5}  # the same rows
    bar = figures(make_rows(wrong), HELD)["bars"]["reuse_cross_loss"]
    assert (bar["value"], bar["low"], bar["high"], bar["ok"]) == (0, 0, 0, False)


def test_a_category_without_a_cell_makes_its_figures_none_and_no_other() -> None:
    found = figures(make_rows(without=("chain",)), HELD)
    unknown = {key for key, value in found["figures"].items() if value is None}
    assert unknown == {
        "full_hard_chain_min", "blend_compute", "blend_loss", "blend_worst_loss", "blend_over_random",
        "random_compute", "lean_compute", "lean_loss",
    }  # fmt: skip
    assert all(found["bars"][key]["ok"] is None and found["bars"][key]["reason"] for key in unknown & set(BARS))


def test_a_skipped_cell_is_no_cell() -> None:
    rows = make_rows()
    skipped = [
        RowResult(row.number, row.id, row.category, row.answers, [Cell("full", None, 3, skipped="too long")])
        for row in rows
    ]
    assert all(value is None for key, value in figures(skipped, HELD)["figures"].items() if key != "gate_holds")


def test_what_was_not_run_is_none_with_a_reason() -> None:
    found = figures([], None)
    assert set(found["figures"].values()) == {None}
    assert {bar["reason"] for bar in found["bars"].values()} == {"this part was not run"}
    no_profile = figures([], {"reason": "no profile"})["bars"]["gate_holds"]
    assert (no_profile["value"], no_profile["ok"], no_profile["reason"]) == (None, None, "no profile")


def test_a_gate_that_does_not_hold_is_a_missed_bar() -> None:
    assert figures(make_rows(), {"holds": False, "rows": 20})["bars"]["gate_holds"]["ok"] is False


def test_equal_compute_is_read_between_neighbours_and_never_beyond() -> None:
    def method(family: str, compute: float | None, mean: float) -> dict[str, Any]:
        scores = {"em": {"all": {"mean": mean}, "by_category": {"cross": {"mean": mean / 2}, "local": None}}}
        return {"kind": "blend", "family": family, "total_compute": compute, "scores": scores}

    methods = [method("a", 0.3, 0.9), method("a", 0.1, 0.5), method("b", 0.5, 0.7), method("b", None, 0.0)]
    found = at_equal_compute({"methods": methods, "categories": ["cross", "local"]}, (0.05, 0.2, 0.3))
    assert found[0]["family"] == "a"
    assert found[0]["all"] == [None, pytest.approx(70), pytest.approx(90)]
    assert found[0]["by_category"]["cross"] == [None, pytest.approx(35), pytest.approx(45)]
    assert found[0]["by_category"]["local"] == [None, None, None]
    assert found[1]["all"] == [None, None, None]


def test_the_sweep_has_every_selector_at_real_ratios() -> None:
    labels = [method.label for method in sweep_methods()]
    by_family: dict[str, list[float | None]] = {}
    for label in labels:
        by_family.setdefault(label.family, []).append(label.ratio)
    four = list(SWEEP_RATIOS)
    for family in (
        "hkvd gradual",
        "hkvd @1",
        "hkvd @2",
        "hkvd:measure=v @1",
        "hybrid @2",
        "hybrid @4",
        "head",
        "random",
    ):
        assert by_family[family] == four
    following = [family for family in by_family if family.startswith("query:") and "hop_rows=" in family]
    assert len(following) == 1 + sum(map(len, ABLATIONS.values()))
    assert all(by_family[family] == list(HOP_RATIOS) for family in following)
    assert len([family for family in by_family if family.startswith("hybrid:early_ratio=")]) == 3
    assert set(by_family["query"]) > set(four)
    assert len({label.name for label in labels}) == len(labels)


def test_the_lean_profile_that_ships_is_a_blend_of_the_question() -> None:
    assert lean_selector().question_rows > 0


def test_parts_are_sized_by_the_rows_of_a_category() -> None:
    assert (Suite().sweep_per_category, Suite().gate_rows) == (100, 802)
    assert (Suite(1).sweep_per_category, Suite(1).gate_rows) == (1, 20)


def test_an_unknown_part_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="'swap'; choose from main, sweep, gate"):
        Suite(parts=("swap",))


def write_seed(folder: Path, name: str, rows: int, wanted: int, tail: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / CONFIG).write_text(json.dumps({"rows": wanted}))
    lines = [json.dumps(asdict(RowResult(number, "", "cross", ["yes"], []))) for number in range(rows)]
    (folder / name / ROWS).write_text("".join(f"{line}\n" for line in lines) + tail)


def test_only_seeds_with_all_their_rows_are_finished(tmp_path: Path) -> None:
    write_seed(tmp_path, "seed-1-0123456789ab", rows=2, wanted=2)
    write_seed(tmp_path, "seed-2-0123456789ab", rows=1, wanted=2, tail='{"number": 1,')
    write_seed(tmp_path, "seed-3-else", rows=2, wanted=2)
    (tmp_path / "seed-4-0123456789ab").mkdir()
    found = finished_seeds(tmp_path)
    assert list(found) == [1]
    assert [row.number for row in found[1]] == [0, 1]


def test_a_damaged_row_of_another_seed_is_named(tmp_path: Path) -> None:
    write_seed(tmp_path, "seed-1-0123456789ab", rows=1, wanted=2, tail="{}\n")
    with pytest.raises(InvalidInputError, match="seed-1-0123456789ab: damaged"):
        finished_seeds(tmp_path)
