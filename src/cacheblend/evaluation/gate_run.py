"""The gate's measurements on rows: the requirements, every candidate on a row, and early stopping.

Rows with the same passages, in any order, form a passage set. Their failures are correlated, so the bounds, which
assume independent rows, may count only one row of each set.
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
from cacheblend.engines.bounds import allowed_errors, check_share, needed_rows, reaches
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import touch
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.evaluation.agreement import Sample, Summary, compare, reference, summarise
from cacheblend.evaluation.candidates import Candidate
from cacheblend.evaluation.scorers import Scorer, best

STOP_AFTER = 30  # rows; no candidate is stopped before

Progress = Callable[[int, int], None]
"""Called with (rows done, total rows)."""


@dataclass(frozen=True)
class GateRow:
    """One prompt.

    Attributes:
        prompt: anything that `BlendEngine.prompt` accepts.
        answers: gold answers; empty if there are none.
    """

    prompt: PromptLike
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """Requirements on a setting.

    Attributes:
        threshold: required agreement of first tokens with full recompute.
        confidence: confidence of the one-sided bounds.
        f1_margin: how far mean F1 may be below that of full recompute.
        answer_tokens: most tokens of the greedy answers.
        stop: texts that end them.
        scorer: scores answers against gold answers; None ignores gold answers.
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
        """Fewest rows that can show the agreement, if none fails."""
        return needed_rows(self.threshold, self.confidence)

    @property
    def needed_f1_rows(self) -> int:
        """Fewest rows with gold answers that would show a loss as rare as the margin."""
        return needed_rows(1 - self.f1_margin, self.confidence)

    def part(self, attempts: int) -> "Bar":
        """The bar for one of several attempts (Bonferroni)."""
        return replace(self, confidence=1 - (1 - self.confidence) / attempts)

    def is_reached(self, found: Summary) -> bool:
        """Whether compute is below full recompute and the bounds of agreement and, with gold answers, F1 suffice."""
        agrees = reaches(found.agreed, found.rows, self.threshold, self.confidence)
        is_as_good = found.f1_bound is None or found.f1_bound >= -self.f1_margin
        return agrees and is_as_good and found.compute < 1


@dataclass
class Skipped:
    """Numbers of rows that were left out.

    Attributes:
        too_long: prompts that exceed the model's context.
        repeated: rows with the same token ids as an earlier row.
        nothing_to_blend: rows where all loaded tokens are an exact prefix, so that every setting agrees.
        same_passages: rows of the confirmation with the same passages as another row of the confirmation.
    """

    too_long: int = 0
    repeated: int = 0
    nothing_to_blend: int = 0
    same_passages: int = 0


@dataclass(frozen=True)
class Tried:
    """A candidate measured on one part of the rows.

    Attributes:
        candidate: the candidate.
        found: its figures on the rows measured; None if there were none.
        passes: it reached the bar of this part.
        stopped: stopped early, because it could no longer reach the bar.
    """

    candidate: Candidate
    found: Summary | None
    passes: bool
    stopped: bool

    def to_dict(self) -> dict[str, Any]:
        """As a dict for JSON."""
        measured = None if self.found is None else self.found.to_dict()
        return asdict(self.candidate) | {"passes": self.passes, "stopped": self.stopped, "measured": measured}


@dataclass(frozen=True)
class GatePrompt:
    """A row with a usable prompt."""

    prompt: Prompt
    answers: tuple[str, ...]


@dataclass
class GateRun:
    """One run of the gate."""

    engine: BlendEngine
    bar: Bar
    skipped: Skipped
    progress: Progress | None
    total: int
    done: int = 0

    def search(self, candidates: Sequence[Candidate], rows: Sequence[GatePrompt]) -> list[Tried]:
        """All candidates row by row, so that full recompute runs once per row; hopeless candidates are stopped."""
        selectors = [candidate.selector() for candidate in candidates]
        samples: list[list[Sample]] = [[] for _ in candidates]
        live = list(range(len(candidates)))
        for row in rows:
            if not live:
                break
            found = self.measure(row, [selectors[i] for i in live], with_answers=False)
            for i, sample in zip(live, found, strict=False):  # `found` is empty if the row has nothing to blend
                samples[i].append(sample)
            live = [i for i in live if not self._is_hopeless(samples[i])]
        tried = [
            self._tried(candidate, samples[i], self.bar, stopped=i not in live)
            for i, candidate in enumerate(candidates)
        ]
        return sorted(tried, key=lambda one: one.found.compute if one.found else 0.0)

    def confirm(self, candidate: Candidate, rows: Sequence[GatePrompt], bar: Bar) -> Tried:
        """One attempt; stopped as soon as too many rows have failed to reach the bar."""
        selector, allowed = candidate.selector(), allowed_errors(len(rows), bar.threshold, bar.confidence)
        samples: list[Sample] = []
        for row in rows:
            samples += self.measure(row, [selector], with_answers=True)
            if sum(not sample.top_1 for sample in samples) > allowed:
                return self._tried(candidate, samples, bar, stopped=True)
        return self._tried(candidate, samples, bar, stopped=False)

    def measure(self, row: GatePrompt, selectors: Sequence[Selector], *, with_answers: bool) -> list[Sample]:
        """One sample per selector; none if nothing can be blended in the row.

        Answers are generated for rows with gold answers, and for all rows if `with_answers`.
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
                        f"the store is too small for a prompt of {len(prompt)} tokens ({report.missed_tokens} were "
                        "missed), so full recompute would be compared with itself; give a larger store"
                    )
                samples.append(sample)
        else:
            self.skipped.nothing_to_blend += 1
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done))
        return samples

    def _is_hopeless(self, samples: Sequence[Sample]) -> bool:
        """Whether even the upper bound of the agreement is below the threshold."""
        failed = sum(not sample.top_1 for sample in samples)
        enough = len(samples) >= STOP_AFTER
        return enough and reaches(failed, len(samples), 1 - self.bar.threshold, self.bar.confidence)

    def _tried(self, candidate: Candidate, samples: Sequence[Sample], bar: Bar, *, stopped: bool) -> Tried:
        if not samples:
            return Tried(candidate, None, passes=False, stopped=stopped)
        found = summarise(samples, bar.confidence)
        return Tried(candidate, found, not stopped and bar.is_reached(found), stopped)


def prepare(engine: BlendEngine, rows: Sequence[GateRow], seed: int) -> tuple[list[list[GatePrompt]], Skipped]:
    """The usable rows by passage set, both in an order drawn with the seed; and the numbers of rows left out."""
    skipped = Skipped()
    asked: dict[bytes, GatePrompt] = {}
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
        asked.setdefault(key, GatePrompt(prompt, tuple(row.answers)))
    if not asked:
        raise InvalidInputError(nothing_left(skipped))
    kept = list(asked.values())
    draw = np.random.default_rng(seed)
    sets: dict[frozenset[bytes], list[GatePrompt]] = {}
    for i in draw.permutation(len(kept)):
        passages = frozenset(chunk.token_ids.tobytes() for chunk in kept[i].prompt.chunks)
        sets.setdefault(passages, []).append(kept[i])
    found = list(sets.values())  # ordered by first row, which puts large sets early; so shuffle again
    return [found[i] for i in draw.permutation(len(found))], skipped


def one_of_each(sets: Sequence[list[GatePrompt]], skipped: Skipped) -> list[GatePrompt]:
    """One row of every passage set; the others are counted in `skipped`."""
    skipped.same_passages += sum(len(rows) - 1 for rows in sets)
    return [rows[0] for rows in sets]


def nothing_left(skipped: Skipped) -> str:
    """The message for data without a usable row."""
    return (
        f"there is no usable row: {skipped.too_long} exceed the model's context, "
        f"{skipped.nothing_to_blend} have nothing to blend; give other data"
    )


def _has_loaded_rows(engine: BlendEngine, prompt: Prompt) -> bool:
    """Whether stored chunks leave rows to select from: a lone chunk directly after its anchor is an exact prefix."""
    if len(prompt.chunks) != 1:
        return bool(prompt.chunks)
    front = [segment.token_ids for segment in takewhile(lambda segment: not segment.is_chunk, prompt.segments)]
    anchor = engine.planner.anchor.segments(prompt)
    return [int(i) for ids in front for i in ids] != [int(i) for ids in anchor for i in ids]
