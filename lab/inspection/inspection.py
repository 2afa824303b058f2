"""The measurements of one prompt: deviation of loaded KV, attention between parts, and the effect of recomputing.

Three passes are compared: full recompute, full reuse and blend.

Selectors use squared deviation (`core.kernels.deviation`). Tables and figures show *relative* deviation: its square
root, divided by the root mean square norm of the fresh KV of the layer's loaded rows. This keeps the order of rows and
makes layers comparable: 0 is exact, 1 is as large as the KV itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import NoRows, RandomRows, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.shadow import Compared, agreement
from lab.bench import Advance, silent
from lab.inspection.deviation import (
    Array,
    attention_deviation_by_layer,
    kv_deviation_by_layer,
    kv_norm_by_layer,
    relative_deviation,
    spearman,
)
from lab.inspection.observation import (
    Observation,
    Part,
    alone_mass,
    observe_full,
    observe_fused,
    part_of_row,
    parts_of,
)

TOP_SHARE = 0.15
LOWEST_SCALE = 0.05  # smallest end of the colour scale: deviation below it may be rounding


@dataclass(frozen=True)
class MethodView:
    """One pass, compared with full recompute.

    Attributes:
        kv_deviation: [layers, tokens] squared L2 over keys and values.
        attention: [layers, parts, parts] share of a row's attention on each part, mean over heads and rows of a part.
            Rows that were not computed count with their attention when their chunk was computed alone.
        attention_deviation: [layers] see `attention_deviation_by_layer`.
        agreement: agreement of the first token's distribution.
        computed: [layers, tokens] whether a row was computed.
        compute: as a share of a full prefill, see `ComputeScale`.
    """

    kv_deviation: Array
    attention: Array
    attention_deviation: Array
    agreement: Compared
    computed: npt.NDArray[np.bool_]
    compute: float


@dataclass(frozen=True)
class CurvePoint:
    """Measurements at one recompute ratio: share of a full prefill's compute, and [layers] attention deviation."""

    ratio: float
    compute: float
    attention_deviation: Array


@dataclass(frozen=True)
class Inspection:
    """All measurements of one prompt.

    Attributes:
        model: name of the model.
        selector: selector of the blend.
        sources: [tokens] ``prefix``, ``loaded``, ``miss`` or ``text``.
        parts: rows and columns of the attention matrices.
        candidates: [n] positions of the loaded rows, from which a selector selects.
        kv_norm: [layers] root mean square norm of the candidates' fresh KV.
        full, reuse, blend: the three passes; the deviations of full are zero.
        curves: name of a selector -> its points, by increasing ratio.
    """

    model: str
    selector: str
    sources: list[str]
    parts: list[Part]
    candidates: npt.NDArray[np.int64]
    kv_norm: Array
    full: MethodView
    reuse: MethodView
    blend: MethodView
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.kv_norm)

    @property
    def recomputed(self) -> npt.NDArray[np.int64]:
        """Positions of the loaded rows that blend computes in the last layer."""
        rows: npt.NDArray[np.int64] = self.candidates[self.blend.computed[-1, self.candidates]]
        return rows

    def relative(self, method: MethodView) -> Array:
        """[layers, tokens] relative deviation, see the module's docstring."""
        return relative_deviation(method.kv_deviation, self.kv_norm)

    def scale(self) -> float:
        """End of the colour scale: 99th percentile of the candidates' relative deviation under full reuse."""
        values = self.relative(self.reuse)[:, self.candidates]
        return max(LOWEST_SCALE, float(np.percentile(values, 99)))

    def mean_deviation(self, method: MethodView) -> Array:
        """[layers] mean relative deviation of the candidates."""
        mean: Array = self.relative(method)[:, self.candidates].mean(axis=1)
        return mean

    def top_share(self) -> Array:
        """[layers] share of the summed deviation under full reuse that the top 15 % of the candidates hold."""
        ordered = np.sort(self.relative(self.reuse)[:, self.candidates], axis=1)[:, ::-1]
        top, whole = ordered[:, : max(1, round(TOP_SHARE * ordered.shape[1]))].sum(axis=1), ordered.sum(axis=1)
        share: Array = np.divide(top, whole, out=np.full(len(whole), np.nan), where=whole > 0)
        share[0] = np.nan  # layer 0 deviates by rounding only
        return share

    def next_correlation(self) -> Array:
        """[layers] Spearman's rank correlation of the candidates' deviation under full reuse with the next layer's;
        NaN for the first layer, which deviates by rounding only, and for the last."""
        rows = self.reuse.kv_deviation[1:, self.candidates]
        return np.array([np.nan, *(spearman(*pair) for pair in pairwise(rows)), np.nan][: self.num_layers])

    def cross_chunk(self, method: MethodView) -> Array:
        """[layers] share of attention from rows of the second and later chunks to other chunks."""
        chunks = [index for index, part in enumerate(self.parts) if part.is_chunk]
        later = chunks[1:]
        if not later:
            return np.full(self.num_layers, np.nan)
        to_others = [method.attention[:, i, [c for c in chunks if c != i]].sum(axis=1) for i in later]
        share: Array = np.average(to_others, axis=0, weights=[len(self.parts[i]) for i in later])
        return share


Curves = Mapping[str, Mapping[float, Selector]]
"""Name of a selector -> ratio -> the selector at that ratio."""

MAX_TOKENS = 4096
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
T = TypeVar("T")


def inspect_prompt(
    engine: BlendEngine,
    prompt: Prompt,
    *,
    curves: Curves | None = None,
    max_tokens: int = MAX_TOKENS,
    advance: Advance = silent,
) -> Inspection:
    """Measures one prompt; chunks missing in the store are stored first.

    Memory: two KV caches of the prompt and 16 rows of attention per layer; attention matrices are computed for one
    layer and a few rows at a time. Time: about two plain prefills per pass: full recompute, full reuse, the chunks
    alone, blend, and each point of `curves`.

    Args:
        engine: model and store.
        prompt: made by `engine.prompt`.
        curves: selectors by ratio for which attention deviation is also measured.
        max_tokens: longest accepted prompt.
        advance: called with (passes done, passes in all).

    Raises:
        InvalidInputError: the prompt is too long, or no chunk of it is loaded at a new position.
        StoreError: the store is full or cannot be written to.
    """
    prompt, curves = engine.prompt(prompt), curves or {}
    if len(prompt) > max_tokens:
        raise InvalidInputError(
            f"the prompt has {len(prompt)} tokens, inspection takes {max_tokens}: it computes the attention of every "
            "row to all others; use fewer or shorter passages, or raise --max-prompt-tokens (max_tokens)"
        )
    if not prompt.chunks:
        raise InvalidInputError("the prompt has no chunk, so there is nothing to reuse; give at least one passage")
    selector = engine.runtime.settings.selector()
    engine.warm(prompt.chunks, system=prompt)
    plan = engine.runtime.planner.plan(prompt, engine.store)
    if not len(plan.candidate_rows):
        raise InvalidInputError(
            f"the store kept none of the {len(plan.prompt.chunks)} chunks just stored; give a larger store"
            if plan.missed_chunks()
            else "nothing of this prompt is reused at a new position: its chunk directly follows its anchor, where "
            "stored KV is exact; give a second passage, or preceding text (--system)"
        )

    done, total = count(1), 4 + sum(map(len, curves.values()))

    def counted(result: T) -> T:
        advance(next(done), total)
        return result

    full = counted(observe_full(engine, prompt))
    alone = counted(alone_mass(engine, plan))
    reuse = counted(_view(full, observe_fused(engine, prompt, NoRows()), alone))
    blend = counted(_view(full, observe_fused(engine, prompt, selector), alone))
    return Inspection(
        model=engine.name or type(engine.model).__name__,
        selector=repr(selector),
        sources=[span.source.value for span in plan.spans for _ in range(len(span))],
        parts=parts_of(plan.prompt),
        candidates=plan.candidate_rows,
        kv_norm=kv_norm_by_layer(full.kv, plan.candidate_rows),
        full=_view(full, full, alone),
        reuse=reuse,
        blend=blend,
        curves={
            name: [counted(_point(engine, full, ratio, points[ratio])) for ratio in sorted(points)]
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


def _view(full: Observation, seen: Observation, alone: npt.NDArray[np.float32]) -> MethodView:
    mass = np.where(np.isnan(seen.mass), alone, seen.mass)  # rows not computed count as when they were stored
    mass = np.where(np.isnan(mass), full.mass, mass)  # an exact prefix
    parts = parts_of(seen.plan.prompt)
    part = part_of_row(parts, mass.shape[1])
    pooled = [mass[:, part == i].mean(axis=1, dtype=np.float64) for i in range(len(parts))]
    return MethodView(
        kv_deviation=kv_deviation_by_layer(full.kv, seen.kv),
        attention=np.stack(pooled, axis=1),
        attention_deviation=attention_deviation_by_layer(full.forward, seen.forward),
        agreement=agreement(seen.logits, full.logits),
        computed=seen.computed,
        compute=seen.compute,
    )


def _point(engine: BlendEngine, full: Observation, ratio: float, selector: Selector) -> CurvePoint:
    seen = observe_fused(engine, full.plan.prompt, selector)
    return CurvePoint(ratio, seen.compute, attention_deviation_by_layer(full.forward, seen.forward))


# ---- as JSON ------------------------------------------------------------------------------------------------

DIGITS = 5  # significant ones


def summary(of: Inspection) -> dict[str, Any]:
    """The figures by layer, as JSON and as shown on the terminal. Undefined values are None."""
    compared = {"reuse": of.reuse, "blend": of.blend}
    methods = {"full": of.full, **compared}
    means = {name: of.mean_deviation(method) for name, method in compared.items()}
    cross = {name: of.cross_chunk(method) for name, method in methods.items()}
    top, following = of.top_share(), of.next_correlation()
    by_layer = [
        {
            "layer": layer,
            "mean_deviation": {name: mean[layer] for name, mean in means.items()},
            "top_share": top[layer],
            "correlation_with_next": following[layer],
            "attention_deviation": {name: method.attention_deviation[layer] for name, method in compared.items()},
            "cross_chunk_attention": {name: values[layer] for name, values in cross.items()},
        }
        for layer in range(of.num_layers)
    ]
    return {
        "model": of.model,
        "selector": of.selector,
        "prompt_tokens": len(of.sources),
        "loaded_tokens": len(of.candidates),
        "recomputed_tokens": len(of.recomputed),
        "compute": _plain({name: method.compute for name, method in methods.items()}),
        "first_token": {
            name: _plain({"kl": method.agreement.kl, "top_1": method.agreement.first})
            for name, method in compared.items()
        },
        "layers": [_plain(each) for each in by_layer],
        "attention_deviation_by_ratio": {
            name: [_facts(point) for point in points] for name, points in of.curves.items()
        },
    }


def _facts(point: CurvePoint) -> dict[str, Any]:
    deviation = point.attention_deviation
    mean = float(np.nanmean(deviation)) if np.isfinite(deviation).any() else math.nan
    return {"ratio": point.ratio, **_plain({"compute": point.compute, "mean": mean, "by_layer": deviation})}


def _plain(value: Any) -> Any:
    """Converts to JSON types: arrays to lists, rounded, with None for NaN and infinities."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
