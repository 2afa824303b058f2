"""The suite's check of the gate: the profile's setting on data used by neither gate nor suite; written to a file."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import QuestionRow
from cacheblend.data.questions import question_lines
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.evaluation.gate import Bar, GateRow, Progress, check
from cacheblend.evaluation.records import folder_name, write_whole
from cacheblend.evaluation.runner import LIBRARIES
from cacheblend.evaluation.scorers import WordF1
from lab.nano.questions import draw_questions
from lab.nano.scenes import CATEGORIES
from lab.suite.suite import GATE_SEED, SETTINGS, Suite

CODE = (
    *("core", "store", "engines"),
    *(f"evaluation/{name}.py" for name in ("agreement", "bootstrap", "compute", "gate", "scorers")),
)
"""The source files that affect the verdict."""


def check_gate(engine: BlendEngine, suite: Suite, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Whether the profile's setting reaches its threshold, and F1 its margin; rows are independent, one per scene.

    A result already in `out` is read from there.

    Args:
        engine: engine with the shipped model.
        suite: gives the number of rows, rounded up to the same number of each category.
        out: folder for the result.
        progress: called with rows done, and their total.

    Returns:
        ``holds``, the requirements, and the figures; only a ``reason`` if there is no setting to check.

    Raises:
        InvalidInputError: as `cacheblend.evaluation.gate.check`, or the file of a result is damaged.
    """
    profile = engine.settings.profile
    if profile is None:
        return {"reason": f"there is no gated setting to check: {engine.settings.source}"}
    if not profile.blend:
        return {"reason": "the profile disables blending, so there is no setting to check"}
    bar = Bar(scorer=WordF1())
    if profile.measured.threshold:
        bar = replace(bar, threshold=profile.measured.threshold, confidence=profile.measured.confidence)
    rows = draw_questions(GATE_SEED, -(-suite.gate_rows // len(CATEGORIES)), per_scene=1)
    config = _describe(engine, bar, rows)
    file = out / f"{folder_name('suite-nano-gate', config)}.json"
    if file.is_file():
        return _read(file)
    asked = [GateRow(_parts(engine, row), row.answers) for row in rows]
    holds, measured = check(engine, asked, engine.settings.selector(), bar, progress=progress)
    wanted = {"threshold": bar.threshold, "confidence": bar.confidence, "f1_margin": bar.f1_margin}
    found = {"holds": holds, **wanted, **measured.to_dict()}
    out.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"config": config, "gate": found}, ensure_ascii=False, indent=2) + "\n")
    return found


def _describe(engine: BlendEngine, bar: Bar, rows: list[QuestionRow]) -> dict[str, Any]:
    """All that affects the result."""
    versions = provenance.versions()
    described = {
        "code": provenance.code_digest(CODE),
        "libraries": {name: versions[name] for name in LIBRARIES},
        "fingerprint": engine.planner.root.hex(),
        "device": engine.model.device.type,
        "engine": asdict(engine.config),
        "selector": repr(engine.settings.selector()),
        "bar": repr(bar),
        "template": asdict(SETTINGS.template),
        "seed": GATE_SEED,
        "rows": len(rows),
        "data": hashlib.sha256("\n".join(question_lines(rows)).encode()).hexdigest(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(described))
    return plain


def _parts(engine: BlendEngine, row: QuestionRow) -> list[Any]:
    passages = [Passage(text.text, text.title) for text in row.passages]
    return SETTINGS.template.layout.parts(engine, passages, row.question)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["gate"]
        if not isinstance(found["holds"], bool) or not isinstance(found["rows"], int):
            raise ValueError("a field has the wrong type")
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInputError(f"{file}: damaged ({error}); delete it to check the gate again") from error
    return found
