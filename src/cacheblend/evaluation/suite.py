"""The suite on the model that ships: every category, full recompute, full reuse, and what the bars are about.

Draws of several seeds, none of which anything was trained or tuned on. `figures` are what the project promises of it.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.query import Query
from cacheblend.core.selection import Hkvd, RandomRows, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation.arms import Arm, Fused, Label
from cacheblend.evaluation.choices import make_arms
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.gate import Bar, GateRow, check
from cacheblend.evaluation.runner import Evaluation, Progress, Settings, evaluate
from cacheblend.evaluation.scorers import make_scorers
from cacheblend.evaluation.summary import summarise
from cacheblend.nano.questions import draw_questions
from cacheblend.nano.scenes import CATEGORIES

CONTROLS = ("direct", "local")
UNBARRED = ("chain2",)  # reported, no bar
GATE_SEED = 900  # fresh for the gate's check, too
CALIBRATION_SEED = 800
LEAN = Query(0.11)


@dataclass(frozen=True)
class Suite:
    """What is run.

    Attributes:
        per_category: questions of each category and seed.
        seeds: of the draws.
        gate_rows: rows of fresh data that the profile's setting is held to its threshold on; 0 leaves that out.
    """

    per_category: int = 334
    seeds: tuple[int, ...] = (1, 2, 3)
    gate_rows: int = 800


def run_suite(engine: BlendEngine, suite: Suite, out: Path, progress: Progress | None = None) -> Evaluation:
    """All seeds, a folder each: an interrupted run goes on where it stopped, and seeds may run side by side.

    Args:
        engine: on the shipped model, with its profile.
        suite: what is run.
        out: where the folders of results are.
        progress: see `evaluate`.
    """
    arms = suite_arms(engine)
    settings = Settings(max_tokens=8)
    parts = [
        evaluate(
            engine,
            draw_questions(seed, suite.per_category),
            arms,
            settings=settings,
            out=out,
            name=f"suite-nano-{seed}",
            progress=progress,
        )
        for seed in suite.seeds
    ]
    rows = [row for part in parts for row in part.rows]
    return replace(parts[0], rows=rows, resumed=sum(part.resumed for part in parts))


def suite_arms(engine: BlendEngine) -> list[Arm]:
    """The baselines, the profile's blend, the paper's default, a lean blend, and random rows as dear as the blend."""
    profile = engine.settings.config
    default = profile.make_selector()
    ratio = equal_compute_ratio(engine, default)
    plain = make_arms(("full", "prefix", "reuse"))
    return [
        *plain,
        _arm("blend", default, "profile", profile),
        _arm("blend hkvd @1 r=0.15", Hkvd(), "hkvd"),
        _arm("blend lean", LEAN, "query"),
        _arm("random rows", RandomRows(ratio), "random"),
    ]


def equal_compute_ratio(engine: BlendEngine, selector: Selector, rows: int = 16) -> float:
    """The ratio at which random rows cost what `selector` costs, rounded up to whole per cent."""
    drawn = draw_questions(CALIBRATION_SEED, rows)[: rows * len(CATEGORIES)]
    layout, scale = Settings().template.layout, ComputeScale.of(engine)
    ratios = []
    for row in drawn[:rows]:
        prompt = layout.prompt(engine, _passages(row), row.question)
        engine.warm(prompt.chunks)
        result, _ = engine.prefill(prompt, selector=selector)
        share = scale.share(result.row_layers, result.projected_rows, len(prompt))
        loaded = len(result.plan.candidate_rows)
        ratios.append((share * len(prompt) - (len(prompt) - loaded)) / loaded)
    return min(1.0, max(0.0, math.ceil(100 * sum(ratios) / len(ratios)) / 100))


def suite_summary(engine: BlendEngine, suite: Suite, found: Evaluation) -> dict[str, Any]:
    """`summarise`, and `figures`."""
    assert engine.builder is not None
    summary = summarise(found, make_scorers(("em", "f1"), engine.builder.encode))
    facts = {"name": "nano", "seeds": suite.seeds, "per_category": suite.per_category}
    return summary | {"suite": facts, "figures": figures(summary) | _gate(engine, suite)}


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """Points of exact match and per cent of compute, by the keys of the project's bars."""
    arms = {arm["arm"]: arm for arm in summary["arms"]}

    def score(arm: str, category: str | None = None) -> float:
        scores = arms[arm]["scores"]["em"]
        return 100 * float((scores["all"] if category is None else scores["by_category"][category])["mean"])

    def loss(arm: str, category: str) -> float:
        return score("full", category) - score(arm, category)

    barred = [category for category in summary["categories"] if category not in UNBARRED]
    return {
        "full_min": min(score("full", category) for category in ("direct", "local", "cross")),
        "reuse_control_loss": max(loss("reuse", category) for category in CONTROLS),
        "reuse_cross_loss": loss("reuse", "cross"),
        "blend_compute": 100 * arms["blend"]["total_compute"],
        "blend_loss": score("full") - score("blend"),
        "blend_worst_loss": max(loss("blend", category) for category in barred),
        "blend_over_random": score("blend", "cross") - score("random rows", "cross"),
        "lean_compute": 100 * arms["blend lean"]["total_compute"],
        "lean_loss": loss("blend lean", "cross"),
    }


def _gate(engine: BlendEngine, suite: Suite) -> dict[str, Any]:
    """The profile's setting on data that neither the gate nor the suite's tables have seen."""
    if not suite.gate_rows:
        return {}
    layout = Settings().template.layout
    drawn = draw_questions(GATE_SEED, math.ceil(suite.gate_rows / len(CATEGORIES)))[: suite.gate_rows]
    rows = [GateRow(layout.parts(engine, _passages(row), row.question), row.answers) for row in drawn]
    profile = engine.settings.profile
    bar = Bar() if profile is None else Bar(profile.measured.threshold, profile.measured.confidence)
    holds, measured = check(engine, rows, engine.settings.selector(), bar)
    return {"gate_holds": holds, "gate": {"threshold": bar.threshold, **measured.to_dict()}}


def _arm(name: str, selector: Selector, family: str, config: BlendConfig | None = None) -> Arm:
    ratio = None if config is None else config.recompute_ratio
    return Fused(Label(name, "blend", family, family, ratio, selector.check_layers), selector)


def _passages(row: Any) -> list[Any]:
    from cacheblend.engines.hf import Passage

    return [Passage(text.text, text.title) for text in row.passages]
