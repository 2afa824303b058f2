"""Deviation of methods from full recompute inside the model: KV and attention by layer, over rows of an evaluation.

`inspection` measures each prompt; this module adds rows, methods, means and intervals. It is slow: every prefill runs
twice, the second time with explicit attention weights for every row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf, nan
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from rich.table import Table

from cacheblend.core.errors import InvalidInputError, PromptTooLongError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.evaluation.bootstrap import Values, bootstrap_means
from cacheblend.evaluation.methods import Fused, Method
from cacheblend.evaluation.plots import whole_numbers
from cacheblend.evaluation.records import folder_name
from cacheblend.evaluation.report import Figure, method_table, number_text
from cacheblend.evaluation.runner import Settings
from lab import checkout
from lab.bench import Advance, picture, silent
from lab.inspection.deviation import (
    attention_deviation_by_layer,
    kv_deviation_by_layer,
    kv_norm_by_layer,
    relative_deviation,
)
from lab.inspection.observation import Observation, observe_full, observe_fused

MEASURES = ("kv", "attention")


@dataclass(frozen=True)
class Deviations:
    """The result of `measure_deviations`.

    Attributes:
        asked: number of rows requested.
        prompts: by `top_k`, for each prompt: name of the method -> [2, layers], see `prompt_deviations`; empty if
            nothing of the prompt is loaded at a new position.
    """

    asked: int
    prompts: dict[int | None, list[dict[str, Values]]]


def fused_methods(methods: Sequence[Method]) -> list[Fused]:
    """The methods that load KV at new positions: full reuse and the blends."""
    found = [method for method in methods if isinstance(method, Fused)]
    if not found:
        names = ", ".join(method.label.name for method in methods) or "none"
        raise InvalidInputError(
            f"deviation is measured for reuse and blend, and the methods are {names}; add one of the two"
        )
    return found


def measure_deviations(
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    methods: Sequence[Method],
    count: int,
    *,
    settings: Settings | None = None,
    folder: Path | None = None,
    advance: Advance = silent,
) -> Deviations:
    """Compares every fused method with full recompute on the first rows whose prompts fit the model's context.

    Missing passages of these rows are stored first; nothing else is stored. Time per prompt: two plain prefills for
    full recompute, and up to as many for each method. Memory: as `inspect_prompt`.

    Args:
        engine, rows, methods, settings: as for `evaluate`; methods that are not fused are ignored.
        count: number of rows at each `top_k`; fewer if not so many fit.
        folder: existing folder of the run; prompts already measured there are not measured again.
        advance: called with (prompts measured, total prompts).
    """
    if count < 1:
        raise InvalidInputError(f"deviation is measured on at least 1 row, got {count}")
    selectors = {method.label.name: method.selector for method in fused_methods(methods)}
    settings = settings or Settings()
    prompts = [
        (number, k, prompt)
        for k in settings.top_k
        for number, prompt in islice(_prompts(engine, rows, settings, k), count)
    ]
    found: dict[int | None, list[dict[str, Values]]] = {k: [] for k in settings.top_k}
    config = {"code": checkout.code_digest(CODE), "methods": list(selectors)}
    with checkout.Kept(None if folder is None else folder / folder_name("deviations", config), config) as kept:
        for done, (number, k, prompt) in enumerate(prompts, start=1):
            measure = partial(prompt_deviations, engine, prompt, selectors)
            plain = kept.get(f"row {number}, {k} passages", lambda: {n: _lists(of) for n, of in measure().items()})  # noqa: B023
            found[k].append({name: np.array(of, dtype=np.float64) for name, of in plain.items()})
            advance(done, len(prompts))
    return Deviations(count, found)


def prompt_deviations(engine: BlendEngine, prompt: Prompt, selectors: Mapping[str, Selector]) -> dict[str, Values]:
    """A checked prompt with several selectors, each compared with full recompute. Its chunks are stored first.

    Returns:
        [2, layers] for each name: relative KV deviation, mean over the tokens loaded at a new position
        (`relative_deviation`), and forward attention deviation (`attention_deviation_by_layer`). Empty if nothing of
        the prompt is loaded at a new position.
    """
    engine.warm(prompt.chunks, system=prompt)
    loaded = engine.planner.plan(prompt, engine.store).candidate_rows
    if not len(loaded):
        return {}
    full = observe_full(engine, prompt)
    norm = kv_norm_by_layer(full.kv, loaded)

    def deviations_from_full(seen: Observation) -> Values:
        kv = relative_deviation(kv_deviation_by_layer(full.kv, seen.kv)[:, loaded], norm).mean(axis=1)
        return np.stack([kv, attention_deviation_by_layer(full.forward, seen.forward)])

    return {name: deviations_from_full(observe_fused(engine, prompt, of)) for name, of in selectors.items()}


def with_deviations(summary: dict[str, Any], found: Deviations) -> dict[str, Any]:
    """Adds deviations to a summary of `summarise`, with intervals as in the summary.

    Returns:
        A copy with ``deviation`` in each method (see `by_layer`; None if not measured), and at the top level
        ``{"asked", "prompts": [{"top_k", "rows", "nothing_loaded"}]}``, where ``rows`` counts the measured rows.
    """
    figures = {k: by_layer(prompts, **summary["bootstrap"]) for k, prompts in found.prompts.items()}
    counts = [
        {"top_k": k, "rows": sum(map(bool, prompts)), "nothing_loaded": sum(not prompt for prompt in prompts)}
        for k, prompts in found.prompts.items()
    ]
    methods = [method | {"deviation": figures[method["top_k"]].get(method["method"])} for method in summary["methods"]]
    return summary | {"methods": methods, "deviation": {"asked": found.asked, "prompts": counts}}


def by_layer(
    prompts: Sequence[Mapping[str, Values]], *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Means over results of `prompt_deviations`, except empty ones, with intervals as of `bootstrap_means`.

    Every draw of prompts applies to all methods and layers.

    Returns:
        For each method ``{"rows", "kv", "attention"}``; the last two are ``{"mean", "low", "high", "over_layers"}``:
        lists over layers, with None where no prompt has a value, and the same three for the mean over layers.
    """
    there = [prompt for prompt in prompts if prompt]
    if not there:
        return {}
    names = list(there[0])
    values = np.stack([np.stack([prompt[name] for name in names]) for prompt in there])  # prompts, methods, 2, layers
    values = np.concatenate([values, _mean(values)[..., None]], axis=-1)
    means = bootstrap_means(values.reshape(len(there), -1), resamples=resamples, level=level, seed=seed)
    ends = np.stack([means.mean, means.low, means.high]).reshape(3, *values.shape[1:])
    return {
        name: {"rows": len(there)} | {measure: _figure(ends[:, method, at]) for at, measure in enumerate(MEASURES)}
        for method, name in enumerate(names)
    }


def _prompts(
    engine: BlendEngine, rows: Sequence[QuestionRow], settings: Settings, top_k: int | None
) -> Iterator[tuple[int, Prompt]]:
    """The prompts of `evaluate` that fit the context, with the numbers of their rows."""
    for number, row in enumerate(rows):
        passages = [Passage(text.text, text.title) for text in row.passages[:top_k]]
        try:
            yield number, settings.template.prompt(engine, passages, row.question)
        except PromptTooLongError:
            continue  # counted by `evaluate`


def _mean(values: Values) -> Values:
    """Mean over the last axis, ignoring NaN; NaN if all values are NaN."""
    there = ~np.isnan(values)
    count = there.sum(axis=-1)
    mean: Values = np.divide(
        np.where(there, values, 0.0).sum(axis=-1), count, out=np.full(count.shape, np.nan), where=count > 0
    )
    return mean


def _figure(ends: Values) -> dict[str, Any]:
    """From [3 (mean, low, high), layers + 1], where the last column is the mean over layers."""
    plain = _lists(ends)
    keys = ("mean", "low", "high")
    layers = {key: line[:-1] for key, line in zip(keys, plain, strict=True)}
    return layers | {"over_layers": {key: line[-1] for key, line in zip(keys, plain, strict=True)}}


CODE = tuple(f"inspection/{name}.py" for name in ("deviations", "deviation", "observation"))
"""The code whose results are kept: what other code measured is measured again."""


def _lists(values: Values) -> list[list[float | None]]:
    """For JSON, with None in place of NaN."""
    return [[None if np.isnan(value) else value for value in line] for line in values.tolist()]


def table(summary: dict[str, Any]) -> Table:
    """A line for each method of which deviation was measured."""
    measured = [method for method in summary["methods"] if method.get("deviation")]
    counts = sorted({method["deviation"]["rows"] for method in measured})

    def mean(measure: str) -> Callable[[Figure], str]:
        return lambda method: number_text(method["deviation"][measure]["over_layers"]["mean"], ".3f")

    def largest(measure: str) -> Callable[[Figure], str]:
        def text(method: Figure) -> str:
            known = [(v, layer) for layer, v in enumerate(method["deviation"][measure]["mean"]) if v is not None]
            return "{:.3f}, {:>2}".format(*max(known)) if known else ""

        return text

    return method_table(
        f"Deviation from full recompute, {' or '.join(map(str, counts))} rows",
        summary | {"methods": measured},
        {
            "KV": mean("kv"),
            "KV at most": largest("kv"),
            "attention": mean("attention"),
            "at most": largest("attention"),
        },
        "KV of the loaded tokens; the question's attention to its context; both relative to full recompute: "
        "mean over layers, and the largest value with its layer; 0 is exact",
    )


def notes(summary: dict[str, Any]) -> list[str]:
    """Rows that were asked for and not measured, and why."""
    lines = []
    for at in summary.get("deviation", {"prompts": []})["prompts"]:
        of = "" if at["top_k"] is None else f" with {at['top_k']} passages"
        taken = at["rows"] + at["nothing_loaded"]
        if taken < summary["deviation"]["asked"]:
            lines.append(f"deviation: {summary['deviation']['asked']} rows were requested, {taken}{of} are available")
        if at["nothing_loaded"]:
            lines.append(
                f"deviation: in {at['nothing_loaded']} of {taken} rows{of} nothing is loaded at a new position, so "
                "there is nothing to measure"
            )
    return lines


FILE = "deviation.png"
MOST_METHODS = 8
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "navy", "goldenrod")
REUSE = "tab:red"
PANELS = {
    "kv": ("KV of the loaded tokens", "KV deviation / norm in full recompute"),
    "attention": ("The question's attention to its context", "attention deviation / norm in full recompute"),
}


def draw_deviation(summary: dict[str, Any], folder: Path, *, data: str = "") -> list[Path]:
    """Draws `FILE` for the largest `top_k` and the first `MOST_METHODS` methods; no file without deviations.

    KV is on the left, the question's attention on the right. `data`: its name, for the title.
    """
    measured = [method for method in summary["methods"] if method.get("deviation")]
    if not measured:
        return []
    widest = max((method["top_k"] for method in measured), key=lambda k: inf if k is None else k)
    methods, file = [method for method in measured if method["top_k"] == widest], folder / FILE
    with picture(file, columns=len(PANELS), width=5.5, height=5.4) as panels:
        for axes, measure in zip(panels, PANELS, strict=True):
            _panel(axes, measure, methods[:MOST_METHODS])
        figure = panels[0].figure
        figure.suptitle(_title(summary, methods, data), x=0.01, ha="left", fontsize=12, parse_math=False)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=9)
    return [file]


def _panel(axes: Any, measure: str, methods: Sequence[dict[str, Any]]) -> None:
    colours = iter(COLOURS)
    for method in methods:
        colour = REUSE if method["kind"] == "reuse" else next(colours)
        of = {
            key: [nan if v is None else v for v in method["deviation"][measure][key]] for key in ("mean", "low", "high")
        }
        layers = range(len(of["mean"]))
        order = 3 if method["kind"] == "reuse" else 2  # above the lines of random rows, which may coincide with it
        style = {"markersize": 3, "linewidth": 1.6, "color": colour, "zorder": order}
        axes.plot(layers, of["mean"], "o-", **style, label=method["method"])
        axes.fill_between(layers, of["low"], of["high"], color=colour, alpha=0.12, linewidth=0)
    title, label = PANELS[measure]
    axes.set(xlabel="layer", ylabel=label, ylim=(0, None))
    axes.set_title(title)
    whole_numbers(axes.xaxis)


def _title(summary: dict[str, Any], methods: Sequence[dict[str, Any]], data: str) -> str:
    k = methods[0]["top_k"]
    parts = [
        f"Deviation of {summary['model']} from full recompute through loaded KV",
        data,
        f"{methods[0]['deviation']['rows']} rows",
        "" if k is None else f"{k} passages",
        f"{summary['bootstrap']['level']:.0%} intervals (bootstrap)",
        "" if len(methods) <= MOST_METHODS else f"{MOST_METHODS} of {len(methods)} methods",
    ]
    return fill(", ".join(filter(None, parts)), 110)
