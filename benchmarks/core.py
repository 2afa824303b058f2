"""The figures of the core, in one run: `python benchmarks/core.py --out docs/results/core.json`.

Prints a table of each figure beside its bar, and writes everything that was measured. About half an hour on two cores.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cacheblend.bench import memory, plan, ttft


@dataclass(frozen=True)
class Figure:
    """One line of the table: `value` is held against `bar`, from above or from below."""

    what: str
    value: float
    bar: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def arm(result: dict[str, Any], name: str, ratio: float | None = None, store: str | None = "memory") -> dict[str, Any]:
    return next(a for a in result["arms"] if (a["arm"], a["ratio"], a["store"]) == (name, ratio, store))


def median(entry: dict[str, Any]) -> float:
    return float(entry["ttft_s"]["median"])


def measure(shape: str, threads: int, runs: int, console: Console) -> dict[str, Any]:
    def progress(done: int, total: int, name: str) -> None:
        console.print(f"  round {done} of {total - 1}: {name}", highlight=False)

    base = ttft.TtftSettings(shape=shape, threads=threads, runs=runs)
    every = replace(base, ratios=(0.15, 0.05, 1.0), arms=("full", "prefix", "reuse", "blend", "miss"))
    raw: dict[str, Any] = {}
    console.print("8 x 512, all arms")
    raw["8x512"] = ttft.run(replace(every, stores=("memory", "disk")), progress)
    for chunks in (8, 16, 32):
        console.print(f"{chunks} x 512, full and blend")
        few = min(runs, 3 if chunks < 32 else 2)
        raw[f"length-{chunks}x512"] = ttft.run(replace(base, chunks=chunks, arms=("full", "blend"), runs=few), progress)
    raw["plan"] = plan.run()
    with tempfile.TemporaryDirectory() as folder:
        raw["plan-disk"] = plan.run(store=folder)
    console.print("peak memory")
    raw["memory"] = memory.run(base, progress)
    return raw


def figures(raw: dict[str, Any]) -> list[Figure]:
    main = raw["8x512"]
    full = median(arm(main, "full", store=None))
    blend = arm(main, "blend", 0.15)
    lengths = {n: arm(raw[f"length-{n}x512"], "blend", 0.15)["speedup_vs_full"] for n in (8, 16, 32)}
    return [
        Figure("full / blend, r = 0.15", full / median(blend), 5.0, True),
        Figure("full / blend, r = 0.05", full / median(arm(main, "blend", 0.05)), 9.0, True),
        Figure("gain at 16 x 512 / gain at 8 x 512", lengths[16] / lengths[8], 0.95, True),
        Figure("gain at 32 x 512 / gain at 8 x 512", lengths[32] / lengths[8], 0.95, True),
        Figure("blend / full, r = 1", median(arm(main, "blend", 1.0)) / full, 1.05, False),
        Figure("all miss / full", median(arm(main, "miss", store=None)) / full, 1.05, False),
        Figure("disk / memory, r = 0.15", median(arm(main, "blend", 0.15, "disk")) / median(blend), 1.1, False),
        Figure("names and plan, 32k tokens, 64 chunks, ms", 1e3 * raw["plan"]["plan_s"]["median"], 20.0, False),
        Figure("the same, disk, ms", 1e3 * raw["plan-disk"]["plan_s"]["median"], 20.0, False),
        Figure("(peak of blend - peak of full) / KV cache", raw["memory"]["excess_over_kv"], 1.5, False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    console = Console()
    raw = measure(options.shape, options.threads, options.runs, console)
    found = figures(raw)
    table = Table("figure", "value", "bar", "reached")
    for f in found:
        table.add_row(
            f.what, f"{f.value:.3f}", f"{'>=' if f.at_least else '<='} {f.bar:g}", "yes" if f.reached else "NO"
        )
    console.print(table)
    facts = [{"what": f.what, "value": f.value, "bar": f.bar, "reached": f.reached} for f in found]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"figures": facts, "raw": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
