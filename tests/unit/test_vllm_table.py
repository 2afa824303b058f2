"""The table of what runs in vLLM: lines of this run replace those of before, and nothing else in the file."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_table import FAILS, REFUSED, merge, verdicts


def report(line: str, verdict: str, outcome: str = "passed", when: str = "call") -> Any:
    told = [("feature", json.dumps([line, verdict]))]
    return SimpleNamespace(
        user_properties=told, outcome=outcome, when=when, failed=outcome == "failed", passed=outcome == "passed"
    )


def test_a_line_fails_if_one_of_its_tests_does_and_is_left_out_if_none_ran() -> None:
    reports = [
        report("a", "blends"),
        report("a", "blends", "failed"),
        report("a", "blends"),
        report("b", "blends", when="setup"),
        report("c", "blends", "skipped", "setup"),
        report("d", REFUSED),
        report("e", "blends", "failed", "setup"),
        SimpleNamespace(user_properties=[("other", "x")], outcome="passed", when="call", failed=False, passed=True),
    ]
    assert verdicts(reports) == {"a": FAILS, "d": REFUSED, "e": FAILS}


def test_other_lines_tables_and_figures_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(
        json.dumps({"families": {"llama": "blends"}, "figures": {"wrong": 0}, "features": {"old": "blends"}})
    )
    assert merge(path, "features", {"new": REFUSED}) == {"new": REFUSED, "old": "blends"}
    found = json.loads(path.read_text())
    assert found["families"] == {"llama": "blends"} and found["figures"] == {"wrong": 0, "features": 1}
    merge(path, "features", {"old": FAILS})
    assert json.loads(path.read_text())["figures"]["features"] == 0
    merge(tmp_path / "none.json", "features", {"one": "blends"})
    assert json.loads((tmp_path / "none.json").read_text())["figures"] == {"features": 1}
