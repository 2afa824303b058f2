"""The suite's figures and the bars that they must reach, computed from cells; runs nothing.

Units: points of exact match, and per cent of the compute of a full prefill. A figure without cells is None.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from cacheblend.evaluation.bootstrap import bootstrap_means
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.scorers import ExactMatch, best
from lab.nano.questions import CONTROLS
from lab.nano.scenes import CATEGORIES
from lab.suite.suite import BLEND, LEAN_BLEND, RANDOM_ROWS

ACROSS = tuple(name for name in CATEGORIES if name not in (*CONTROLS, "unanswerable"))
"""Categories whose answers need another passage than the one that names the thing."""

HARD = ("cross-hard", "chain", "chain2", "chain3", "list")

BARS: dict[str, tuple[Literal["least", "most"], float]] = {
    "full_min": ("least", 97),
    "full_hard_chain_min": ("least", 90),
    "full_comparison": ("least", 80),
    "reuse_control_loss": ("most", 2),
    "reuse_cross_loss": ("least", 40),
    "blend_compute": ("most", 17),
    "blend_loss": ("most", 1),
    "blend_worst_loss": ("most", 2),
    "blend_over_random": ("least", 50),
    "lean_compute": ("most", 12),
    "lean_loss": ("most", 3),
    "gate_holds": ("least", True),
}
"""What the project guarantees for the shipped model; only ``gate_holds`` is True or False."""

NOT_RUN = "this part was not run"
EQUAL_SHARES = (0.15, 0.2, 0.25, 0.3)  # of a full prefill


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % bootstrap interval, paired for differences.

    Attributes:
        value, low, high: in points or per cent.
        n: number of rows.
        category: the category, if the figure is that of the worst of several.
    """

    value: float
    low: float
    high: float
    n: int
    category: str = ""


def figures(rows: Sequence[RowResult], gate: dict[str, Any] | None = None, *, seed: int = 0) -> dict[str, Any]:
    """All figures and bars.

    Returns:
        ``figures``: key -> number, True, False or None. ``bars``: key -> ``{"value", "bar", "at", "ok", "low",
        "high", "n"}``, where ``at`` is ``least`` or ``most``; also ``category`` if the figure is that of the worst
        category, and ``reason`` if the value is None.
    """
    cells = _Cells(rows, seed)
    found = {
        "full_min": _worst(min, ("direct", "local", "cross"), lambda name: cells.score("full", name)),
        "full_hard_chain_min": _worst(min, HARD, lambda name: cells.score("full", name)),
        "full_comparison": cells.score("full", "comparison"),
        "reuse_control_loss": _worst(max, CONTROLS, lambda name: cells.lead("full", "reuse", name)),
        "reuse_cross_loss": cells.lead("full", "reuse", "cross"),
        "blend_compute": cells.compute(BLEND),
        "random_compute": cells.compute(RANDOM_ROWS),
        "blend_loss": cells.lead("full", BLEND, *CATEGORIES),
        "blend_worst_loss": _worst(max, CATEGORIES, lambda name: cells.lead("full", BLEND, name)),
        "blend_over_random": cells.lead(BLEND, RANDOM_ROWS, *ACROSS),
        "lean_compute": cells.compute(LEAN_BLEND),
        "lean_loss": cells.lead("full", LEAN_BLEND, *CATEGORIES),
    }
    gate = gate or {"reason": NOT_RUN}
    values: dict[str, float | bool | None] = {key: one.value if one else None for key, one in found.items()}
    values["gate_holds"] = gate.get("holds")
    entries = {key: _entry(key, values[key], found.get(key)) for key in BARS}
    entries["gate_holds"]["n"] = gate.get("rows", 0)
    for key, entry in entries.items():
        if entry["value"] is None:
            of_main = "there are no cells for it" if rows else NOT_RUN
            entry["reason"] = gate["reason"] if key == "gate_holds" else of_main
    return {"figures": values, "bars": entries}


def at_equal_compute(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Exact match of the sweep's selectors at equal total compute, interpolated linearly between measurements.

    Returns:
        For each selector ``{"family", "all", "by_category"}``, with a percentage for each share; None for shares
        outside the measured range.
    """
    families: dict[str, list[dict[str, Any]]] = {}
    for method in summary["methods"]:
        if method["kind"] == "blend" and method["total_compute"] is not None:
            families.setdefault(method["family"], []).append(method)
    found = []
    for family, methods in families.items():
        methods.sort(key=lambda method: float(method["total_compute"]))
        scores = [method["scores"]["em"] for method in methods]
        xs = [float(method["total_compute"]) for method in methods]
        by_category = {
            name: _between(xs, [one["by_category"].get(name) for one in scores]) for name in summary["categories"]
        }
        found.append(
            {"family": family, "all": _between(xs, [one["all"] for one in scores]), "by_category": by_category}
        )
    return found


class _Cells:
    """Cells by category and method, and estimates from them."""

    def __init__(self, rows: Sequence[RowResult], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._cells = [{cell.method: cell for cell in row.cells if not cell.skipped} for row in rows]

    def score(self, method: str, category: str) -> Estimate | None:
        return self._mean([method], lambda row, cells: _exact(row, cells[0]), (category,))

    def lead(self, first: str, second: str, *categories: str) -> Estimate | None:
        """Exact match of `first` minus that of `second`, paired by row, over all named categories."""
        return self._mean([first, second], lambda row, cells: _exact(row, cells[0]) - _exact(row, cells[1]), categories)

    def compute(self, method: str) -> Estimate | None:
        """Total compute of a method over all categories."""
        return self._mean([method], lambda row, cells: 100 * cells[0].total_compute, CATEGORIES)

    def _mean(
        self, methods: Sequence[str], value: Callable[[RowResult, list[Cell]], float], wanted: Sequence[str]
    ) -> Estimate | None:
        """Mean over rows that have cells of all these methods; None if a category has no such row."""
        values, seen = [], set()
        for row, cells in zip(self._rows, self._cells, strict=True):
            if row.category in wanted and all(method in cells for method in methods):
                values.append(value(row, [cells[method] for method in methods]))
                seen.add(row.category)
        if len(seen) < len(wanted):
            return None
        means = bootstrap_means(np.array(values)[:, None], seed=self._seed)
        return Estimate(float(means.mean[0]), float(means.low[0]), float(means.high[0]), len(values))


def _worst(
    choose: Callable[..., Estimate], names: Iterable[str], estimate: Callable[[str], Estimate | None]
) -> Estimate | None:
    """The estimate of the worst category; None if one of them is unknown."""
    found = {name: estimate(name) for name in names}
    known = [replace(one, category=name) for name, one in found.items() if one is not None]
    return choose(known, key=lambda one: one.value) if len(known) == len(found) else None


def _entry(key: str, value: float | bool | None, estimate: Estimate | None) -> dict[str, Any]:
    at, bar = BARS[key]
    ok = None if value is None else value >= bar if at == "least" else value <= bar
    interval = {"low": None, "high": None, "n": 0} if estimate is None else asdict(estimate)
    entry = {"value": value, "bar": bar, "at": at, "ok": ok, **{name: interval[name] for name in ("low", "high", "n")}}
    return entry | ({"category": estimate.category} if estimate and estimate.category else {})


def _exact(row: RowResult, cell: Cell) -> float:
    return 100 * best(ExactMatch(), cell.answer, row.answers)


def _between(xs: Sequence[float], scores: Sequence[dict[str, Any] | None]) -> list[float | None]:
    known = [(x, 100 * float(score["mean"])) for x, score in zip(xs, scores, strict=True) if score is not None]
    if not known:
        return [None] * len(EQUAL_SHARES)
    found = np.interp(EQUAL_SHARES, [x for x, _ in known], [y for _, y in known], left=np.nan, right=np.nan)
    return [None if np.isnan(value) else float(value) for value in found]
