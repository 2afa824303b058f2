"""What runs in vLLM, as tables that tests fill: docs/results/vllm-reach.json, printed at the end of a run.

A test that shows a line has the mark `feature(line, verdict)`; a line fails if one of its tests does. Lines that a run
has no test of stay as they are in the file, and so do the other tables.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "vllm-reach.json"
RECORDED = os.environ.get("REACH_RESULTS")
"""The file that a run writes to (`make test-vllm` names `RESULTS`); None: it only prints."""

REFUSED, FAILS, NOT_RUN = "refused by name", "fails", "not run"


def verdicts(reports: Iterable[Any]) -> dict[str, str]:
    """The verdict of each line that these tests show; a line of which every test was skipped is left out."""
    found: dict[str, str] = {}
    for report in reports:
        for name, told in getattr(report, "user_properties", ()):
            if name != "feature" or report.outcome == "skipped" or (report.when != "call" and report.passed):
                continue
            line, verdict = json.loads(told)
            found[line] = FAILS if report.failed or found.get(line) == FAILS else verdict
    return found


def merge(path: Path, table: str, lines: Mapping[str, str], **figures: float | bool) -> dict[str, str]:
    """Sets lines of a table in a file of results, and figures; the figure of the table's name is how many lines run.

    Returns:
        The whole table.
    """
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    merged = dict(sorted({**known.get(table, {}), **lines}.items()))
    counted = sum(not each.startswith((REFUSED, FAILS, NOT_RUN)) for each in merged.values())
    content = {**known, table: merged, "figures": {**known.get("figures", {}), table: counted, **figures}}
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    written.replace(path)
    return merged
