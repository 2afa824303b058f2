"""Measures one prompt: observes full recompute, full reuse and blend, and compares them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import NoRows, RandomRows, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import agreement
from lab.inspection.deviation import (
    Array,
    attention_deviation_by_layer,
    kv_deviation_by_layer,
    kv_norm_by_layer,
)
from lab.inspection.inspection import CurvePoint, Inspection, MethodView
from lab.inspection.observation import Observation, alone_mass, observe_full, observe_fused
from lab.inspection.parts import part_of_row, parts_of
from lab.inspection.ranks import spearman_matrix
from lab.inspection.token_texts import token_texts

Progress = Callable[[int, int], None]
"""Called with (passes done, total passes)."""
Curves = Mapping[str, Mapping[float, Selector]]
"""Name of a selector -> ratio -> the selector at that ratio."""

MAX_TOKENS = 4096
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
T = TypeVar("T")


def inspect_prompt(
    engine: BlendEngine,
    prompt: Prompt,
    selector: Selector | None = None,
    *,
    curves: Curves | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: Progress | None = None,
) -> Inspection:
    """Measures one prompt; chunks missing in the store are stored first.

    Memory: two KV caches of the prompt and 16 rows of attention per layer; attention matrices are computed for one
    layer and a few rows at a time. Time: about two plain prefills per pass: full recompute, full reuse, the chunks
    alone, blend, and each point of `curves`.

    Args:
        engine: model and store.
        prompt: made by `engine.prompt`.
        selector: selector of the blend; None takes that of the engine.
        curves: selectors by ratio for which attention deviation is also measured.
        max_tokens: longest accepted prompt.
        progress: called after every pass.

    Raises:
        InvalidInputError: the prompt is too long, or no chunk of it is loaded at a new position.
        StoreError: the store is full or cannot be written to.
    """
    prompt, curves = engine.prompt(prompt), curves or {}
    _check(prompt, max_tokens)
    selector = selector or engine.settings.selector()
    engine.warm(prompt.chunks, system=prompt)
    plan = engine.planner.plan(prompt, engine.store)
    _check_reused(plan)

    passes = _Passes(4 + sum(map(len, curves.values())), progress)
    full = passes.count(observe_full(engine, prompt))
    alone = passes.count(alone_mass(engine, plan))
    reuse = passes.count(_view(full, observe_fused(engine, prompt, NoRows()), alone))
    blend = passes.count(_view(full, observe_fused(engine, prompt, selector), alone))
    return Inspection(
        model=engine.name or type(engine.model).__name__,
        selector=repr(selector),
        tokens=token_texts(engine.tokenizer, plan.prompt.token_ids.tolist()),
        sources=[span.source.value for span in plan.spans for _ in range(len(span))],
        parts=parts_of(plan.prompt),
        candidates=plan.candidate_rows,
        kv_norm=kv_norm_by_layer(full.kv, plan.candidate_rows),
        full=_view(full, full, alone),
        reuse=reuse,
        blend=blend,
        correlation=_correlation(reuse.kv_deviation[:, plan.candidate_rows]),
        curves={
            name: [passes.count(_point(engine, full, ratio, points[ratio])) for ratio in sorted(points)]
            for name, points in curves.items()
        },
    )


def ratio_curves(config: BlendConfig, ratios: tuple[float, ...] = RATIOS) -> Curves:
    """The configured selector at these ratios, and random rows for comparison.

    A selector without a ratio (threshold, none, all) is replaced by HKVD.
    """
    name = config.selector if config.selector not in ("threshold", "none", "all", "random") else "hkvd"
    chosen = replace(config, selector=name)
    made = {ratio: chosen.make_selector(ratio) for ratio in ratios}
    return {name: made, "random": {ratio: RandomRows(ratio) for ratio in ratios}}


class _Passes:
    """Counts passes for `Progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def count(self, result: T) -> T:
        """Counts one pass; returns `result`."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
        return result


def _check(prompt: Prompt, max_tokens: int) -> None:
    if len(prompt) > max_tokens:
        raise InvalidInputError(
            f"the prompt has {len(prompt)} tokens, inspection takes {max_tokens}: it computes the attention of every "
            "row to all others; use fewer or shorter passages, or raise --max-prompt-tokens (max_tokens)"
        )
    if not prompt.chunks:
        raise InvalidInputError("the prompt has no chunk, so there is nothing to reuse; give at least one passage")


def _check_reused(plan: BlendPlan) -> None:
    if len(plan.candidate_rows):
        return
    if plan.missed_chunks():
        raise InvalidInputError(
            f"the store kept none of the {len(plan.prompt.chunks)} chunks just stored; give a larger store"
        )
    raise InvalidInputError(
        "nothing of this prompt is reused at a new position: its chunk directly follows its anchor, where stored KV is "
        "exact; give a second passage, or preceding text (--system)"
    )


def _view(full: Observation, seen: Observation, alone: npt.NDArray[np.float32]) -> MethodView:
    return MethodView(
        kv_deviation=kv_deviation_by_layer(full.kv, seen.kv),
        attention=_pooled(full, seen, alone),
        attention_deviation=attention_deviation_by_layer(full.forward, seen.forward),
        agreement=agreement(seen.logits, full.logits),
        computed=seen.computed,
        compute=seen.compute,
    )


def _pooled(full: Observation, seen: Observation, alone: npt.NDArray[np.float32]) -> Array:
    """[layers, parts, parts] mean over the rows of each part; rows not computed count as when they were stored."""
    mass = np.where(np.isnan(seen.mass), alone, seen.mass)
    mass = np.where(np.isnan(mass), full.mass, mass)  # an exact prefix
    parts = parts_of(seen.plan.prompt)
    part = part_of_row(parts, mass.shape[1])
    return np.stack([mass[:, part == i].mean(axis=1, dtype=np.float64) for i in range(len(parts))], axis=1)


def _correlation(deviation: Array) -> Array:
    correlation = spearman_matrix(deviation)
    correlation[0], correlation[:, 0] = np.nan, np.nan  # layer 0 deviates by rounding only
    return correlation


def _point(engine: BlendEngine, full: Observation, ratio: float, selector: Selector) -> CurvePoint:
    seen = observe_fused(engine, full.plan.prompt, selector)
    return CurvePoint(ratio, seen.compute, attention_deviation_by_layer(full.forward, seen.forward))
