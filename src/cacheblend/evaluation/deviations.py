"""How far arms are from full recompute inside the model: KV and attention by layer, over the rows of an evaluation.

One prompt is measured as `inspection` measures it; this module knows rows, arms, means and intervals. Slow: a pass over
a prompt is made twice, and the second time every row's attention is written out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError, PromptTooLongError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.evaluation.bootstrap import Values, bootstrap_means
from cacheblend.evaluation.deviation_file import DeviationFile
from cacheblend.evaluation.inspection import (
    Observation,
    attention_deviation_by_layer,
    kv_deviation_by_layer,
    observe_full,
    observe_fused,
)
from cacheblend.evaluation.inspection.deviation import kv_norm_by_layer, relative_deviation
from cacheblend.evaluation.methods import Arm, Fused
from cacheblend.evaluation.runner import Settings

Progress = Callable[[int, int], None]
"""Called with (prompts measured, prompts in all)."""
MEASURES = ("kv", "attention")


@dataclass(frozen=True)
class Deviations:
    """What `measure_deviations` found.

    Attributes:
        asked: rows that were to be measured.
        prompts: by `top_k`, a prompt each: name of the arm -> [2, layers], see `prompt_deviations`; empty for a prompt
            of which nothing is loaded at a new position.
    """

    asked: int
    prompts: dict[int | None, list[dict[str, Values]]]


def fused_arms(arms: Sequence[Arm]) -> list[Fused]:
    """Those that load KV at new positions: full reuse and the blends.

    Raises:
        InvalidInputError: none of them does.
    """
    found = [arm for arm in arms if isinstance(arm, Fused)]
    if not found:
        names = ", ".join(arm.label.name for arm in arms) or "none"
        raise InvalidInputError(
            f"deviation is measured of reuse and blend, and the arms are {names}; add one of the two"
        )
    return found


def measure_deviations(
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    arms: Sequence[Arm],
    count: int,
    *,
    settings: Settings | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Deviations:
    """Holds every fused arm against full recompute on the first rows whose prompts fit the model's context.

    The rows' passages are stored first where the store lacks them; nothing else is stored. Time: two plain prefills a
    prompt for full recompute, and up to as many for each arm. Memory: as `inspect_prompt`.

    Args:
        engine: model and store.
        rows: as `evaluate` has them.
        arms: the others among them are left alone.
        count: rows to take, at each `top_k`; where fewer fit, those.
        settings: what the arms share.
        folder: of the run, there already; a prompt that was measured for it before is not measured again.
        progress: see `Progress`.

    Raises:
        InvalidInputError: no fused arm, a count below 1, or the folder's file of deviations is damaged.
        StoreError: the store is full or cannot be written to.
    """
    if count < 1:
        raise InvalidInputError(f"deviation is measured on at least 1 row, got {count}")
    selectors = {arm.label.name: arm.selector for arm in fused_arms(arms)}
    settings = settings or Settings()
    prompts = [
        (number, k, prompt)
        for k in settings.top_k
        for number, prompt in islice(_prompts(engine, rows, settings, k), count)
    ]
    kept = DeviationFile(folder, selectors)
    found: dict[int | None, list[dict[str, Values]]] = {k: [] for k in settings.top_k}
    for done, (number, k, prompt) in enumerate(prompts, start=1):
        if (number, k) not in kept.found:
            kept.add(number, k, prompt_deviations(engine, prompt, selectors))
        found[k].append(kept.found[number, k])
        if progress is not None:
            progress(done, len(prompts))
    return Deviations(count, found)


def prompt_deviations(engine: BlendEngine, prompt: Prompt, selectors: Mapping[str, Selector]) -> dict[str, Values]:
    """One prompt by several selectors, each held against full recompute. Its chunks are stored first.

    Args:
        engine: model and store.
        prompt: checked by `engine.prompt`.
        selectors: by name.

    Returns:
        [2, layers] for each name: relative KV deviation, mean over the loaded tokens (`relative_deviation`; loaded at
        a new position: an exact prefix does not deviate), and forward attention deviation
        (`attention_deviation_by_layer`). Empty if nothing of the prompt is loaded at a new position.
    """
    engine.warm(prompt.chunks, system=prompt)
    loaded = engine.planner.plan(prompt, engine.store).candidate_rows
    if not len(loaded):
        return {}
    full = observe_full(engine, prompt)
    norm = kv_norm_by_layer(full.kv, loaded)

    def held_against_full(seen: Observation) -> Values:
        kv = relative_deviation(kv_deviation_by_layer(full.kv, seen.kv)[:, loaded], norm).mean(axis=1)
        return np.stack([kv, attention_deviation_by_layer(full.forward, seen.forward)])

    return {name: held_against_full(observe_fused(engine, prompt, of)) for name, of in selectors.items()}


def with_deviations(summary: dict[str, Any], found: Deviations) -> dict[str, Any]:
    """The summary of `summarise`, and deviations in it; intervals as the summary's own.

    Returns:
        A copy with ``deviation`` in each arm (see `by_layer`; None where it was not measured), and one for all:
        ``{"asked", "prompts": [{"top_k", "rows", "nothing_loaded"}]}``, the rows being those measured.
    """
    figures = {k: by_layer(prompts, **summary["bootstrap"]) for k, prompts in found.prompts.items()}
    counts = [
        {"top_k": k, "rows": sum(map(bool, prompts)), "nothing_loaded": sum(not prompt for prompt in prompts)}
        for k, prompts in found.prompts.items()
    ]
    arms = [arm | {"deviation": figures[arm["top_k"]].get(arm["arm"])} for arm in summary["arms"]]
    return summary | {"arms": arms, "deviation": {"asked": found.asked, "prompts": counts}}


def by_layer(
    prompts: Sequence[Mapping[str, Values]], *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Means over prompts and their bootstrap intervals; one draw of prompts serves all arms and layers.

    Args:
        prompts: of `prompt_deviations`; empty ones do not count.
        resamples, level, seed: see `bootstrap_means`.

    Returns:
        By name of the arm ``{"rows", "kv", "attention"}``; the latter two ``{"mean", "low", "high", "over_layers"}``,
        lists by layer, None where no prompt says anything, and the same three of the mean over layers.
    """
    there = [prompt for prompt in prompts if prompt]
    if not there:
        return {}
    names = list(there[0])
    values = np.stack([np.stack([prompt[name] for name in names]) for prompt in there])  # prompts, arms, 2, layers
    values = np.concatenate([values, _mean(values)[..., None]], axis=-1)
    means = bootstrap_means(values.reshape(len(there), -1), resamples=resamples, level=level, seed=seed)
    ends = np.stack([means.mean, means.low, means.high]).reshape(3, *values.shape[1:])
    return {
        name: {"rows": len(there)} | {measure: _figure(ends[:, arm, at]) for at, measure in enumerate(MEASURES)}
        for arm, name in enumerate(names)
    }


# ---- inside -------------------------------------------------------------------------------------------------


def _prompts(
    engine: BlendEngine, rows: Sequence[QuestionRow], settings: Settings, top_k: int | None
) -> Iterator[tuple[int, Prompt]]:
    """The prompts that fit, as `evaluate` makes them, with the numbers of their rows."""
    for number, row in enumerate(rows):
        passages = [Passage(text.text, text.title) for text in row.passages[:top_k]]
        try:
            yield number, settings.template.layout.prompt(engine, passages, row.question)
        except PromptTooLongError:
            continue  # `evaluate` has counted it


def _mean(values: Values) -> Values:
    """Over the last axis, of those that are numbers; NaN where none is."""
    there = ~np.isnan(values)
    count = there.sum(axis=-1)
    mean: Values = np.divide(
        np.where(there, values, 0.0).sum(axis=-1), count, out=np.full(count.shape, np.nan), where=count > 0
    )
    return mean


def _figure(ends: Values) -> dict[str, Any]:
    """From [mean, low, high; layers and, last, the mean over them]."""
    plain = [[None if np.isnan(value) else float(value) for value in line] for line in ends]
    keys = ("mean", "low", "high")
    layers = {key: line[:-1] for key, line in zip(keys, plain, strict=True)}
    return layers | {"over_layers": {key: line[-1] for key, line in zip(keys, plain, strict=True)}}
