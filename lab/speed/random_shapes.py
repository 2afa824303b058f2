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
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedModel

from cacheblend.bench.stamp import stamp
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.evaluation import Fused, make_methods
from cacheblend.evaluation.agreement import Sample, compare, reference, summarise
from cacheblend.evaluation.bootstrap import Values
from cacheblend.store import MemoryStore
from lab.inspection.deviations import by_layer, fused_methods, prompt_deviations

RATIO = 0.15
SELECTORS = ("hkvd", "query", "hybrid", "random", "head", "all")
GRADUAL = ((1, 2, 3), (3 * RATIO, 2 * RATIO, RATIO))
CAVEAT = (
    "Random weights and ids: this shows that the passes of a shape are right, and what\n"
    "they cost. It does not show which selector or ratio is good: random tokens refer\n"
    "to nothing."
)


Progress = Callable[[int, int], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        shape: of `SHAPES`.
        prompts: each of its own chunks.
        chunks, chunk_tokens, plain_tokens, question_tokens: of a prompt; the plain text is in front of the chunks.
        dtype: one of `DTYPES`.
        gain: factor on all weight matrices.
        seed: of weights, ids and bootstrap.
    """

    shape: str = "tiny"
    prompts: int = 4
    chunks: int = 6
    chunk_tokens: int = 128
    plain_tokens: int = 32
    question_tokens: int = 32
    dtype: str = "float32"
    gain: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidInputError(f"no dtype is called {self.dtype!r}; there are {', '.join(DTYPES)}")
        for name in ("prompts", "chunks", "chunk_tokens", "plain_tokens", "question_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures every selector on every prompt.

    Args:
        settings: of the benchmark.
        progress: called with (prompts done, prompts in all).

    Raises:
        InvalidInputError: no such shape, or the prompts are longer than its context.
    """
    config = BlendConfig(capture=False)
    with BlendEngine(
        _build(settings), None, store=MemoryStore(), config=config, fingerprint="bench", name=settings.shape
    ) as engine:
        prompts = draw_prompts(settings, engine.survey.vocab_size)
        engine.prompt(prompts[0])
        found = _measure(engine, prompts, settings.seed, progress)
    return {
        "shape": settings.shape,
        "dtype": settings.dtype,
        "gain": settings.gain,
        "seed": settings.seed,
        "prompt": {
            "prompts": len(prompts),
            "tokens": len(prompts[0]),
            "chunks": settings.chunks,
            "chunk_tokens": settings.chunk_tokens,
        },
        "caveat": CAVEAT,
        "arms": found,
        **stamp(),
    }


def draw_prompts(settings: Settings, vocab: int) -> list[Prompt]:
    """Prompts of random ids, each with its own chunks; plain text precedes them, so that none is an exact prefix."""
    draw = random.Random(settings.seed)

    def ids(count: int, part: Callable[[list[int]], Segment]) -> Segment:
        return part([draw.randrange(vocab) for _ in range(count)])

    return [
        Prompt.of(
            [
                ids(settings.plain_tokens, text),
                *(ids(settings.chunk_tokens, chunk) for _ in range(settings.chunks)),
                ids(settings.question_tokens, text),
            ]
        )
        for _ in range(settings.prompts)
    ]


def _build(settings: Settings) -> PreTrainedModel:
    model = build_shape(settings.shape, dtype=DTYPES[settings.dtype], seed=settings.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(settings.gain)
    return model


def _methods() -> list[Fused]:
    plain = make_methods(["reuse", "blend"], selectors=SELECTORS, ratios=[RATIO])
    gradual = make_methods(["blend"], ratios=[GRADUAL[1]], check_layers=[GRADUAL[0]])
    return fused_methods([*plain, *gradual])


def _measure(engine: BlendEngine, prompts: list[Prompt], seed: int, progress: Progress | None) -> list[dict[str, Any]]:
    measured = _methods()
    samples: dict[str, list[Sample]] = {method.label.name: [] for method in measured}
    deviations: list[dict[str, Values]] = []
    for number, prompt in enumerate(prompts, start=1):
        selectors = {method.label.name: method.selector for method in measured}
        deviations.append(prompt_deviations(engine, prompt, selectors))
        full = reference(engine, prompt)
        for method in measured:
            samples[method.label.name].append(compare(engine, prompt, method.selector, full)[0])
        if progress is not None:
            progress(number, len(prompts))
    layers = by_layer(deviations, seed=seed)
    return [
        {"arm": name, "agreement": summarise(of, seed=seed).to_dict(), "deviation": layers[name]}
        for name, of in samples.items()
    ]


def table(result: dict[str, Any]) -> Table:
    """A line for each selector."""
    facts = result["prompt"]
    out = Table(
        title=f"{result['shape']}, random weights, {facts['prompts']} x {facts['tokens']} tokens",
        title_justify="left",
        caption="compute: % of a full prefill; 1st: % with the same first token; KL: nats;\n"
        "KV, attention: deviation relative to full recompute, mean over layers",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for column in ("arm", "compute", "1st", "KL", "KV", "attention"):
        out.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for arm in result["arms"]:
        close, far = arm["agreement"], arm["deviation"]
        out.add_row(
            arm["arm"],
            f"{100 * close['compute']:.1f}",
            f"{100 * close['agreement']:.0f}",
            f"{close['kl']:.2g}",
            *(f"{far[name]['over_layers']['mean']:.3g}" for name in ("kv", "attention")),
        )
    return out
