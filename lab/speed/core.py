"""The figures that blending is held to, in one run: speedups, overheads, planning time, peak memory; each has a bar.

Takes about half an hour on two cores.
"""

import tempfile
from dataclasses import replace
from typing import Any

from rich.table import Table

from cacheblend.bench import ttft
from lab.bench import Advance, plain_table, silent
from lab.speed import memory, plan

LENGTHS = (8, 16, 32)
"""Chunks of 512 tokens; the speedup must hold at each."""
PARTS = 3 + len(LENGTHS)


def run(settings: ttft.TtftSettings, advance: Advance = silent) -> dict[str, Any]:
    """Measures everything; `figures` beside the raw results. Of the settings model, runs, threads and seed count."""
    raw: dict[str, Any] = {}

    def done() -> None:
        advance(len(raw) - ("plan-disk" in raw), PARTS)

    every = replace(settings, ratios=(0.15, 0.05, 1.0), arms=("full", "prefix", "reuse", "blend", "miss"))
    raw["8x512"] = ttft.run(replace(every, stores=("memory", "disk")))
    done()
    for chunks in LENGTHS:
        few = min(settings.runs, 3 if chunks < max(LENGTHS) else 2)
        raw[f"length-{chunks}x512"] = ttft.run(replace(settings, chunks=chunks, arms=("full", "blend"), runs=few))
        done()
    raw["plan"] = plan.run()
    with tempfile.TemporaryDirectory() as folder:
        raw["plan-disk"] = plan.run(store=folder)
    done()
    raw["memory"] = memory.run(settings)
    done()
    return {"figures": figures(raw), "raw": raw}


def figures(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """What is measured, its value and its bar; ``at_least``: the least that the value may be, otherwise the most."""
    main = raw["8x512"]
    full = _median(_arm(main, "full", store=None))
    blend = _arm(main, "blend", 0.15)
    gains = {n: _arm(raw[f"length-{n}x512"], "blend", 0.15)["speedup_vs_full"] for n in LENGTHS}
    bars = [
        ("full / blend, r = 0.15", full / _median(blend), 5.0, True),
        ("full / blend, r = 0.05", full / _median(_arm(main, "blend", 0.05)), 9.0, True),
        ("gain at 16 x 512 / gain at 8 x 512", gains[16] / gains[8], 0.95, True),
        ("gain at 32 x 512 / gain at 8 x 512", gains[32] / gains[8], 0.95, True),
        ("blend / full, r = 1", _median(_arm(main, "blend", 1.0)) / full, 1.05, False),
        ("all miss / full", _median(_arm(main, "miss", store=None)) / full, 1.05, False),
        ("disk / memory, r = 0.15", _median(_arm(main, "blend", 0.15, "disk")) / _median(blend), 1.1, False),
        ("names and plan, 32k tokens, 64 chunks, ms", 1e3 * raw["plan"]["plan_s"]["median"], 20.0, False),
        ("the same, disk, ms", 1e3 * raw["plan-disk"]["plan_s"]["median"], 20.0, False),
        ("(peak of blend - peak of full) / KV cache", raw["memory"]["excess_over_kv"], 1.5, False),
    ]
    names = ("what", "value", "bar", "at_least", "reached")
    return [dict(zip(names, (*one, one[1] >= one[2] if one[3] else one[1] <= one[2]), strict=True)) for one in bars]


def table(result: dict[str, Any]) -> Table:
    """A line for each figure: its value, its bar, whether it is reached."""
    verdicts = {True: "yes", False: "NO"}
    rows = [
        {**each, "is": verdicts[each["reached"]], "at": ">=" if each["at_least"] else "<="}
        for each in result["figures"]
    ]
    columns = {"value": "{value:.3f}", "bar": "{at} {bar:g}", "reached": "{is}"}
    return plain_table("Figures and their bars", {"figure": "{what}"}, columns, rows=rows)


def _arm(result: dict[str, Any], name: str, ratio: float | None = None, store: str | None = "memory") -> dict[str, Any]:
    return next(a for a in result["arms"] if (a["arm"], a["ratio"], a["store"]) == (name, ratio, store))


def _median(entry: dict[str, Any]) -> float:
    return float(entry["ttft_s"]["median"])
