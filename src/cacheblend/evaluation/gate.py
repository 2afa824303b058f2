"""The quality gate: the cheapest setting that is shown to agree with full recompute, on a user's model and prompts.

rows --split by seed--> | search: every candidate, few remain | confirmation: fresh rows, only these count |
        all rows of a passage set on one side                      one row of each passage set

The search selects the best of many candidates, so its measurements of that one are optimistic. It is therefore
measured again on rows that the search has not seen, and these alone decide. If it fails, the next more expensive
candidate is tried on the same rows. The number of such attempts is fixed in advance by the number of rows, and each
attempt gets an equal share of the error probability (Bonferroni). So the probability that any setting passes wrongly
is at most 1 - `confidence`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from cacheblend import __version__
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.profile import Measurement, Profile
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation.agreement import Summary, summarise
from cacheblend.evaluation.candidates import Candidate
from cacheblend.evaluation.gate_run import (
    Bar,
    GateRow,
    GateRun,
    Progress,
    Skipped,
    Tried,
    nothing_left,
    one_of_each,
    prepare,
)

ATTEMPTS = 3


__all__ = [
    "Bar",
    "GateResult",
    "GateRow",
    "Progress",
    "Skipped",
    "Tried",
    "attempts_for",
    "check",
    "profile_of",
    "promising",
    "run_gate",
]

Verdict = Literal["passed", "none passes", "too few rows"]


@dataclass
class GateResult:
    """The result of the gate.

    Attributes:
        bar: the requirements.
        verdict: whether a setting passed, or whether there were too few rows to decide.
        searched: all candidates on the first part of the rows, by compute; not evidence, see above.
        confirmed: the attempts on the second part of the rows, in order.
        chosen: the attempt that passed.
        search_rows, confirm_rows: number of rows of the two parts.
        passage_sets: number of passage sets of both parts, see `gate_run`.
        attempts: the most attempts allowed.
        skipped: numbers of rows that were left out.
    """

    bar: Bar
    verdict: Verdict
    searched: list[Tried]
    confirmed: list[Tried]
    chosen: Tried | None
    search_rows: int
    confirm_rows: int
    passage_sets: int
    attempts: int
    skipped: Skipped = field(default_factory=Skipped)

    def to_dict(self) -> dict[str, Any]:
        """As a dict for JSON."""
        bar = self.bar
        return {
            "verdict": self.verdict,
            "threshold": bar.threshold,
            "confidence": bar.confidence,
            "f1_margin": bar.f1_margin,
            "needed_rows": bar.needed_rows,
            "rows": {"search": self.search_rows, "confirmation": self.confirm_rows, **asdict(self.skipped)},
            "passage_sets": self.passage_sets,
            "attempts": self.attempts,
            "chosen": None if self.chosen is None else self.chosen.to_dict(),
            "search": [tried.to_dict() for tried in self.searched],
            "confirmation": [tried.to_dict() for tried in self.confirmed],
        }


def run_gate(
    engine: BlendEngine,
    rows: Sequence[GateRow],
    candidates: Sequence[Candidate],
    bar: Bar | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> GateResult:
    """Finds the cheapest candidate that reaches the bar. Stores only the chunks of the rows.

    Args:
        engine: its store must hold the chunks of at least one prompt.
        rows: as similar as possible to later prompts; their order does not matter.
        candidates: see `candidates.grid`.
        bar: the requirements; None: 99 % agreement at 95 % confidence.
        seed: seed of the split into two parts.
        progress: called after each row; the total grows with each further attempt.

    Raises:
        InvalidInputError: no usable row, no candidate, or a store that cannot hold the chunks of a prompt.
    """
    bar = bar or Bar()
    if not candidates:
        raise InvalidInputError("there are no candidates to try")
    sets, skipped = prepare(engine, rows, seed)
    half = len(sets) // 2
    attempts = attempts_for(len(sets) - half, bar)
    if not attempts:
        half = len(sets)  # nothing can be confirmed, so all rows may be used to search
    to_search, to_confirm = [row for rows in sets[:half] for row in rows], one_of_each(sets[half:], skipped)
    run = GateRun(engine, bar, skipped, progress, total=len(to_search) + len(to_confirm))
    searched = run.search(candidates, to_search)
    confirmed: list[Tried] = []
    for tried in promising(searched, bar)[:attempts]:
        run.total = run.done + len(to_confirm)
        confirmed.append(run.confirm(tried.candidate, to_confirm, bar.part(attempts)))
        if confirmed[-1].passes:
            break
    chosen = next((tried for tried in confirmed if tried.passes), None)
    verdict: Verdict = "passed" if chosen else "none passes" if attempts else "too few rows"
    return GateResult(
        bar=bar,
        verdict=verdict,
        searched=searched,
        confirmed=confirmed,
        chosen=chosen,
        search_rows=len(to_search),
        confirm_rows=len(to_confirm),
        passage_sets=len(sets),
        attempts=attempts,
        skipped=skipped,
    )


def check(
    engine: BlendEngine,
    rows: Sequence[GateRow],
    selector: Selector,
    bar: Bar | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[bool, Summary]:
    """Whether a setting reaches the bar on rows that were not used to choose it: one test, one row per passage set.

    Args:
        engine, rows, progress: as for `run_gate`.
        selector: the selector to test.
        bar: the requirements; None takes the defaults.

    Raises:
        InvalidInputError: as for `run_gate`.
    """
    bar = bar or Bar()
    sets, skipped = prepare(engine, rows, seed=0)
    prompts = one_of_each(sets, skipped)
    run = GateRun(engine, bar, skipped, progress, total=len(prompts))
    samples = [run.measure(prompt, [selector], with_answers=True) for prompt in prompts]
    kept = [found[0] for found in samples if found]
    if not kept:
        raise InvalidInputError(nothing_left(skipped))
    found = summarise(kept, bar.confidence)
    return bar.is_reached(found), found


def attempts_for(rows: int, bar: Bar) -> int:
    """Number of attempts that this many rows can decide, at most `ATTEMPTS`; 0: too few rows for any."""
    for attempts in range(ATTEMPTS, 0, -1):
        if rows >= bar.part(attempts).needed_rows:
            return attempts
    return 0


def promising(searched: Sequence[Tried], bar: Bar) -> list[Tried]:
    """Candidates worth an attempt, cheapest first: all that passed the search, else the one with fewest failures."""
    passing = [tried for tried in searched if tried.passes]
    if passing:
        return passing
    near = [
        t for t in searched if t.found and not t.stopped and t.found.agreement >= bar.threshold and t.found.compute < 1
    ]
    return sorted(near, key=lambda tried: (tried.found.rows - tried.found.agreed) if tried.found else 0)[:1]


def profile_of(engine: BlendEngine, result: GateResult, data: Path | None = None) -> Profile:
    """The model's profile: the chosen setting, or that the model is not to be blended.

    Args:
        engine: the engine that the gate ran on.
        result: result of the gate.
        data: file of the rows; None if there is none.

    Raises:
        InvalidInputError: there were too few rows to decide.
    """
    if result.verdict == "too few rows":
        raise InvalidInputError(
            f"{result.passage_sets} rows with different passages cannot show an agreement of "
            f"{result.bar.threshold:g}: {2 * result.bar.needed_rows} are needed, half of them to search and half to "
            "confirm"
        )
    found = result.chosen.found if result.chosen else None
    settings = dict(result.chosen.candidate.settings) if result.chosen else {"selector": "all"}
    measured = Measurement(
        model=engine.name,
        data="" if data is None else data.name,
        data_sha256="" if data is None else hashlib.sha256(data.read_bytes()).hexdigest(),
        rows=found.rows if found else result.confirm_rows,
        threshold=result.bar.threshold,
        confidence=result.bar.confidence,
        agreement=found.agreement if found else None,
        bound=found.bound if found else None,
        compute=found.compute if found else None,
        f1_difference=found.f1_difference if found else None,
        f1_bound=found.f1_bound if found else None,
        dtype=str(engine.survey.layout.dtype).removeprefix("torch."),
        anchor=engine.planner.anchor.rule,
        date=datetime.now(UTC).date().isoformat(),
        versions={"cacheblend": __version__} | {name: version(name) for name in ("torch", "transformers")},
    )
    return Profile(engine.fingerprint, settings, measured)
