"""Selectors on random weights of a known shape.

Random chunks are stored, and random prompts of them are compared with full recompute: compute, first-token agreement,
KL, deviation of KV and of the question's attention by layer.

The figures show that the passes of a shape are right (layer 0 does not deviate; `all`, which recomputes everything
through the fused path, agrees with transformers' own forward), what a selector costs on the shape, and how deviation
grows over its layers when no token matters more than another. They do not show which selector is better, which ratio
is enough, or the quality of answers: random weights attend to everything alike (`gain` makes attention sharper, not
meaningful), random ids refer to nothing, and the distribution of the first token is nearly flat, so agreement is low
and KL small whatever is loaded. For that, use trained weights and `python -m lab evaluate --deviation-rows`.
"""

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation import Asked, Template, make_methods
from cacheblend.evaluation.bootstrap import Values
from cacheblend.evaluation.gate import Sample, compare, summarise
from cacheblend.evaluation.methods import FullRecompute
from cacheblend.store import MemoryStore
from lab.bench import Advance, plain_table, silent
from lab.inspection.deviations import by_layer, fused_methods, prompt_deviations
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
    measured = fused_methods([*plain, *gradual])
    samples: dict[str, list[Sample]] = {method.label.name: [] for method in measured}
    deviations: list[dict[str, Values]] = []
    for number, prompt in enumerate(prompts, start=1):
        selectors = {method.label.name: method.selector for method in measured}
        deviations.append(prompt_deviations(engine, prompt, selectors))
        asked = Asked(engine, Template(), "", (), prompt, 0)
        full = FullRecompute().answer(asked)
        for method in measured:
            samples[method.label.name].append(compare(asked, method.selector, full)[0])
        advance(number, len(prompts))
    layers = by_layer(deviations, seed=seed)
    return [
        {"arm": name, "agreement": asdict(summarise(of, seed=seed)), "deviation": layers[name]}
        for name, of in samples.items()
    ]


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
