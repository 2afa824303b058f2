"""From single answers to the points of a figure: quality with an interval, time to first token, share computed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cacheblend.evaluation.bootstrap import bootstrap_means
from cacheblend.evaluation.records import Cell
from cacheblend.evaluation.runner import Evaluation
from cacheblend.evaluation.scorers import Scorer, best

ALL = ""
"""The data set's name in points over all sets."""
AGREEMENT = "top_1"
"""The measure without gold answers: the first token is the one that full recompute finds most likely."""


@dataclass(frozen=True)
class Answered:
    """An answer of one method, by family and name, to one row of a data set; None: there is none, or it is unknown.

    Attributes:
        x: the point of the sweep.
        scores: by scorer; empty without gold answers.
        agrees: first token as full recompute's.
        compute: share of a full prefill.
        recomputed: share of the loaded tokens.
    """

    data: str
    method: tuple[str, str]
    ratio: float | None
    x: float | None
    ttft_s: float
    scores: dict[str, float]
    agrees: float | None
    compute: float | None = None
    recomputed: float | None = None


def of_evaluation(
    found: Evaluation, scorers: Sequence[Scorer], x: Callable[[Cell], float | None] = lambda cell: None
) -> list[Answered]:
    """The answers of an evaluation whose categories are data sets; `x` gives a cell's point of the sweep."""
    labels = {label.name: label for label in found.methods}
    answers = []
    for row in found.rows:
        for cell in row.cells:
            if cell.skipped:
                continue
            label = labels[cell.method]
            answers.append(
                Answered(
                    row.category,
                    (label.family, label.name),
                    label.ratio,
                    x(cell),
                    cell.ttft_s,
                    score(scorers, cell.answer, row.answers),
                    None if cell.top_1 is None else float(cell.top_1),
                    cell.total_compute,
                    cell.recomputed_tokens / cell.loaded_tokens if cell.loaded_tokens else None,
                )
            )
    return answers


def score(scorers: Sequence[Scorer], answer: str, golds: Sequence[str]) -> dict[str, float]:
    """The best score over several gold answers, by scorer; empty without gold answers."""
    return {scorer.name: best(scorer, answer, golds) for scorer in scorers} if golds else {}


def points(answers: Iterable[Answered], *, by_data: bool = False) -> list[dict[str, Any]]:
    """Means over rows, ready for JSON, in the order of the answers: over all data sets, or for each.

    Returns:
        For each method and point ``{"data", "family", "method", "ratio", "x", "rows", "ttft_s", "compute",
        "recomputed", "quality"}``; ``ttft_s`` is ``{"median", "low", "high"}`` (quartiles), ``quality`` has for each
        scorer and for `AGREEMENT` ``{"mean", "low", "high", "n"}`` (95 % bootstrap interval) if there is any.
    """
    groups: dict[_Key, list[Answered]] = {}
    for each in answers:
        groups.setdefault((each.data if by_data else ALL, each.method, each.ratio, each.x), []).append(each)
    return [_point(key, group) for key, group in groups.items()]


_Key = tuple[str, tuple[str, str], float | None, float | None]
"""Data set, method, ratio, point of the sweep."""


def _point(key: _Key, group: Sequence[Answered]) -> dict[str, Any]:
    data, method, ratio, x = key
    low, median, high = np.percentile([each.ttft_s for each in group], [25, 50, 75])
    names = dict.fromkeys(name for each in group for name in each.scores)
    quality = {name: _mean([each.scores[name] for each in group if name in each.scores]) for name in names}
    agrees = [each.agrees for each in group if each.agrees is not None]
    return {
        "data": data,
        "family": method[0],
        "method": method[1],
        "ratio": ratio,
        "x": x,
        "rows": len(group),
        "ttft_s": {"median": float(median), "low": float(low), "high": float(high)},
        "compute": _plain_mean([each.compute for each in group]),
        "recomputed": _plain_mean([each.recomputed for each in group]),
        "quality": quality | ({AGREEMENT: _mean(agrees)} if agrees else {}),
    }


def _mean(values: Sequence[float]) -> dict[str, Any]:
    found = bootstrap_means(np.array(values, dtype=float)[:, None])
    return {"mean": float(found.mean[0]), "low": float(found.low[0]), "high": float(found.high[0]), "n": len(values)}


def _plain_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
