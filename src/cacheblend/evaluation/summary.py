"""Figures of an evaluation: quality with intervals, differences to full recompute, time, compute, agreement."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np

from cacheblend.evaluation.bootstrap import Values, bootstrap_means
from cacheblend.evaluation.methods import Label
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.runner import Evaluation
from cacheblend.evaluation.scorers import Scorer, best, equal_share

AGREEMENT = ("top_1", "equal_tokens", "same_answer", "own_top_1", "own_kl")
"""Measures that need no gold answers, all against full recompute: the most likely first token is the same; the share of
the greedy answers' tokens before their first difference; the whole answer is the same; over the model's own answer the
share of tokens that are the likeliest, and the KL of a token (`Outcome`)."""

UNBOUNDED = ("own_kl",)  # measures that are no shares, though they may be 0 in each row
RESAMPLES, LEVEL = 2000, 0.95  # draws of rows, and confidence of the intervals

Measure = Callable[[RowResult, Cell, Cell | None], float | None]


def summarise(found: Evaluation, scorers: Sequence[Scorer] = (), *, seed: int = 0) -> dict[str, Any]:
    """All figures, in the form in which they are written to JSON.

    Scorers use the rows with gold answers; `answers_missing` counts the others. Intervals are percentile bootstrap
    intervals: `RESAMPLES` draws of rows, the same for all methods, within each category and over all rows. Those of
    shares, measures that are 0 or 1 in each row, are exact: however rows are drawn, 6 of 6 stays 6 of 6. Other
    measures with the same value in all rows have none: ``low`` and ``high`` are None.

    Returns:
        ``methods``: a list with each method at each `top_k`: its label; ``rows``, ``skipped``; ``ttft_s``, ``speedup``,
        ``total_compute``, tokens; ``scores`` by scorer and ``agreement`` by measure, each ``{"all": figure,
        "by_category": {category: figure}}``. A figure is ``{"n", "mean", "low", "high", "difference"}`` or None; the
        difference to full recompute is ``{"n", "mean", "low", "high"}`` or None. ``machines``: number of rows timed
        on each machine.
    """
    columns = [(label, k) for k, label in product(found.top_k, found.methods)]
    table = _Table(found.rows, columns)
    measures = {scorer.name: _measure_of(scorer) for scorer in scorers} | {name: _MEASURES[name] for name in AGREEMENT}
    figures = _figures(table, measures, seed)
    return {
        "model": found.config["model"],
        "rows": len(found.rows),
        "answers_missing": sum(not row.answers for row in found.rows),
        "too_long": [
            {"top_k": k, "rows": sum(any(at == k for at, _ in row.too_long) for row in found.rows)} for k in found.top_k
        ],
        "machines": dict(Counter(row.machine for row in found.rows if row.machine)),
        "categories": table.categories,
        "scorers": [scorer.name for scorer in scorers],
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "seed": seed},
        "config": found.config,
        "methods": [
            _method(table, index, figures, [scorer.name for scorer in scorers]) for index in range(len(columns))
        ],
    }


class _Table:
    """Cells by row and column, each a method and its `top_k`; None where a method has no answer."""

    def __init__(self, rows: Sequence[RowResult], columns: Sequence[tuple[Label, int | None]]) -> None:
        self.rows, self.columns = rows, columns
        by_key = [{(cell.method, cell.top_k): cell for cell in row.cells if not cell.skipped} for row in rows]
        self.cells = [[of.get((label.name, top_k)) for label, top_k in columns] for of in by_key]
        full = {top_k: at for at, (label, top_k) in reversed([*enumerate(columns)]) if label.kind == "full"}
        self.full = [full.get(top_k) for _, top_k in columns]
        self.categories = sorted({row.category for row in rows} - {""})

    def full_cell(self, row: int, column: int) -> Cell | None:
        at = self.full[column]
        return None if at is None else self.cells[row][at]

    def values(self, measure: Measure) -> Values:
        """[rows, columns]; NaN where the measure is undefined."""
        found = np.full((len(self.rows), len(self.columns)), np.nan)
        for row, column in product(range(len(self.rows)), range(len(self.columns))):
            cell = self.cells[row][column]
            value = None if cell is None else measure(self.rows[row], cell, self.full_cell(row, column))
            if value is not None:
                found[row, column] = value
        return found

    def differences(self, values: Values) -> Values:
        """Each column minus the column of full recompute at the same `top_k`; NaN where either is NaN."""
        full = [values[:, at] if at is not None else np.full(len(values), np.nan) for at in self.full]
        found: Values = values - np.stack(full, axis=1)
        return found


_Figures = dict[str, list[dict[str, Any]]]  # for each measure a list over columns of ``{"all", "by_category"}``


def _figures(table: _Table, measures: dict[str, Measure], seed: int) -> _Figures:
    values = [table.values(measure) for measure in measures.values()]
    stacked = np.concatenate([part for one in values for part in (one, table.differences(one))], axis=1)
    of_category = np.array([row.category for row in table.rows])
    subsets = {"": np.ones(len(table.rows), dtype=bool)} | {name: of_category == name for name in table.categories}
    width = len(table.columns)
    found: _Figures = {name: [{"all": None, "by_category": {}} for _ in range(width)] for name in measures}
    for category, rows in subsets.items():
        means = bootstrap_means(stacked[rows], resamples=RESAMPLES, level=LEVEL, seed=seed)
        for (index, name), column in product(enumerate(measures), range(width)):
            if name not in UNBOUNDED:
                means.make_exact(2 * index * width + column, values[index][rows, column], LEVEL)
        plain = list[dict[str, Any] | None]()
        for mean, low, high, n in zip(means.mean, means.low, means.high, means.count, strict=True):
            ends = (None, None) if math.isclose(low, high) else (float(low), float(high))  # all rows are alike
            plain.append({"n": int(n), "mean": float(mean), "low": ends[0], "high": ends[1]} if n else None)
        for (index, name), column in product(enumerate(measures), range(width)):
            at = 2 * index * width + column
            figure: dict[str, Any] | None = plain[at]
            if figure is not None:
                figure = {**figure, "difference": None if name in AGREEMENT else plain[at + width]}
            if category:
                found[name][column]["by_category"][category] = figure
            else:
                found[name][column]["all"] = figure
    return found


def _method(table: _Table, column: int, figures: _Figures, scorers: Sequence[str]) -> dict[str, Any]:
    label, top_k = table.columns[column]
    rows = [row for row in range(len(table.rows)) if table.cells[row][column] is not None]
    cells = [cell for row in rows if (cell := table.cells[row][column]) is not None]
    ratios = [
        full.ttft_s / cell.ttft_s
        for row, cell in zip(rows, cells, strict=True)
        if (full := table.full_cell(row, column)) is not None and cell.ttft_s > 0
    ]
    kl = [cell.kl for cell in cells if cell.kl is not None]
    skipped = sum(
        bool(cell.skipped) and cell.method == label.name and cell.top_k == top_k
        for row in table.rows
        for cell in row.cells
    )
    means = ("total_compute", "prompt_tokens", "loaded_tokens", "recomputed_tokens")
    return {
        "method": label.name,
        **{key: value for key, value in asdict(label).items() if key != "name"},
        "top_k": top_k,
        "rows": len(cells),
        "skipped": skipped,
        "with_misses": sum(cell.missed_tokens > 0 for cell in cells),
        "chunks": _mean([cell.chunks for cell in cells]),
        "ttft_s": _spread([cell.ttft_s for cell in cells]),
        "total_s": _spread([cell.total_s for cell in cells]),
        "speedup": statistics.median(ratios) if ratios else None,
        **{name: _mean([getattr(cell, name) for cell in cells]) for name in means},
        "scores": {name: figures[name][column] for name in scorers},
        "agreement": {name: figures[name][column] for name in AGREEMENT} | {"kl": _spread(kl) | {"mean": _mean(kl)}},
    }


def _measure_of(scorer: Scorer) -> Measure:
    return lambda row, cell, full: best(scorer, cell.answer, row.answers) if row.answers else None


_MEASURES: dict[str, Measure] = {
    "top_1": lambda row, cell, full: None if cell.top_1 is None else float(cell.top_1),
    "equal_tokens": lambda row, cell, full: None if full is None else equal_share(cell.token_ids, full.token_ids),
    "same_answer": lambda row, cell, full: None if full is None else float(cell.token_ids == full.token_ids),
    "own_top_1": lambda row, cell, full: cell.own_top_1,
    "own_kl": lambda row, cell, full: cell.own_kl,
}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median and quartiles."""
    if not values:
        return {"median": None, "low": None, "high": None}
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def with_cells(summary: dict[str, Any], found: Evaluation, scorers: Sequence[Scorer]) -> dict[str, Any]:
    """The summary with every cell and its scores added, under ``cells``."""
    rows = []
    for row in found.rows:
        fields = asdict(row)
        for cell, shown in zip(row.cells, fields["cells"], strict=True):
            if row.answers and not cell.skipped:
                shown["scores"] = {scorer.name: best(scorer, cell.answer, row.answers) for scorer in scorers}
        rows.append(fields)
    return summary | {"cells": rows}
