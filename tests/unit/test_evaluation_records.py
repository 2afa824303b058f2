"""The folder of results: what is kept, what an interruption leaves, who may write."""

from dataclasses import asdict
from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation import Cell, RowResult
from cacheblend.evaluation.records import ROWS, RowLog, folder_name


def row(number: int) -> RowResult:
    cell = Cell("full", None, 3, answer="Größe", token_ids=[1, 2], ttft_s=0.25, kl=0.5, top_1=True)
    return RowResult(number, f"id{number}", "direct", ["Ann"], [cell], [(5, "too long")])


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    with RowLog(tmp_path / "run", {"a": 1}) as log:
        log.add(row(0))
        log.add(row(2))
    with RowLog(tmp_path / "run", {"a": 1}) as log:
        assert log.rows == {0: row(0), 2: row(2)}
        assert not log.torn


def test_rows_of_earlier_versions_which_call_a_method_arm_are_read(tmp_path: Path) -> None:
    with RowLog(tmp_path / "run", {}) as log:
        log.add(row(0))
    file = tmp_path / "run" / ROWS
    file.write_text(file.read_text().replace('"method":', '"arm":'))
    with RowLog(tmp_path / "run", {}) as log:
        assert log.rows == {0: row(0)}


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    with RowLog(tmp_path / "run", {}) as log:
        log.add(row(0))
        log.add(row(1))
    file = tmp_path / "run" / ROWS
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with RowLog(tmp_path / "run", {}) as log:
        assert log.torn and list(log.rows) == [0]
        log.add(row(1))
    assert file.read_bytes() == whole


def test_a_line_damaged_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with RowLog(tmp_path / "run", {}) as log:
        log.add(row(0))
        log.add(row(1))
    file = tmp_path / "run" / ROWS
    file.write_bytes(b"{" + file.read_bytes())
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 1: damaged .*delete that line"):
        RowLog(tmp_path / "run", {})


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with RowLog(tmp_path / "run", {}), pytest.raises(InvalidInputError, match="written by another process"):
        RowLog(tmp_path / "run", {})
    RowLog(tmp_path / "run", {}).close()


def test_without_a_folder_rows_stay_in_memory() -> None:
    with RowLog(None, {}) as log:
        log.add(row(3))
        assert asdict(log.rows[3]) == asdict(row(3))


def test_a_folder_is_named_by_what_shapes_its_results() -> None:
    name = folder_name("my model/x y", {"a": 1, "b": [2]})
    assert name == folder_name("my model/x y", {"b": [2], "a": 1})
    assert name != folder_name("my model/x y", {"a": 1, "b": [3]})
    assert name.startswith("my-model-x-y-") and "/" not in name
    assert folder_name("../..", {}).startswith("run-")
