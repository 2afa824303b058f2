"""Errors, delays and damage inside the plug-in: no engine ends, no answer is wrong, nothing is left behind."""

import json
from typing import Any

from campaign import share
from lab.faults.injection import PLACES
from lab.faults.run import Settings, run
from vllm_running import needs_vllm

pytestmark = needs_vllm


def test_a_fault_costs_its_request_the_blend_and_nothing_else() -> None:
    tried = 20 + share(40)
    found = run(Settings(tried=tried, seed=3, only=("faults",), engines=("one rank", "two ranks")))
    figures, engines = found["figures"], found["campaigns"]["faults"]["engines"]
    words = json.dumps(engines, indent=1)
    assert figures["tried"] >= tried
    bad = {name: figures[name] for name in ("wrong", "ended", "hung", "left")}
    assert bad == {"wrong": 0, "ended": 0, "hung": 0, "left": 0}, words


def test_blocks_damaged_on_both_ranks_hold_nobody_up() -> None:
    found = run(Settings(tried=4 + share(6), seed=4, only=("faults",), engines=("two ranks, ratio 1",)))
    figures = found["figures"]
    bad = {name: figures[name] for name in ("wrong", "ended", "hung", "left")}
    assert bad == {"wrong": 0, "ended": 0, "hung": 0, "left": 0}, json.dumps(found["campaigns"]["faults"], indent=1)


def test_one_lookup_a_request_and_one_blend_of_equal_prompts() -> None:
    found: dict[str, Any] = run(Settings(only=("lookups", "equal")))
    assert found["figures"]["lookups_per_request"] == 1, found["campaigns"]["lookups"]
    assert found["figures"]["equal_prompts"] <= 1.1, found["campaigns"]["equal"]


def test_every_place_of_a_fault_is_there() -> None:
    """A place that was renamed would never be met."""
    import importlib

    for target in PLACES.values():
        module, path = target.split(":")
        owner, name = path.split(".")
        assert callable(getattr(getattr(importlib.import_module(module), owner), name)), target
