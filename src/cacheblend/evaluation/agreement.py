"""Agreement with full recompute on the same token ids: a measure of quality that needs no gold answers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.bounds import lower_bound
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import FirstToken, agreement, finish, full_recompute, fused
from cacheblend.evaluation.bootstrap import mean_lower_bound
from cacheblend.evaluation.compute import ComputeScale


@dataclass(frozen=True)
class Reference:
    """The result of full recompute that others are compared with.

    Attributes:
        logits: [vocab] at the last position of the prompt.
        ttft_s: seconds to the logits.
        token_ids: greedy answer, up to the requested length.
        score: score of the answer; None without gold answers.
    """

    logits: torch.Tensor
    ttft_s: float
    token_ids: list[int]
    score: float | None = None


@dataclass(frozen=True)
class Sample:
    """One prompt with one selector, compared with full recompute.

    Attributes:
        top_1: the most likely first token is the same.
        kl: KL(full || other) of the first token, in nats.
        equal_tokens: share of the greedy answer's tokens before the first difference; None if none was generated.
        equal_answer: the greedy answers are the same; None if none was generated.
        compute: as a share of a full prefill, see `ComputeScale`.
        ttft_s, full_ttft_s: seconds to the first logits, of this prefill and of full recompute.
        score, full_score: scores of both answers; None without gold answers.
    """

    top_1: bool
    kl: float
    equal_tokens: float | None
    equal_answer: bool | None
    compute: float
    ttft_s: float
    full_ttft_s: float
    score: float | None = None
    full_score: float | None = None


@dataclass(frozen=True)
class Summary:
    """Figures of many samples.

    Attributes:
        rows: number of samples.
        agreed: number of samples with the same first token.
        agreement: their share.
        bound: one-sided lower bound of the agreement (Clopper-Pearson).
        kl: mean KL, in nats.
        equal_tokens: mean share of the greedy answer before the first difference; None if none was generated.
        equal_answers: share of answers that are the same; None if none was generated.
        compute: mean compute as a share of a full prefill.
        ttft_ratio: median of TTFT of full recompute / TTFT.
        f1_rows: number of samples with gold answers; if 0, the next three are None.
        f1, f1_difference: mean score, and mean difference to that of full recompute.
        f1_bound: one-sided lower bound of that difference (paired bootstrap).
    """

    rows: int
    agreed: int
    agreement: float
    bound: float
    kl: float
    equal_tokens: float | None
    equal_answers: float | None
    compute: float
    ttft_ratio: float
    f1_rows: int = 0
    f1: float | None = None
    f1_difference: float | None = None
    f1_bound: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a dict for JSON."""
        return asdict(self)


def reference(
    engine: BlendEngine,
    prompt: Prompt,
    *,
    tokens: int = 0,
    stop: Sequence[str] = (),
    score: Callable[[str], float] | None = None,
) -> Reference:
    """Runs full recompute on a prompt.

    Args:
        engine: engine with the model.
        prompt: checked by `engine.prompt`.
        tokens: most tokens of a greedy answer; 0 computes only the logits of the first token.
        stop: texts that end the answer.
        score: scores the text of the answer; None without gold answers.
    """
    first = full_recompute(engine, prompt)
    text, ids = _answer(engine, prompt, first, tokens, stop)
    return Reference(first.logits, first.ttft_s, ids, None if score is None else score(text))


def compare(
    engine: BlendEngine,
    prompt: Prompt,
    selector: Selector,
    full: Reference,
    *,
    tokens: int = 0,
    stop: Sequence[str] = (),
    score: Callable[[str], float] | None = None,
) -> tuple[Sample, BlendReport]:
    """Compares a prefill with `selector` to the `reference` of the same prompt and options. Stores nothing."""
    first = fused(engine, prompt, selector)
    report = first.report
    assert report is not None
    close = agreement(first.logits, full.logits)
    text, ids = _answer(engine, prompt, first, tokens, stop)
    sample = Sample(
        top_1=close.top_1,
        kl=close.kl,
        equal_tokens=equal_share(ids, full.token_ids) if tokens else None,
        equal_answer=ids == full.token_ids if tokens else None,
        compute=ComputeScale.of(engine).share(report.row_layers, report.projected_rows, report.prompt_tokens),
        ttft_s=report.ttft_s,
        full_ttft_s=full.ttft_s,
        score=None if score is None else score(text),
        full_score=full.score,
    )
    return sample, report


def equal_share(ids: Sequence[int], full: Sequence[int]) -> float:
    """Number of tokens before the first difference, as a share of the longer answer."""
    longest = max(len(ids), len(full))
    equal = next((i for i, (a, b) in enumerate(zip(ids, full, strict=False)) if a != b), min(len(ids), len(full)))
    return equal / longest if longest else 1.0


def summarise(samples: Sequence[Sample], confidence: float = 0.95, seed: int = 0) -> Summary:
    """Means and bounds over the samples of one selector.

    Args:
        samples: at least one sample.
        confidence: of the one-sided bounds.
        seed: seed of the bootstrap.

    Raises:
        InvalidInputError: there are no samples.
    """
    agreed = sum(sample.top_1 for sample in samples)
    bound = lower_bound(agreed, len(samples), confidence)
    tokens = [sample.equal_tokens for sample in samples if sample.equal_tokens is not None]
    answers = [sample.equal_answer for sample in samples if sample.equal_answer is not None]
    scores = [(s.score, s.full_score) for s in samples if s.score is not None and s.full_score is not None]
    differences = [score - full for score, full in scores]
    return Summary(
        rows=len(samples),
        agreed=agreed,
        agreement=agreed / len(samples),
        bound=bound,
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


def _answer(
    engine: BlendEngine, prompt: Prompt, first: FirstToken, tokens: int, stop: Sequence[str]
) -> tuple[str, list[int]]:
    """A greedy answer after a prefill: (text, token ids); empty for 0 tokens."""
    if tokens < 1:
        return "", []
    params = SamplingParams(max_new_tokens=tokens, stop=tuple(stop))
    return finish(engine, prompt, first, params.within(engine.survey.max_length, len(prompt)))
