"""How the methods did in the demo's demo: from an evaluation to what is shown of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.evaluation.choices import PROFILE, make_methods
from cacheblend.evaluation.demo import CATEGORIES
from cacheblend.evaluation.methods import Method
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.runner import Evaluation
from cacheblend.evaluation.scorers import ExactMatch, best


def demo_methods(profile: BlendConfig, ratio: float) -> list[Method]:
    """Full recompute, prefix caching, full reuse, blend by the model's own settings, and by HKVD at check layer 1.

    The last two are one method where they are the same.
    """
    hkvd = BlendConfig(recompute_ratio=ratio).make_selector()
    selectors = ("hkvd",) if profile.make_selector() == hkvd else (PROFILE, "hkvd")
    return make_methods(selectors=selectors, ratios=(ratio,), profile=profile)


@dataclass(frozen=True)
class Standing:
    """How a method did.

    Attributes:
        title: for people.
        kind: ``full``, ``prefix``, ``reuse``, ``blend`` (the model's own settings) or ``hkvd``.
        right: category -> for each question whether it was answered rightly, in order.
        ttft_s: median.
        speedup: median of full recompute's time over this one's, question by question.
        compute: total compute, as a share of a full prefill.
        recomputed: share of the loaded tokens; None where nothing was loaded but a prefix.
    """

    title: str
    kind: str
    right: dict[str, list[bool]]
    ttft_s: float
    speedup: float
    compute: float
    recomputed: float | None

    @property
    def score(self) -> tuple[int, int]:
        """(right answers, questions)."""
        all_ = [right for answers in self.right.values() for right in answers]
        return sum(all_), len(all_)


def standings(found: Evaluation, summary: dict[str, Any]) -> list[Standing]:
    """Of all methods, in order.

    Args:
        found: of `evaluate` with `demo_methods`.
        summary: of `summarise`.
    """
    out = []
    for number, method in enumerate(summary["methods"]):
        right: dict[str, list[bool]] = {category: [] for category in CATEGORIES}
        for row in found.rows:
            right[row.category].append(is_right(row, row.cells[number]))
        kind = "hkvd" if method["kind"] == "blend" and method["selector"] != PROFILE else method["kind"]
        fused = kind in ("reuse", "blend", "hkvd")
        out.append(
            Standing(
                title=_TITLES[kind].format(ratio=method["ratio"]),
                kind=kind,
                right=right,
                ttft_s=method["ttft_s"]["median"],
                speedup=method["speedup"],
                compute=method["total_compute"],
                recomputed=method["recomputed_tokens"] / method["loaded_tokens"] if fused else None,
            )
        )
    return out


_TITLES = {
    "full": "full recompute",
    "prefix": "prefix caching",
    "reuse": "full reuse",
    "blend": "blend",
    "hkvd": "blend, HKVD r = {ratio:g}",
}


def is_right(row: RowResult, cell: Cell) -> bool:
    """The answer is one of the gold answers."""
    return best(ExactMatch(), cell.answer, row.answers) == 1.0


def telling_rows(found: Evaluation, count: int = 4) -> list[RowResult]:
    """Rows worth showing, of different categories as far as there are.

    Those come first that full recompute answers rightly and full reuse does not, and of these the ones that the blends
    answer rightly too.
    """
    kinds = [label.kind for label in found.methods]
    seen: Counter[tuple[bool, str]] = Counter()
    ranked: list[tuple[bool, int, int]] = []
    for row in sorted(found.rows, key=lambda row: _rank(row, kinds)):
        ordinary = _rank(row, kinds)[0]
        ranked.append((ordinary, seen[ordinary, row.category], row.number))
        seen[ordinary, row.category] += 1
    rows = {row.number: row for row in found.rows}
    return [rows[number] for _, _, number in sorted(ranked)[:count]]


def _rank(row: RowResult, kinds: Sequence[str]) -> tuple[bool, bool, int]:
    right = [is_right(row, cell) for cell in row.cells]
    lost = right[kinds.index("full")] and not right[kinds.index("reuse")]
    blends = all(ok for ok, kind in zip(right, kinds, strict=True) if kind == "blend")
    return not lost, not blends, row.number
