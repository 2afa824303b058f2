"""The suite on the model that ships: its parts, their random draws, and where results are written.

<out>/suite-nano-<hash>/         the main part: every category by the methods that have bars
  seed-<seed>-<hash>/              rows of a seed; seeds may run in parallel, a run of all of them then reads their rows
<out>/suite-nano-sweep-<hash>/   the sweep: fewer rows by every selector at several ratios
<out>/suite-nano-gate-<hash>/    the profile's setting on fresh data, see `check_gate`

These draws are used for no training, tuning or gating (`lab.nano.questions.RESERVED`).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import Gradual, Hkvd, RandomRows, Selector
from cacheblend.data import QuestionRow
from cacheblend.data.questions import question_lines
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.settings import read_profile
from cacheblend.evaluation.candidates import FOLLOWING, named
from cacheblend.evaluation.gate import (
    Bar,
    GateRow,
    GateRun,
    Progress,
    Summary,
    nothing_left,
    prepare,
    summarise,
)
from cacheblend.evaluation.methods import Fused, Label, Method, make_methods
from cacheblend.evaluation.records import folder_name
from cacheblend.evaluation.runner import LIBRARIES, Evaluation, Settings, evaluate
from cacheblend.evaluation.scorers import WordF1
from cacheblend.nano import LEAN_PROFILE_NAME, model_path
from lab.bench import Advance, AdvanceStage, silent
from lab.measurements import Kept
from lab.nano.questions import draw_questions
from lab.nano.scenes import CATEGORIES

PARTS = ("main", "sweep", "gate")
SWEEP_SEED, CALIBRATION_SEED, GATE_SEED = 4, 800, 900
SETTINGS = Settings(max_tokens=8)

BLEND, LEAN_BLEND, RANDOM_ROWS = "blend", "blend lean", "random rows"
PAPER, CODE = "HKVD, gradual (the paper)", "HKVD, one check of values (its code)"
"""What the paper describes (section 4.3), and what the authors' code does; each with its own ratio."""

SWEEP_RATIOS = (0.05, 0.1, 0.15, 0.3)
HOP_RATIOS = (0.05, 0.1, 0.15)
WORDS = "question_words=1"
ABLATIONS: dict[str, tuple[dict[str, int], ...]] = {
    "windows": ({"lead": 1}, {"lead": 3}, {"head_rows": 0, "lead": 1}, {"head_rows": 0, "lead": 3}),
    "heads": ({"head_rows": 0}, {"head_rows": 8}, {"head_rows": 32}),
    "hops": ({"hops": 0}, {"hops": 1}, {"hop_spans": 8}, {"question_words": 1}),
}
"""Settings of query that differ from `FOLLOWING`, at the same ratios: sentences in front of an attended one, heads of
chunks, and hops in other ways."""
CALIBRATION_ROWS = 16  # each of a different scene
SPARE = 0.0025  # share of a full prefill added to random rows, so that they are not cheaper on other prompts
RATIO_STEPS = 1000


@dataclass(frozen=True)
class Suite:
    """What to run.

    Attributes:
        per_category: questions of each category and seed; the sizes of the other parts follow from it.
        seeds: seeds of the draws of the main part.
        parts: names in `PARTS`.
    """

    per_category: int = 334
    seeds: tuple[int, ...] = (1, 2, 3)
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise InvalidInputError(f"the suite has no part {', '.join(unknown)!r}; choose from {', '.join(PARTS)}")
        if self.per_category < 1:
            raise InvalidInputError(f"rows of a category must be at least 1, got {self.per_category}")

    @property
    def sweep_per_category(self) -> int:
        return max(1, round(0.3 * self.per_category))

    @property
    def gate_rows(self) -> int:
        """Rows on which the profile's setting is checked against its threshold."""
        return max(20, round(2.4 * self.per_category))


@dataclass(frozen=True)
class MainPlan:
    methods: list[Method]
    config: dict[str, Any]


def check(
    engine: BlendEngine,
    rows: Sequence[GateRow],
    selector: Selector,
    bar: Bar | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[bool, Summary]:
    """Whether a setting reaches the bar on rows that were not used to choose it: one test, one row per passage set.
    Arguments and errors as for `run_gate`."""
    bar = bar or Bar()
    sets, skipped = prepare(engine, rows, seed=0)
    prompts = [rows[0] for rows in sets]
    run = GateRun(engine, bar, skipped, progress, total=len(prompts))
    samples = [run.measure(prompt, [selector], with_answers=True) for prompt in prompts]
    kept = [found[0] for found in samples if found]
    if not kept:
        raise InvalidInputError(nothing_left(skipped))
    found = summarise(kept, bar.confidence)
    return bar.is_reached(found), found


def plan_main(engine: BlendEngine, suite: Suite) -> MainPlan:
    """Full recompute, full reuse, blends (profile, HKVD in two ways, lean), and random rows at the profile's compute.

    Without a profile, the defaults take its place. Measures `CALIBRATION_ROWS` prompts about ten times.
    """
    selector = engine.runtime.settings.selector()
    ratio, config = equal_compute_ratio(engine, selector)
    methods = [
        *make_methods(("full", "reuse")),  # nothing precedes the first passage, so prefix caching equals full recompute
        _fused(BLEND, selector, "profile"),
        _fused(PAPER, Gradual(0.15), "hkvd gradual"),
        _fused(CODE, Hkvd((1,), (0.16,), "v"), "hkvd one check"),
        _fused(LEAN_BLEND, lean_selector(), "lean"),
        _fused(RANDOM_ROWS, RandomRows(ratio), "random"),
    ]
    shaping = {
        "suite": "nano",
        "model": engine.name,
        "per_category": suite.per_category,
        "methods": [repr(method) for method in methods],
        "calibration": config,  # its data and prompts also identify the question generator and the layout
    }
    return MainPlan(methods, shaping)


def equal_compute_ratio(engine: BlendEngine, selector: Selector) -> tuple[float, dict[str, Any]]:
    """The smallest ratio at which random rows take the measured compute of `selector` plus `SPARE`.

    Returns:
        The ratio, 1 if no ratio takes enough; and the config of the measurement.
    """
    drawn = draw_questions(CALIBRATION_SEED, -(-CALIBRATION_ROWS // len(CATEGORIES)), per_scene=1)[:CALIBRATION_ROWS]
    share, config = measured_share(engine, drawn, selector)
    low, high = 0, RATIO_STEPS
    while low < high:
        middle = (low + high) // 2
        found, _ = measured_share(engine, drawn, RandomRows(middle / RATIO_STEPS))
        low, high = (middle + 1, high) if found < share + SPARE else (low, middle)
    return low / RATIO_STEPS, config


def measured_share(engine: BlendEngine, rows: list[QuestionRow], selector: Selector) -> tuple[float, dict[str, Any]]:
    """Mean total compute of a selector's prefills (of prompts that fit the context), and the config of the run."""
    found = evaluate(engine, rows, [_fused("measured", selector, "measured")], settings=Settings(max_tokens=1))
    shares = [cell.total_compute for row in found.rows for cell in row.cells if not cell.skipped]
    return sum(shares) / len(shares), found.config


def run_main(
    engine: BlendEngine, suite: Suite, plan: MainPlan, out: Path, advance: AdvanceStage = silent
) -> Evaluation:
    """Runs the suite's seeds in turn; those of earlier runs of the same plan are only read."""
    folder = out / folder_name("suite-nano", plan.config)
    parts = {}
    for seed in sorted(set(suite.seeds)):
        rows = draw_questions(seed, suite.per_category)
        name = f"seed-{seed}"
        parts[seed] = evaluate(engine, rows, plan.methods, settings=SETTINGS, out=folder, name=name, progress=advance)
    return replace(
        next(iter(parts.values())),
        config=plan.config | {"seeds": list(parts)},
        rows=[row for part in parts.values() for row in part.rows],
        folder=folder,
        resumed=sum(part.resumed for part in parts.values()),
        torn=any(part.torn for part in parts.values()),
    )


def run_sweep(engine: BlendEngine, suite: Suite, out: Path, advance: AdvanceStage = silent) -> Evaluation:
    """Runs every selector at several ratios; arguments as for `run_main`."""
    rows = draw_questions(SWEEP_SEED, suite.sweep_per_category)
    return evaluate(
        engine, rows, sweep_methods(), settings=SETTINGS, out=out, name="suite-nano-sweep", progress=advance
    )


def sweep_methods() -> list[Method]:
    """Full recompute, full reuse, each selector at several ratios, and what was tried with hops (`ABLATIONS`)."""
    tried = [changed for ablation in ABLATIONS.values() for changed in ablation]
    following = [named("query", FOLLOWING | changed) for changed in ({}, *tried)]
    return [
        *make_methods(("full", "reuse")),
        *make_methods(("blend",), selectors=["hkvd"], ratios=SWEEP_RATIOS, check_layers=[None, (1,), (2,)]),
        *make_methods(("blend",), selectors=["hkvd:measure=v"], ratios=SWEEP_RATIOS, check_layers=[(1,)]),
        *make_methods(("blend",), selectors=["query", f"query:{WORDS}"], ratios=[*SWEEP_RATIOS, 0.2]),
        *make_methods(("blend",), selectors=following, ratios=HOP_RATIOS),
        *make_methods(("blend",), selectors=["hybrid"], ratios=SWEEP_RATIOS, check_layers=[(2,), (4,)]),
        *make_methods(
            ("blend",),
            selectors=[named("hybrid", {"early_ratio": early} | FOLLOWING) for early in (0.18, 0.26, 0.4)],
            ratios=[0.05, 0.08, 0.12],
            check_layers=[(4,)],
        ),
        *make_methods(("blend",), selectors=["head", "random"], ratios=SWEEP_RATIOS),
    ]


def lean_selector() -> Selector:
    """What the shipped model's lean profile selects."""
    return read_profile(model_path() / LEAN_PROFILE_NAME).selection.make_selector()


def _fused(name: str, selector: Selector, family: str) -> Method:
    """A fused method whose label has the ratio after the last check layer, if the selector has one."""
    ratios = getattr(selector, "ratios", None)
    ratio = ratios[-1] if ratios else getattr(selector, "ratio", None)
    return Fused(Label(name, "blend", family, family, ratio, selector.check_layers), selector)


# ---- the gate -----------------------------------------------------------------------------------------------

GATE_CODE = (
    *("core", "store", "engines"),
    *(f"evaluation/{name}.py" for name in ("bootstrap", "compute", "gate", "methods", "scorers", "templates")),
)
"""The source files that affect the verdict."""


def check_gate(engine: BlendEngine, suite: Suite, out: Path, advance: Advance = silent) -> dict[str, Any]:
    """Whether the profile's setting reaches its threshold, and F1 its margin; rows are independent, one per scene.

    A result already in `out` is read from there.

    Returns:
        ``holds``, the requirements, and the figures; only a ``reason`` if there is no setting to check.
    """
    profile = engine.runtime.settings.profile
    if profile is None:
        return {"reason": f"there is no gated setting to check: {engine.runtime.settings.source}"}
    if not profile.blend:
        return {"reason": "the profile disables blending, so there is no setting to check"}
    bar = Bar(scorer=WordF1())
    if profile.measured.threshold:
        bar = replace(bar, threshold=profile.measured.threshold, confidence=profile.measured.confidence)
    rows = draw_questions(GATE_SEED, -(-suite.gate_rows // len(CATEGORIES)), per_scene=1)

    def measure() -> dict[str, Any]:
        layout, asked = SETTINGS.template, []
        for row in rows:
            asked.append(GateRow(layout.parts(engine, row.passages, row.question), row.answers))
        holds, measured = check(engine, asked, engine.runtime.settings.selector(), bar, progress=advance)
        wanted = {"threshold": bar.threshold, "confidence": bar.confidence, "f1_margin": bar.f1_margin}
        return {"holds": holds, **wanted, **asdict(measured)}

    versions = provenance.versions()
    described = {  # all that affects the result
        "code": provenance.code_digest(GATE_CODE),
        "libraries": {name: versions[name] for name in LIBRARIES},
        "fingerprint": engine.runtime.planner.root.hex(),
        "device": engine.model.device.type,
        "engine": asdict(engine.config),
        "selector": repr(engine.runtime.settings.selector()),
        "bar": repr(bar),
        "template": asdict(SETTINGS.template),
        "seed": GATE_SEED,
        "rows": len(rows),
        "data": hashlib.sha256("\n".join(question_lines(rows)).encode()).hexdigest(),
    }
    config = json.loads(json.dumps(described))
    with Kept(out / folder_name("suite-nano-gate", config), config) as kept:
        found: dict[str, Any] = kept.get("gate", measure)
        return found
