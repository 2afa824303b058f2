"""The table of what runs in vLLM: what docs/vllm.md says, what tests have recorded, and how a run adds to it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_table import FAILS, NOT_RUN, REFUSED, RESULTS, merge, verdicts

TEXT = (RESULTS.parents[1] / "vllm.md").read_text(encoding="utf-8")
RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_families_are_those_that_were_recorded_and_nothing_fails() -> None:
    told = re.search(r"\]\(results/vllm-reach\.json\)\): ([a-z0-9_, \n-]+)\.", TEXT)
    assert told is not None
    rest = {name: verdict for name, verdict in RECORDED["families"].items() if not verdict.startswith("blends")}
    blended = RECORDED["families"].keys() - rest
    assert set(re.split(r",\s+", told[1])) == blended
    assert RECORDED["figures"]["families"] == len(blended)
    assert all(f"`{name}`" in TEXT and verdict.startswith(NOT_RUN) for name, verdict in rest.items())
    counted = [verdict for verdict in RECORDED["features"].values() if not verdict.startswith(REFUSED)]
    assert not any(verdict.startswith(FAILS) for verdict in counted)
    assert RECORDED["figures"]["features"] == len(counted)
    assert RECORDED["figures"]["wrong"] == 0


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
