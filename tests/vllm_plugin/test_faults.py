"""Errors, delays, damage and races inside the plug-in: no engine ends, no answer is wrong, nothing is left behind."""

import importlib
import json
from typing import Any

from campaign import share
from lab.faults.injection import PLACES
from lab.faults.run import Settings, run


def check_harmless(found: dict[str, Any]) -> None:
    bad = {name: found["figures"][name] for name in ("wrong", "ended", "hung", "left")}
    assert not any(bad.values()), (bad, json.dumps(found["campaigns"]["faults"], indent=1))


def test_a_fault_costs_its_request_the_blend_and_nothing_else() -> None:
    tried = 20 + share(40)
    found = run(Settings(tried=tried, seed=3, only=("faults",), engines=("one rank", "two ranks")))
    assert found["figures"]["tried"] >= tried
    check_harmless(found)


def test_blocks_damaged_on_both_ranks_hold_nobody_up() -> None:
    found = run(Settings(tried=4 + share(6), seed=4, only=("faults",), engines=("two ranks, ratio 1",)))
    check_harmless(found)


def test_one_lookup_a_request_and_one_blend_of_equal_prompts() -> None:
    found: dict[str, Any] = run(Settings(only=("lookups", "equal")))
    assert found["figures"]["lookups_per_request"] == 1, found["campaigns"]["lookups"]
    assert found["figures"]["equal_prompts"] <= 1.1, found["campaigns"]["equal"]


def test_no_plain_request_is_answered_otherwise_than_without_the_plugin() -> None:
    """Prompts in pieces; and beside a connector that loads within the step, where vLLM delivers jobs before the forward
    that computes the shared front."""
    found = run(Settings(tried=80, seed=5, only=("pollution",), engines=("pieces", "two connectors")))
    figures, words = found["figures"], json.dumps(found["campaigns"], indent=1)
    assert figures["pollution_tried"] >= 160
    for engine in found["campaigns"]["pollution"]["engines"].values():
        assert engine["blended"] >= 15 and engine["beside"] >= 5, words  # or nothing was shown
    assert (figures["polluted"], figures["wrong"], figures["ended"], figures["hung"]) == (0, 0, 0, 0), words


def test_every_place_of_a_fault_is_there() -> None:
    """A place that was renamed would never be met."""
    for target in PLACES.values():
        module, path = target.split(":")
        owner, name = path.split(".")
        assert callable(getattr(getattr(importlib.import_module(module), owner), name)), target
