"""The arms of an evaluation: ways to an answer, each timed and counted. Knows the engine, neither files nor scores."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cacheblend.core.fuse.prefill import check_selector
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.baselines import FirstToken, finish, full_recompute, fused, prefix_caching
from cacheblend.evaluation.templates import Template


@dataclass(frozen=True)
class Label:
    """What an arm is, for reports.

    Attributes:
        name: unique in a run.
        kind: ``full``, ``prefix``, ``reuse``, ``blend``, ``map-reduce`` or ``map-rerank``.
        family: arms that differ by their ratio only have one family: they are a curve.
        selector: as it was asked for; empty where nothing is selected.
        ratio: recompute ratio behind the last check layer; None where there is none.
        check_layers: of the selector.
    """

    name: str
    kind: str
    family: str
    selector: str = ""
    ratio: float | None = None
    check_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A question to be answered from passages.

    Attributes:
        engine: with the passages in its store.
        template: of the prompts.
        question: as the data has it.
        passages: in order.
        prompt: of all of them, within the model's context.
        max_tokens: of each answer.
    """

    engine: BlendEngine
    template: Template
    question: str
    passages: Sequence[Passage]
    prompt: Prompt
    max_tokens: int

    def params(self, prompt: Prompt) -> SamplingParams:
        """Greedy, `max_tokens` at most or what the context has room for."""
        limit = self.engine.survey.max_length
        room = self.max_tokens if limit is None else limit - len(prompt) + 1
        return SamplingParams(max_new_tokens=min(self.max_tokens, room), stop=self.template.stop)


@dataclass(frozen=True)
class Outcome:
    """What an arm came to.

    Attributes:
        text, token_ids: the answer.
        ttft_s: until the first token of that answer can be drawn; with map arms, behind all that stands before it.
        total_s: until its last token.
        prompt_tokens: of all prompts that were read.
        row_layers, projected_rows: computed until the first token; see `BlendReport`.
        loaded_tokens, recomputed_tokens, missed_tokens: of the passages; see `BlendReport`.
        logits: [vocab] of the first token; None where the prompt is not that of the other arms.
    """

    text: str
    token_ids: list[int]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    row_layers: int
    projected_rows: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    missed_tokens: int = 0
    logits: torch.Tensor | None = field(default=None, repr=False, compare=False)


class Arm(Protocol):
    """A way to an answer: a frozen dataclass. It stores nothing and leaves the engine as it was."""

    @property
    def label(self) -> Label:
        """What it is called."""
        ...

    def check(self, layers: int) -> None:
        """Raises `InvalidInputError` if a model of so many layers cannot be asked like this."""
        ...

    def answer(self, asked: Asked) -> Outcome:
        """Answers, and says what it cost.

        Raises:
            PromptTooLongError: a prompt of its own making is over the model's context.
        """
        ...


class _AnyModel:
    def check(self, layers: int) -> None:
        """See `Arm`."""


@dataclass(frozen=True)
class FullRecompute(_AnyModel):
    """Everything is computed: transformers' own forward."""

    label: Label = Label("full", "full", "full")

    def answer(self, asked: Asked) -> Outcome:
        """See `Arm`."""
        started = time.perf_counter()
        return _finish(asked, full_recompute(asked.engine, asked.prompt), started)


@dataclass(frozen=True)
class PrefixCaching(_AnyModel):
    """Only an exact prefix is loaded."""

    label: Label = Label("prefix", "prefix", "prefix")

    def answer(self, asked: Asked) -> Outcome:
        """See `Arm`."""
        started = time.perf_counter()
        return _finish(asked, prefix_caching(asked.engine, asked.prompt), started)


@dataclass(frozen=True)
class Fused:
    """Through the fused path; full reuse and the blends differ by their selector."""

    label: Label
    selector: Selector

    def check(self, layers: int) -> None:
        """See `Arm`."""
        check_selector(self.selector, layers)

    def answer(self, asked: Asked) -> Outcome:
        """See `Arm`."""
        started = time.perf_counter()
        return _finish(asked, fused(asked.engine, asked.prompt, self.selector), started)


@dataclass(frozen=True)
class MapReduce(_AnyModel):
    """Each passage is asked alone, the answers are joined and asked once more. Nothing is loaded."""

    label: Label = Label("map-reduce", "map-reduce", "map-reduce")

    def answer(self, asked: Asked) -> Outcome:
        """See `Arm`."""
        started = time.perf_counter()
        parts = _ask_alone(asked)
        text = asked.template.reduce_text([part.text for part in parts], asked.question)
        prompt = asked.template.reduce_layout.prompt(asked.engine, [], text)
        first = full_recompute(asked.engine, prompt)
        ttft_s = time.perf_counter() - started
        last = _decode(asked, prompt, first)
        layers = len(asked.engine.survey.layout.layers)
        return Outcome(
            text=last.text,
            token_ids=last.token_ids,
            ttft_s=ttft_s,
            total_s=time.perf_counter() - started,
            prompt_tokens=len(prompt) + sum(part.prompt_tokens for part in parts),
            row_layers=first.row_layers + sum(part.rows for part in parts) * layers,
        )


@dataclass(frozen=True)
class MapRerank(_AnyModel):
    """Each passage is asked alone; the answer of the highest mean log-probability of its tokens wins."""

    label: Label = Label("map-rerank", "map-rerank", "map-rerank")

    def answer(self, asked: Asked) -> Outcome:
        """See `Arm`. Which answer wins is known when all are there, so its first token comes with its last."""
        started = time.perf_counter()
        parts = _ask_alone(asked)
        best = max(parts, key=lambda part: part.mean_log_probability)
        seconds = time.perf_counter() - started
        layers = len(asked.engine.survey.layout.layers)
        return Outcome(
            text=best.text,
            token_ids=best.token_ids,
            ttft_s=seconds,
            total_s=seconds,
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            row_layers=sum(part.rows for part in parts) * layers,
        )


# ---- inside ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoded:
    text: str
    token_ids: list[int]
    prompt_tokens: int
    mean_log_probability: float

    @property
    def rows(self) -> int:
        """Rows computed: the prompt's, and those of all drawn tokens but the last."""
        return self.prompt_tokens + len(self.token_ids) - 1


def _finish(asked: Asked, first: FirstToken, started: float) -> Outcome:
    decoded = _decode(asked, asked.prompt, first)
    report = first.report or BlendReport()
    return Outcome(
        text=decoded.text,
        token_ids=decoded.token_ids,
        ttft_s=first.ttft_s,
        total_s=time.perf_counter() - started,
        prompt_tokens=len(asked.prompt),
        row_layers=first.row_layers,
        projected_rows=report.projected_rows,
        loaded_tokens=report.loaded_tokens,
        recomputed_tokens=report.recomputed_tokens,
        missed_tokens=report.missed_tokens,
        logits=first.logits,
    )


def _ask_alone(asked: Asked) -> list[_Decoded]:
    parts = []
    for passage in asked.passages:
        prompt = asked.template.map_layout.prompt(asked.engine, [passage], asked.question)
        parts.append(_decode(asked, prompt, full_recompute(asked.engine, prompt), with_probability=True))
    return parts


def _decode(asked: Asked, prompt: Prompt, first: FirstToken, *, with_probability: bool = False) -> _Decoded:
    log_probabilities: list[float] = []

    def add(token: int, logits: torch.Tensor) -> None:
        log_probabilities.append(float(logits.float().log_softmax(-1)[token]))

    text, ids = finish(asked.engine, prompt, first, asked.params(prompt), add if with_probability else None)
    return _Decoded(text, ids, len(prompt), sum(log_probabilities) / len(ids))
