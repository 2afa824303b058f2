"""What the shipped rules need of Prometheus: samples over time, and a rule's expression at a time; and of an engine
what a server's metrics read.

Vectors are dictionaries by labels, which are sorted pairs. `promql_parser` parses; evaluated is what the rules use:
selectors, `rate`, `increase`, `avg_over_time`, `sum by`, arithmetic, comparisons, `and`, `on` and `group_left`.
"""

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric

from cacheblend.core.load.budget import LateTiers
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.shadow_check import ShadowCheck
from cacheblend.engines.shadow import ShadowWatch
from cacheblend.store import KVStore

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
_COMPARE = {"<": operator.lt, ">": operator.gt, "==": operator.eq, "<=": operator.le, ">=": operator.ge}
_COMPUTE = {"+": operator.add, "*": operator.mul, "/": lambda a, b: a / b if b else float("nan")}


def watched_runtime(store: KVStore, watch: ShadowWatch) -> Any:
    """The parts of an engine that `Metrics` reads; its `background` counts what a test sets."""
    check = ShadowCheck(watch, lambda prompt, rows: None, lambda: 0, lambda: None)  # type: ignore[arg-type, return-value]
    late = SimpleNamespace(late_tiers=LateTiers())
    return SimpleNamespace(store=store, shadow=check, discovery=None, background=Background(1), prefiller=late)


class History:
    """Samples of scraped texts, by name and labels, in order of time."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def scrape(self, at: float, families: Iterable[Metric], labels: Mapping[str, str]) -> None:
        for sample in (sample for family in families for sample in family.samples):
            self.add(at, sample.name, sample.value, {**sample.labels, **labels})

    def add(self, at: float, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._series[name][tuple(sorted(labels.items()))].append((at, value))

    def value(self, expression: Any, at: float) -> Any:
        """The vector, or number, of a parsed expression."""
        return getattr(self, f"_{type(expression).__name__.lower()}")(expression, at)

    def _numberliteral(self, expression: Any, at: float) -> float:
        return float(expression.val)

    def _parenexpr(self, expression: Any, at: float) -> Any:
        return self.value(expression.expr, at)

    def _samples(self, selector: Any, start: float, at: float) -> dict[Labels, list[tuple[float, float]]]:
        wanted = [(each.name, str(each.op).rpartition(".")[2], each.value) for each in selector.matchers.matchers]
        found = {}
        for labels, samples in self._series[selector.name].items():
            had = dict(labels)
            if all(
                (had.get(name, "") == value if "Equal" in op else bool(re.fullmatch(value, had.get(name, ""))))
                != op.startswith("Not")
                for name, op, value in wanted
            ) and (inside := [(when, value) for when, value in samples if start < when <= at]):
                found[labels] = inside
        return found

    def _vectorselector(self, expression: Any, at: float) -> Vector:
        return {labels: samples[-1][1] for labels, samples in self._samples(expression, at - 300, at).items()}

    def _call(self, expression: Any, at: float) -> Vector:
        [matrix], seconds = expression.args, expression.args[0].range.total_seconds()
        samples, name = self._samples(matrix.vector_selector, at - seconds, at), expression.func.name
        if name == "avg_over_time":
            return {labels: sum(value for _, value in each) / len(each) for labels, each in samples.items()}
        rises = {labels: each[-1][1] - each[0][1] for labels, each in samples.items() if len(each) > 1}
        return rises if name == "increase" else {labels: rise / seconds for labels, rise in rises.items()}

    def _aggregateexpr(self, expression: Any, at: float) -> Vector:
        assert str(expression.op) == "sum"
        kept, found = _labels_of(expression.modifier), defaultdict[Labels, float](float)
        for labels, value in self.value(expression.expr, at).items():
            found[_only(labels, kept)] += value
        return dict(found)

    def _binaryexpr(self, expression: Any, at: float) -> Any:
        left, right, op = self.value(expression.lhs, at), self.value(expression.rhs, at), str(expression.op)
        if not isinstance(left, dict):
            return {labels: _COMPUTE[op](left, value) for labels, value in right.items()}
        on = _labels_of(expression.modifier)
        there = {_only(labels, on): value for labels, value in right.items()} if isinstance(right, dict) else {}
        found: Vector = {}
        for labels, value in left.items():
            other = there.get(_only(labels, on)) if isinstance(right, dict) else right
            if other is None:
                continue
            if op == "and" or (op in _COMPARE and _COMPARE[op](value, other)):
                found[labels] = value
            elif op in _COMPUTE:
                found[labels] = _COMPUTE[op](value, other)
        return found


def _labels_of(modifier: Any) -> list[str] | None:
    found = re.search(r"(?:by|on) \(([^)]*)\)", str(modifier)) if modifier is not None else None
    return None if found is None else re.split(r",\s*", found[1])


def _only(labels: Labels, kept: list[str] | None) -> Labels:
    return labels if kept is None else tuple(pair for pair in labels if pair[0] in kept)
