"""Selectors on random weights of a known shape: `python benchmarks/random_shapes.py --shape tiny --json FILE`.

Random chunks are stored, and random prompts of them held against full recompute: compute, first-token agreement, KL,
deviation of KV and of the question's attention by layer.

What such figures say: that the passes of a shape are right (layer 0 does not deviate; `all`, which recomputes
everything by the fused path, agrees with transformers' own forward), what a selector costs on it, and how deviation
adds up over its layers where no token matters more than another. What they cannot say: which selector is the better
one, which ratio is enough, or anything of the quality of answers. Random weights attend to everything alike (`--gain`
makes attention sharper, not meaningful), random ids refer to nothing, and the first token's distribution is nearly
flat: its top hangs on tiny differences, so agreement is low and KL small whatever is loaded. For that take trained
weights and `cacheblend evaluate --deviation-rows`.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from cacheblend.bench.shapes import SHAPES, build_shape
from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Fused, make_methods
from cacheblend.evaluation.agreement import Sample, compare, reference, summarise
from cacheblend.evaluation.bootstrap import Values
from cacheblend.evaluation.deviations import by_layer, fused_methods, prompt_deviations
from cacheblend.store import MemoryStore

RATIO = 0.15
SELECTORS = ("hkvd", "query", "hybrid", "random", "head", "all")
GRADUAL = ((1, 2, 3), (3 * RATIO, 2 * RATIO, RATIO))
CAVEAT = (
    "Random weights, random ids: this shows that a shape's passes are right, and what\n"
    "they cost. It does not say which selector or ratio is good: nothing here refers\n"
    "to anything."
)


def arms() -> list[Fused]:
    plain = make_methods(["reuse", "blend"], selectors=SELECTORS, ratios=[RATIO])
    gradual = make_methods(["blend"], ratios=[GRADUAL[1]], check_layers=[GRADUAL[0]])
    return fused_methods([*plain, *gradual])


def build(options: argparse.Namespace) -> PreTrainedModel:
    model = build_shape(options.shape, dtype=getattr(torch, options.dtype), seed=options.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(options.gain)
    return model


def draw_prompts(options: argparse.Namespace, vocab: int) -> list[Prompt]:
    """Every prompt of its own chunks, plain text in front of them, so that none is an exact prefix."""
    draw = random.Random(options.seed)

    def ids(count: int, part: Callable[[list[int]], Segment]) -> Segment:
        return part([draw.randrange(vocab) for _ in range(count)])

    return [
        Prompt.of(
            [
                ids(options.plain_tokens, text),
                *(ids(options.chunk_tokens, chunk) for _ in range(options.chunks)),
                ids(options.question_tokens, text),
            ]
        )
        for _ in range(options.prompts)
    ]


def measure(engine: BlendEngine, prompts: list[Prompt], seed: int, console: Console) -> list[dict[str, Any]]:
    measured = arms()
    samples: dict[str, list[Sample]] = {arm.label.name: [] for arm in measured}
    deviations: list[dict[str, Values]] = []
    for number, prompt in enumerate(prompts, start=1):
        started = time.perf_counter()
        deviations.append(prompt_deviations(engine, prompt, {arm.label.name: arm.selector for arm in measured}))
        full = reference(engine, prompt)
        for arm in measured:
            samples[arm.label.name].append(compare(engine, prompt, arm.selector, full)[0])
        seconds = time.perf_counter() - started
        console.print(f"  prompt {number} of {len(prompts)}: {seconds:.1f} s", highlight=False)
    layers = by_layer(deviations, seed=seed)
    return [
        {"arm": name, "agreement": summarise(of, seed=seed).to_dict(), "deviation": layers[name]}
        for name, of in samples.items()
    ]


def table(result: dict[str, Any]) -> Table:
    facts = result["prompt"]
    out = Table(
        title=f"{result['shape']}, random weights, {facts['prompts']} x {facts['tokens']} tokens",
        title_justify="left",
        caption="compute: % of a full prefill; 1st: % with the same first token; KL: nats;\n"
        "KV, attention: deviation relative to full recompute's, mean over layers",
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gain", type=float, default=1.0, help="factor on all weight matrices; above 1: sharper")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and bootstrap")
    parser.add_argument("--json", type=Path)
    sizes = {"prompts": 4, "chunks": 6, "chunk-tokens": 128, "plain-tokens": 32, "question-tokens": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for name in sizes:
        if getattr(options, name.replace("-", "_")) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    return options


def main() -> None:
    options = parse()
    console = Console()
    config = BlendConfig(capture=False)
    store = MemoryStore()
    with BlendEngine(
        build(options), None, store=store, config=config, fingerprint="bench", name=options.shape
    ) as engine:
        prompts = draw_prompts(options, engine.survey.vocab_size)
        found = measure(engine, prompts, options.seed, console)
    result = {
        "shape": options.shape,
        "dtype": options.dtype,
        "gain": options.gain,
        "seed": options.seed,
        "prompt": {
            "prompts": len(prompts),
            "tokens": len(prompts[0]),
            "chunks": options.chunks,
            "chunk_tokens": options.chunk_tokens,
        },
        "caveat": CAVEAT,
        "arms": found,
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }
    console.print(table(result))
    console.print(CAVEAT, highlight=False)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
