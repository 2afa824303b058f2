"""Selectors on random weights of a known shape.

Random chunks are stored, and random prompts of them are compared with full recompute: compute, first-token agreement,
KL, deviation of KV and of the question's attention by layer.

The figures show that the passes of a shape are right (layer 0 does not deviate; `all`, which recomputes everything
through the fused path, agrees with transformers' own forward), what a selector costs on the shape, and how deviation
grows over its layers when no token matters more than another. They do not show which selector is better, which ratio
is enough, or the quality of answers: random weights attend to everything alike (`gain` makes attention sharper, not
meaningful), random ids refer to nothing, and the distribution of the first token is nearly flat, so agreement is low
and KL small whatever is loaded. For that, use trained weights and `cacheblend evaluate`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rich.table import Table

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation import Asked, Template, make_methods
from cacheblend.evaluation.bootstrap import Values, bootstrap_means
from cacheblend.evaluation.gate import Sample, compare, summarise
from cacheblend.evaluation.methods import FullRecompute, Fused
from cacheblend.store import MemoryStore
from lab.bench import Advance, plain_table, silent
from lab.inspection.deviation import (
    attention_deviation_by_layer,
    kv_deviation_by_layer,
    kv_norm_by_layer,
    relative_deviation,
)
from lab.inspection.observation import observe_full, observe_fused
from lab.settings import RandomShapes

RATIO = 0.15
SELECTORS = ("hkvd", "query", "hybrid", "random", "head", "all")
GRADUAL = ((1, 2, 3), (3 * RATIO, 2 * RATIO, RATIO))
CAVEAT = (
    "Random weights and ids: this shows that the passes of a shape are right, and what\n"
    "they cost. It does not show which selector or ratio is good: random tokens refer\n"
    "to nothing."
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(what: RandomShapes, advance: Advance = silent) -> dict[str, Any]:
    if what.dtype not in DTYPES:
        raise InvalidInputError(f"no dtype is called {what.dtype!r}; there are {', '.join(DTYPES)}")
    model = build_shape(what.shape, dtype=DTYPES[what.dtype], seed=what.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(what.gain)
    config = BlendConfig(capture=False)
    with BlendEngine(model, None, store=MemoryStore(), config=config, fingerprint="bench", name=what.shape) as engine:
        draw, vocab = random.Random(what.seed), engine.survey.vocab_size

        def ids(count: int, part: Callable[[list[int]], Segment]) -> Segment:
            return part([draw.randrange(vocab) for _ in range(count)])

        prompts = []  # each has its own chunks; plain text precedes them, so that none is an exact prefix
        for _ in range(what.prompts):
            plain, *chunks = ids(what.plain_tokens, text), *(ids(what.chunk_tokens, chunk) for _ in range(what.chunks))
            prompts.append(Prompt.of([plain, *chunks, ids(what.question_tokens, text)]))
        engine.prompt(prompts[0])
        found = _measure(engine, prompts, what.seed, advance)
    return {
        "shape": what.shape,
        "dtype": what.dtype,
        "gain": what.gain,
        "seed": what.seed,
        "prompt": {
            "prompts": len(prompts),
            "tokens": len(prompts[0]),
            "chunks": what.chunks,
            "chunk_tokens": what.chunk_tokens,
        },
        "caveat": CAVEAT,
        "arms": found,
        **stamp(),
    }


def _measure(engine: BlendEngine, prompts: list[Prompt], seed: int, advance: Advance) -> list[dict[str, Any]]:
    plain = make_methods(["reuse", "blend"], selectors=SELECTORS, ratios=[RATIO])
    gradual = make_methods(["blend"], ratios=[GRADUAL[1]], check_layers=[GRADUAL[0]])
    measured = [method for method in (*plain, *gradual) if isinstance(method, Fused)]
    samples: list[list[Sample]] = []
    deviations: list[Values] = []
    for number, prompt in enumerate(prompts, start=1):
        deviations.append(deviation_of(engine, prompt, measured))
        asked = Asked(engine, Template(), "", (), prompt, 0)
        full = FullRecompute().answer(asked)
        samples.append([compare(asked, method.selector, full)[0] for method in measured])
        advance(number, len(prompts))
    far = with_intervals(np.stack(deviations), seed)
    close = [asdict(summarise(list(of), seed=seed)) for of in zip(*samples, strict=True)]
    return [
        {"arm": method.label.name, "agreement": agreement, "deviation": {"rows": len(prompts), **deviation}}
        for method, agreement, deviation in zip(measured, close, far, strict=True)
    ]


def deviation_of(engine: BlendEngine, prompt: Prompt, methods: Sequence[Fused]) -> Values:
    """[methods, 2, layers]: relative deviation of the loaded tokens' KV, and of attention; chunks are stored first."""
    engine.warm(prompt.chunks, system=prompt)
    loaded = engine.planner.plan(prompt, engine.store).candidate_rows
    full = observe_full(engine, prompt)
    norm, found = kv_norm_by_layer(full.kv, loaded), []
    for method in methods:
        seen = observe_fused(engine, prompt, method.selector)
        kv = relative_deviation(kv_deviation_by_layer(full.kv, seen.kv)[:, loaded], norm).mean(axis=1)
        found.append(np.stack([kv, attention_deviation_by_layer(full.forward, seen.forward)]))
    return np.stack(found)


def with_intervals(values: Values, seed: int) -> list[dict[str, Any]]:
    """For each method ``{"kv", "attention"}``, each with ``mean, low, high`` by layer, and ``over_layers``.

    `values`: [prompts, methods, 2, layers], NaN where a layer's window sees none of the chunks, which becomes None.
    """
    over_layers = np.ma.masked_invalid(values).mean(axis=-1, keepdims=True).filled(np.nan)
    values = np.concatenate([values, over_layers], axis=-1)
    means = bootstrap_means(values.reshape(len(values), -1), seed=seed)
    ends = {name: getattr(means, name).reshape(values.shape[1:]) for name in ("mean", "low", "high")}

    def figure(method: int, measure: int) -> dict[str, Any]:
        plain = {
            name: [None if np.isnan(value) else value for value in end[method, measure].tolist()]
            for name, end in ends.items()
        }
        layers = {name: line[:-1] for name, line in plain.items()}
        return layers | {"over_layers": {name: line[-1] for name, line in plain.items()}}

    return [{"kv": figure(method, 0), "attention": figure(method, 1)} for method in range(values.shape[1])]


def table(result: dict[str, Any]) -> Table:
    facts = result["prompt"]
    close = {"compute": "{agreement[compute]:.1%}", "1st": "{agreement[agreement]:.0%}", "KL": "{agreement[kl]:.2g}"}
    far = {name: f"{{deviation[{name.lower()}][over_layers][mean]:.3g}}" for name in ("KV", "attention")}
    return plain_table(
        f"{result['shape']}, random weights, {facts['prompts']} x {facts['tokens']} tokens",
        {"arm": "{arm}"},
        close | far,
        "compute: of a full prefill; 1st: with the same first token; KL: nats;\n"
        "KV, attention: deviation relative to full recompute, mean over layers",
        result["arms"],
    )
