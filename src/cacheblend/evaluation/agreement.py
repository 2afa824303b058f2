"""Agreement with full recompute on the same token ids: a measure of quality that needs no gold answers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheblend.core.select.selectors import Selector
from cacheblend.engines.bounds import lower_bound
from cacheblend.engines.hf.baselines import agreement
from cacheblend.evaluation.bootstrap import mean_lower_bound
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.methods import Asked, Fused, Label, Outcome


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


def compare(
    asked: Asked, selector: Selector, full: Outcome, score: Callable[[str], float] | None = None
) -> tuple[Sample, Outcome]:
    """Compares a fused prefill with full recompute's outcome of the same prompt; `score`: of an answer's text."""
    full_score = None if score is None else score(full.text)
    found = Fused(Label("compared", "blend", "compared"), selector).answer(asked)
    assert found.logits is not None and full.logits is not None  # both have the logits of their first token
    close = agreement(found.logits, full.logits)
    sample = Sample(
        top_1=close.top_1,
        kl=close.kl,
        equal_tokens=equal_share(found.token_ids, full.token_ids) if asked.max_tokens else None,
        equal_answer=found.token_ids == full.token_ids if asked.max_tokens else None,
        compute=ComputeScale.of(asked.engine).share(found.row_layers, found.projected_rows, found.prompt_tokens),
        ttft_s=found.ttft_s,
        full_ttft_s=full.ttft_s,
        score=None if score is None else score(found.text),
        full_score=full_score,
    )
    return sample, found


def equal_share(ids: Sequence[int], full: Sequence[int]) -> float:
    """Number of tokens before the first difference, as a share of the longer answer."""
    longest = max(len(ids), len(full))
    equal = next((i for i, (a, b) in enumerate(zip(ids, full, strict=False)) if a != b), min(len(ids), len(full)))
    return equal / longest if longest else 1.0


def summarise(samples: Sequence[Sample], confidence: float = 0.95, seed: int = 0) -> Summary:
    """Means and one-sided bounds over the samples, at least one, of one selector; `seed`: of the bootstrap."""
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
        f1_bound=mean_lower_bound(differences, confidence, seed) if scores else None,
    )
