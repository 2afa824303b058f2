"""What docs/vllm.md says runs in vLLM, and what tests have recorded in docs/results/vllm-reach.json."""

import json
import re

from vllm_table import FAILS, NOT_RUN, REFUSED, RESULTS

TEXT = (RESULTS.parents[1] / "vllm.md").read_text(encoding="utf-8")
RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_families_are_those_that_were_recorded() -> None:
    told = re.search(r"\]\(results/vllm-reach\.json\)\): ([a-z0-9_, \n-]+)\.", TEXT)
    assert told is not None
    blended = {name for name, verdict in RECORDED["families"].items() if verdict.startswith("blends")}
    assert set(re.split(r",\s+", told[1])) == blended
    assert RECORDED["figures"]["families"] == len(blended)


def test_the_others_are_named_and_nothing_fails() -> None:
    rest = {name: verdict for name, verdict in RECORDED["families"].items() if not verdict.startswith("blends")}
    assert all(f"`{name}`" in TEXT and verdict.startswith(NOT_RUN) for name, verdict in rest.items())
    counted = [verdict for verdict in RECORDED["features"].values() if not verdict.startswith(REFUSED)]
    assert not any(verdict.startswith(FAILS) for verdict in counted)
    assert RECORDED["figures"]["features"] == len(counted)
    assert RECORDED["figures"]["wrong"] == 0
