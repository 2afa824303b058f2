"""The quality gate: the cheapest setting that is shown to agree with full recompute, on a user's model and prompts.

rows --split by seed--> | search: every candidate, few remain | confirmation: fresh rows, only these count |
        all rows of a passage set on one side                      one row of each passage set

The search selects the best of many candidates, so its measurements of that one are optimistic. It is therefore
measured again on rows that the search has not seen, and these alone decide. If it fails, the next more expensive
candidate is tried on the same rows. The number of such attempts is fixed in advance by the number of rows, and each
attempt gets an equal share of the error probability (Bonferroni). So the probability that any setting passes whose
first tokens agree too seldom is at most 1 - `confidence`. F1 is held to a bound, too, which few rows reach too easily.

Rows with the same passages, in any order, form a passage set. Their failures are correlated, so the bounds, which
assume independent rows, may count only one row of each set.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from cacheblend import __version__
from cacheblend.core.errors import CacheBlendError, InvalidInputError, ModelOverflowError, PromptTooLongError
from cacheblend.core.names import join_ids
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.profile import Measurement, Profile
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.bounds import allowed_errors, check_share, lower_bound, needed_rows, reaches
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import touch
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.engines.shadow import agreement
from cacheblend.evaluation.bootstrap import mean_lower_bound
from cacheblend.evaluation.candidates import Candidate
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.methods import Asked, FullRecompute, Fused, Label, Outcome
from cacheblend.evaluation.runner import check_chunks
from cacheblend.evaluation.scorers import Scorer, best, equal_share
from cacheblend.evaluation.templates import Template

ATTEMPTS = 3
STOP_AFTER = 30  # rows; no candidate is stopped before

Progress = Callable[[int, int], None]  # called with (rows done, total rows)
Verdict = Literal["passed", "none passes", "too few rows"]


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
class Sample:
    """One prompt with one selector, compared with full recompute."""

    top_1: bool  # the most likely first token is the same
    kl: float  # KL(full || other) of the first token, in nats
    equal_tokens: float | None  # share of the greedy answer's before the first difference; None: none was generated
    equal_answer: bool | None  # the greedy answers are the same; None: none was generated
    compute: float  # as a share of a full prefill, see `ComputeScale`
    ttft_s: float
    full_ttft_s: float
    score: float | None = None  # of both answers; None without gold answers
    full_score: float | None = None


@dataclass(frozen=True)
class Summary:
    """Figures of many samples."""

    rows: int
    agreed: int  # samples with the same first token
    agreement: float  # their share
    bound: float  # one-sided lower bound of the agreement (Clopper-Pearson)
    kl: float  # mean, in nats
    equal_tokens: float | None  # mean share of the greedy answer before the first difference; None: none was generated
    equal_answers: float | None  # share of answers that are the same; None: none was generated
    compute: float  # mean, as a share of a full prefill
    ttft_ratio: float  # median of TTFT of full recompute / TTFT
    f1_rows: int = 0  # samples with gold answers; if 0, the next three are None
    f1: float | None = None
    f1_difference: float | None = None  # mean, to full recompute
    f1_bound: float | None = None  # one-sided lower bound of that difference (paired bootstrap)


@dataclass(frozen=True)
class Bar:
    """Requirements on a setting."""

    threshold: float = 0.99  # required agreement of first tokens with full recompute
    confidence: float = 0.95  # of the one-sided bounds
    f1_margin: float = 0.01  # how far mean F1 may be below that of full recompute
    answer_tokens: int = 16  # most tokens of the greedy answers
    stop: tuple[str, ...] = ()  # texts that end them
    scorer: Scorer | None = None  # scores answers against gold answers; None ignores gold answers

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
    """Numbers of rows that were left out."""

    too_long: int = 0  # prompts that exceed the model's context, or have a chunk that does so behind its anchor
    repeated: int = 0  # rows with the same token ids as an earlier row
    nothing_to_blend: int = 0  # rows where all loaded tokens are an exact prefix, so that every setting agrees
    same_passages: int = 0  # rows of the confirmation with the same passages as another row of the confirmation


@dataclass(frozen=True)
class Tried:
    """A candidate measured on one part of the rows."""

    candidate: Candidate
    found: Summary | None  # its figures on the rows measured; None if there were none
    passes: bool  # it reached the bar of this part
    stopped: bool  # stopped early, because it could no longer reach the bar

    def to_dict(self) -> dict[str, Any]:
        measured = None if self.found is None else asdict(self.found)
        return asdict(self.candidate) | {"passes": self.passes, "stopped": self.stopped, "measured": measured}


@dataclass
class GateResult:
    """The result of the gate."""

    bar: Bar
    verdict: Verdict  # whether a setting passed, or whether there were too few rows to decide
    searched: list[Tried]  # all candidates on the first part of the rows, by compute; not evidence, see above
    confirmed: list[Tried]  # the attempts on the second part of the rows, in order
    chosen: Tried | None  # the attempt that passed
    search_rows: int
    confirm_rows: int
    passage_sets: int  # of both parts
    attempts: int  # the most allowed
    skipped: Skipped = field(default_factory=Skipped)

    def to_dict(self) -> dict[str, Any]:
        demands = ("threshold", "confidence", "f1_margin", "needed_rows")
        return {
            "verdict": self.verdict,
            **{name: getattr(self.bar, name) for name in demands},
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
    to_search, to_confirm = [row for rows in sets[:half] for row in rows], [rows[0] for rows in sets[half:]]
    skipped.same_passages = sum(len(rows) - 1 for rows in sets[half:])
    run = GateRun(engine, bar, skipped, progress, total=len(to_search) + len(to_confirm))
    if progress is not None:
        progress(0, run.total)
    searched = run.search(candidates, to_search)
    confirmed: list[Tried] = []
    for tried in promising(searched, bar)[:attempts]:
        run.total = run.done + len(to_confirm)
        confirmed.append(run.confirm(tried.candidate, to_confirm, bar.part(attempts)))
        if confirmed[-1].passes:
            break
    if skipped.nothing_to_blend and not any(tried.found for tried in searched):
        raise InvalidInputError(nothing_left(skipped))
    chosen = next((tried for tried in confirmed if tried.passes), None)
    # In rows that are left something may turn out to be an exact prefix: then there may be too few for any attempt.
    needed = (bar.part(attempts) if confirmed else bar).needed_rows
    is_decided = any(one.stopped or (one.found and one.found.rows >= needed) for one in confirmed or searched)
    verdict: Verdict = "passed" if chosen else "none passes" if attempts and is_decided else "too few rows"
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


def attempts_for(rows: int, bar: Bar) -> int:
    """Number of attempts that this many rows can decide, at most `ATTEMPTS`; 0: too few rows for any."""
    return next((count for count in range(ATTEMPTS, 0, -1) if rows >= bar.part(count).needed_rows), 0)


def promising(searched: Sequence[Tried], bar: Bar) -> list[Tried]:
    """Candidates worth an attempt, cheapest first: all that passed the search, else the one with fewest failures."""
    passing = [tried for tried in searched if tried.passes]
    if passing:
        return passing
    near = [
        t for t in searched if t.found and not t.stopped and t.found.agreement >= bar.threshold and t.found.compute < 1
    ]
    return sorted(near, key=lambda tried: (tried.found.rows - tried.found.agreed) if tried.found else 0)[:1]


def profile_of(engine: BlendEngine, result: GateResult, data: str = "", data_sha256: str = "") -> Profile:
    """The model's profile: the chosen setting, or that the model is not to be blended; `data`: name of the rows' file.
    Raises `InvalidInputError` if there were too few rows to decide."""
    if result.verdict == "too few rows":
        raise InvalidInputError(
            f"{result.passage_sets} rows with different passages cannot show an agreement of "
            f"{result.bar.threshold:g}: {2 * result.bar.needed_rows} are needed in which something is blended, half of "
            "them to search and half to confirm"
        )
    found = result.chosen.found if result.chosen else None
    settings = dict(result.chosen.candidate.settings) if result.chosen else {"selector": "all"}
    figures = ("agreement", "bound", "compute", "f1_difference", "f1_bound")
    measured = Measurement(
        model=engine.name,
        data=data,
        data_sha256=data_sha256,
        rows=found.rows if found else result.confirm_rows,
        f1_rows=found.f1_rows if found else 0,
        threshold=result.bar.threshold,
        confidence=result.bar.confidence,
        **{name: getattr(found, name, None) for name in figures},
        dtype=str(engine.runtime.survey.layout.dtype).removeprefix("torch."),
        anchor=engine.runtime.planner.anchor.described,
        codec=engine.runtime.planner.codec,
        date=datetime.now(UTC).date().isoformat(),
        versions={"cacheblend": __version__} | {name: version(name) for name in ("torch", "transformers")},
    )
    return Profile(engine.fingerprint, settings, measured)


@dataclass(frozen=True, eq=False)
class GatePrompt:
    """A row with a usable prompt."""

    number: int  # of the row, from 0
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
    exact: list[GatePrompt] = field(default_factory=list)  # rows in which nothing was blended

    @cached_property
    def scale(self) -> ComputeScale:
        return ComputeScale.of(self.engine)

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
            for i in list(live):  # hopeless: even the upper bound of the agreement is below the threshold
                failed, count = sum(not sample.top_1 for sample in samples[i]), len(samples[i])
                if count >= STOP_AFTER and reaches(failed, count, 1 - self.bar.threshold, self.bar.confidence):
                    live.remove(i)
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
        """One sample per selector; none if nothing can be blended in the row. Answers are generated for rows with gold
        answers, and for all rows if `with_answers`."""
        try:
            return self._measure(row, selectors, with_answers)
        except ModelOverflowError as error:
            raise CacheBlendError(f"row {row.number}: {error}") from error

    def _measure(self, row: GatePrompt, selectors: Sequence[Selector], with_answers: bool) -> list[Sample]:
        engine, prompt, bar = self.engine, row.prompt, self.bar
        self.done += 1
        samples: list[Sample] = []
        if row not in self.exact:
            engine.warm(prompt.chunks, system=prompt)
            score = partial(best, bar.scorer, golds=row.answers) if bar.scorer and row.answers else None
            tokens = bar.answer_tokens if with_answers or score else 0
            asked = Asked(engine, Template(stop=bar.stop), "", (), prompt, tokens)
            if self.done == 1:
                touch(engine, prompt)
            full = FullRecompute().answer(asked)
            for selector in selectors:
                sample, outcome = compare(asked, selector, full, self.scale, score)
                if outcome.missed_tokens:
                    raise InvalidInputError(
                        f"the store is too small for a prompt of {len(prompt)} tokens ({outcome.missed_tokens} were "
                        "missed), so full recompute would be compared with itself; give a larger store"
                    )
                if outcome.is_exact:  # whatever the selector
                    self.exact.append(row)
                    self.skipped.nothing_to_blend += 1
                    break
                samples.append(sample)
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done))
        return samples

    def _tried(self, candidate: Candidate, samples: Sequence[Sample], bar: Bar, *, stopped: bool) -> Tried:
        if not samples:
            return Tried(candidate, None, passes=False, stopped=stopped)
        found = summarise(samples, bar.confidence)
        return Tried(candidate, found, not stopped and bar.is_reached(found), stopped)


def compare(
    asked: Asked, selector: Selector, full: Outcome, scale: ComputeScale, score: Callable[[str], float] | None = None
) -> tuple[Sample, Outcome]:
    """Compares a fused prefill with full recompute's outcome of the same prompt; `score`: of an answer's text."""
    found = Fused(Label("compared", "blend", "compared"), selector).answer(asked)
    assert found.logits is not None and full.logits is not None  # both have the logits of their first token
    close = agreement(found.logits, full.logits)
    sample = Sample(
        top_1=close.first,
        kl=close.kl,
        equal_tokens=equal_share(found.token_ids, full.token_ids) if asked.max_tokens else None,
        equal_answer=found.token_ids == full.token_ids if asked.max_tokens else None,
        compute=scale.share(found.row_layers, found.projected_rows, found.prompt_tokens),
        ttft_s=found.ttft_s,
        full_ttft_s=full.ttft_s,
        score=None if score is None else score(found.text),
        full_score=None if score is None else score(full.text),
    )
    return sample, found


def summarise(samples: Sequence[Sample], confidence: float = 0.95) -> Summary:
    """Means and one-sided bounds over the samples, at least one, of one selector."""
    agreed = sum(sample.top_1 for sample in samples)
    tokens = [sample.equal_tokens for sample in samples if sample.equal_tokens is not None]
    answers = [sample.equal_answer for sample in samples if sample.equal_answer is not None]
    scores = [(s.score, s.full_score) for s in samples if s.score is not None and s.full_score is not None]
    differences = [score - full for score, full in scores]
    return Summary(
        rows=len(samples),
        agreed=agreed,
        agreement=agreed / len(samples),
        bound=lower_bound(agreed, len(samples), confidence),
        kl=statistics.fmean(sample.kl for sample in samples),
        equal_tokens=statistics.fmean(tokens) if tokens else None,
        equal_answers=statistics.fmean(answers) if answers else None,
        compute=statistics.fmean(sample.compute for sample in samples),
        ttft_ratio=statistics.median(sample.full_ttft_s / sample.ttft_s for sample in samples),
        f1_rows=len(scores),
        f1=statistics.fmean(score for score, _ in scores) if scores else None,
        f1_difference=statistics.fmean(differences) if scores else None,
        f1_bound=mean_lower_bound(differences, confidence) if scores else None,
    )


def prepare(engine: BlendEngine, rows: Sequence[GateRow], seed: int) -> tuple[list[list[GatePrompt]], Skipped]:
    """The usable rows by passage set, both in an order drawn with the seed; and the numbers of rows left out."""
    skipped = Skipped()
    asked: dict[bytes, GatePrompt] = {}
    is_exact = codec_of(engine.runtime.planner.codec).is_exact
    for number, row in enumerate(rows):
        try:
            prompt = engine.prompt(row.prompt)
            check_chunks(engine, prompt)
        except PromptTooLongError:
            skipped.too_long += 1
            continue
        # Without chunks no row is loaded; a lone one directly behind its anchor is an exact prefix, unless compressed.
        front = [segment.token_ids for segment in takewhile(lambda segment: not segment.is_chunk, prompt.segments)]
        is_prefix = len(prompt.chunks) == 1 and np.array_equal(
            join_ids(front), join_ids(engine.runtime.planner.anchor.segments(prompt))
        )
        if not prompt.chunks or (is_prefix and is_exact):
            skipped.nothing_to_blend += 1
            continue
        key = prompt.token_ids.tobytes()
        skipped.repeated += key in asked
        asked.setdefault(key, GatePrompt(number, prompt, tuple(row.answers)))
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


def nothing_left(skipped: Skipped) -> str:
    """The message for data without a usable row."""
    return (
        f"there is no usable row: {skipped.too_long} exceed the model's context, "
        f"{skipped.nothing_to_blend} have nothing to blend; give other data"
    )
