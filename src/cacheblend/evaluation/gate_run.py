"""The gate's work on rows: what a setting is held to, every candidate on a row, who is given up.

Rows that have the same passages, in any order, are a passage set: they fail together more often than others do, so
the bounds, which take rows as independent, may count one of them only.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError, PromptTooLongError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import touch
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.evaluation.agreement import Sample, Summary, compare, reference, summarise
from cacheblend.evaluation.bounds import allowed_errors, check_share, needed_rows, reaches
from cacheblend.evaluation.candidates import Candidate
from cacheblend.evaluation.scorers import Scorer, best

STOP_BEHIND = 30  # rows; before them no candidate is given up

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class GateRow:
    """One prompt.

    Attributes:
        prompt: anything that `BlendEngine.prompt` takes.
        answers: gold answers; empty if there are none.
    """

    prompt: PromptLike
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """What a setting is held to.

    Attributes:
        threshold: agreement of first tokens with full recompute.
        confidence: of the one-sided bounds.
        f1_margin: how far mean F1 may lie below full recompute's.
        answer_tokens: of the greedy answers.
        stop: texts that end them.
        scorer: of answers against gold answers; None leaves gold answers aside.
    """

    threshold: float = 0.99
    confidence: float = 0.95
    f1_margin: float = 0.01
    answer_tokens: int = 16
    stop: tuple[str, ...] = ()
    scorer: Scorer | None = None

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        check_share("confidence", self.confidence)
        check_share("f1_margin", self.f1_margin)
        if self.answer_tokens < 1:
            raise InvalidInputError(f"answer_tokens must be at least 1, got {self.answer_tokens}")

    @property
    def needed_rows(self) -> int:
        """Fewest rows that can show it, none of them failing."""
        return needed_rows(self.threshold, self.confidence)

    @property
    def needed_f1_rows(self) -> int:
        """Fewest rows with gold answers that could show a loss as rare as the margin."""
        return needed_rows(1 - self.f1_margin, self.confidence)

    def part(self, attempts: int) -> "Bar":
        """The bar of one of so many attempts."""
        return replace(self, confidence=1 - (1 - self.confidence) / attempts)

    def is_reached(self, found: Summary) -> bool:
        """Agreement's bound and, where there are gold answers, F1's; what computes as much as full never does."""
        agrees = reaches(found.agreed, found.rows, self.threshold, self.confidence)
        is_as_good = found.f1_bound is None or found.f1_bound >= -self.f1_margin
        return agrees and is_as_good and found.compute < 1


@dataclass
class Skipped:
    """Rows that were left out.

    Attributes:
        too_long: over the model's context.
        repeated: the same token ids as an earlier row.
        nothing_to_blend: all that is loaded is an exact prefix, so every setting agrees.
        same_passages: of the confirmation, with the passages of another row that is confirmed on.
    """

    too_long: int = 0
    repeated: int = 0
    nothing_to_blend: int = 0
    same_passages: int = 0


@dataclass(frozen=True)
class Tried:
    """A candidate on one part of the rows.

    Attributes:
        candidate: of the grid.
        found: on the rows that it saw; None if it saw none.
        passes: it reached the bar of this part.
        stopped: given up early, since it could not any more.
    """

    candidate: Candidate
    found: Summary | None
    passes: bool
    stopped: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        measured = None if self.found is None else self.found.to_dict()
        return asdict(self.candidate) | {"passes": self.passes, "stopped": self.stopped, "measured": measured}


@dataclass(frozen=True)
class Asked:
    """A row whose prompt can be asked."""

    prompt: Prompt
    answers: tuple[str, ...]


@dataclass
class Run:
    """One gate under way."""

    engine: BlendEngine
    bar: Bar
    skipped: Skipped
    progress: Progress | None
    total: int
    done: int = 0

    def search(self, candidates: Sequence[Candidate], rows: Sequence[Asked]) -> list[Tried]:
        """All candidates row by row, so that full recompute runs once a row; hopeless ones are given up."""
        selectors = [candidate.selector() for candidate in candidates]
        samples: list[list[Sample]] = [[] for _ in candidates]
        live = list(range(len(candidates)))
        for row in rows:
            if not live:
                break
            found = self.measure(row, [selectors[i] for i in live], with_answers=False)
            for i, sample in zip(live, found, strict=False):  # none of a row without anything to blend
                samples[i].append(sample)
            live = [i for i in live if not self._is_hopeless(samples[i])]
        tried = [
            self._tried(candidate, samples[i], self.bar, stopped=i not in live)
            for i, candidate in enumerate(candidates)
        ]
        return sorted(tried, key=lambda one: one.found.compute if one.found else 0.0)

    def confirm(self, candidate: Candidate, rows: Sequence[Asked], bar: Bar) -> Tried:
        """One attempt; given up when too many rows have failed for any number of further ones."""
        selector, allowed = candidate.selector(), allowed_errors(len(rows), bar.threshold, bar.confidence)
        samples: list[Sample] = []
        for row in rows:
            samples += self.measure(row, [selector], with_answers=True)
            if sum(not sample.top_1 for sample in samples) > allowed:
                return self._tried(candidate, samples, bar, stopped=True)
        return self._tried(candidate, samples, bar, stopped=False)

    def measure(self, row: Asked, selectors: Sequence[Selector], *, with_answers: bool) -> list[Sample]:
        """A sample a selector; none if nothing can be blended in the row.

        Answers are drawn where there are gold ones, and elsewhere if `with_answers`.
        """
        engine, prompt, bar = self.engine, row.prompt, self.bar
        engine.warm(prompt.chunks, system=prompt)
        self.done += 1
        samples: list[Sample] = []
        if len(engine.planner.plan(prompt, engine.store).candidate_rows):
            score = partial(best, bar.scorer, golds=row.answers) if bar.scorer and row.answers else None
            tokens = bar.answer_tokens if with_answers or score else 0
            if self.done == 1:
                touch(engine, prompt)
            full = reference(engine, prompt, tokens=tokens, stop=bar.stop, score=score)
            for selector in selectors:
                sample, report = compare(engine, prompt, selector, full, tokens=tokens, stop=bar.stop, score=score)
                if report.missed_tokens:
                    raise InvalidInputError(
                        f"the store held too little of a prompt of {len(prompt)} tokens ({report.missed_tokens} were "
                        "missed), so that full recompute would be compared with itself; give a larger store"
                    )
                samples.append(sample)
        else:
            self.skipped.nothing_to_blend += 1
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done))
        return samples

    def _is_hopeless(self, samples: Sequence[Sample]) -> bool:
        """Even the upper bound of its agreement lies below the threshold."""
        failed = sum(not sample.top_1 for sample in samples)
        enough = len(samples) >= STOP_BEHIND
        return enough and reaches(failed, len(samples), 1 - self.bar.threshold, self.bar.confidence)

    def _tried(self, candidate: Candidate, samples: Sequence[Sample], bar: Bar, *, stopped: bool) -> Tried:
        if not samples:
            return Tried(candidate, None, passes=False, stopped=stopped)
        found = summarise(samples, bar.confidence)
        return Tried(candidate, found, not stopped and bar.is_reached(found), stopped)


def prepare(engine: BlendEngine, rows: Sequence[GateRow], seed: int) -> tuple[list[list[Asked]], Skipped]:
    """The rows that can be asked, by passage set, both in an order that the seed draws; and how many cannot."""
    skipped = Skipped()
    asked: dict[bytes, Asked] = {}
    for row in rows:
        try:
            prompt = engine.prompt(row.prompt)
        except PromptTooLongError:
            skipped.too_long += 1
            continue
        if not _has_loaded_rows(engine, prompt):
            skipped.nothing_to_blend += 1
            continue
        key = prompt.token_ids.tobytes()
        skipped.repeated += key in asked
        asked.setdefault(key, Asked(prompt, tuple(row.answers)))
    if not asked:
        raise InvalidInputError(nothing_left(skipped))
    kept = list(asked.values())
    draw = np.random.default_rng(seed)
    sets: dict[frozenset[bytes], list[Asked]] = {}
    for i in draw.permutation(len(kept)):
        passages = frozenset(chunk.token_ids.tobytes() for chunk in kept[i].prompt.chunks)
        sets.setdefault(passages, []).append(kept[i])
    found = list(sets.values())  # by their first row, so that large sets come early: drawn once more
    return [found[i] for i in draw.permutation(len(found))], skipped


def one_of_each(sets: Sequence[list[Asked]], skipped: Skipped) -> list[Asked]:
    """A row of every passage set; the others are counted."""
    skipped.same_passages += sum(len(rows) - 1 for rows in sets)
    return [rows[0] for rows in sets]


def nothing_left(skipped: Skipped) -> str:
    """What a user is told when no row is left."""
    return (
        f"no row can be asked: {skipped.too_long} are over the model's context, "
        f"{skipped.nothing_to_blend} have nothing to blend; give other data"
    )


def _has_loaded_rows(engine: BlendEngine, prompt: Prompt) -> bool:
    """Whether stored chunks leave rows to choose from: a lone chunk right behind its anchor is an exact prefix."""
    if len(prompt.chunks) != 1:
        return bool(prompt.chunks)
    front = [segment.token_ids for segment in takewhile(lambda segment: not segment.is_chunk, prompt.segments)]
    anchor = engine.planner.anchor.segments(prompt)
    return [int(i) for ids in front for i in ids] != [int(i) for ids in anchor for i in ids]
