"""Shared parts of the parity tests: prompts, warmed engines, a pass that records the recomputed rows, comparisons."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.core.config import AnchorKind, BlendConfig
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions, PrefillResult
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Recorded, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.store import KVStore, MemoryStore
from campaign import rotating
from families import BLENDABLE, SHARED, VOCAB, tiny_model
from reference import Reference

FAMILIES = [family.name for family in BLENDABLE]
DIVERSE = [
    name
    for name in (
        *("llama", "gemma3_text", "gpt_oss", "cohere2", "qwen3_moe", "smollm3", "glm", "gemma4_text", "flint"),
        *("deepseek_v2", "deepseek_v3"),
    )
    if name in FAMILIES
]
"""In order: plain; windows and two thetas; sinks; interleaved pairs and NoPE; experts; NoPE; partial RoPE; layers of
several shapes; sinks, NoPE and windows; latents in either pairing."""
EVERY = rotating(FAMILIES, core=DIVERSE)
"""As parameters of a test."""
LATENT = [name for name in ("deepseek_v2", "deepseek_v3") if name in FAMILIES]

BOS = 1
BLOCK_SIZE = 16
TILE_ROWS = 32


def random_ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


A, B, C = chunk(random_ids(40, 1)), chunk(random_ids(25, 2)), chunk(random_ids(50, 3))
UNSEEN = chunk(random_ids(21, 4))
SYSTEM, QUESTION = text(random_ids(7, 5)), text(random_ids(9, 6))
RAG = Prompt.of([SYSTEM, B, A, C, QUESTION])


def open_engine(
    model: torch.nn.Module,
    stored: Iterable[Segment] = (A, B, C),
    *,
    anchor: AnchorKind = "none",
    store: KVStore | None = None,
    sentence_end_ids: Sequence[int] | None = None,
    **config: Any,
) -> BlendEngine:
    """An engine without a tokenizer that holds these chunks, captured after SYSTEM if the anchor is ``system``."""
    settings = {"anchor": anchor, "block_size": BLOCK_SIZE, "tile_rows": TILE_ROWS, "capture": False, **config}
    settings.setdefault("load_timeout_s", 60.0)  # the machine may be busy
    engine = BlendEngine(
        model,
        store=MemoryStore() if store is None else store,
        config=BlendConfig(**settings),
        bos_id=BOS if anchor == "bos" else None,
        sentence_end_ids=sentence_end_ids,
    )
    engine.warm(list(stored), system=RAG if anchor == "system" else None)
    return engine


@cache
def warm_engine(family: str, stored: tuple[Segment, ...] = (A, B, C), **config: Any) -> BlendEngine:
    """One engine per family and settings, that captures nothing and whose store nobody changes: tests share it."""
    return open_engine(tiny_model(family), stored, **config)


class Outcome(NamedTuple):
    """What a prefill with the package gave, and the loaded rows that were recomputed."""

    result: PrefillResult
    report: BlendReport
    recomputed: list[int]


def run(engine: BlendEngine, prompt: Prompt, selector: Selector) -> Outcome:
    """Runs the engine's own prefill and records the recomputed rows."""
    recorded = Recorded(selector)
    result = engine.prefill(prompt, selector=recorded)
    return Outcome(result, result.report, recorded.kept)


def stepper(engine: BlendEngine, prompt: Prompt, selector: Selector, **options: Any) -> BlendedPrefill:
    """The same prefill as a stepper with small tiles, for tests that interleave prefills."""

    def open_runner(plan: BlendPlan) -> HfLayerRunner:
        ids = torch.tensor(plan.prompt.token_ids[plan.prefix_length :].tolist())
        return HfLayerRunner(engine.runtime.view, ids, torch.arange(plan.prefix_length, len(plan)))

    def open_loader(plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
        layout, rotations = engine.runtime.survey.layout, engine.runtime.survey.rotations
        return LayerLoader(plan, engine.store, layout, rotations, first_reused_layer=first_reused_layer)

    plan = engine.runtime.planner.plan(prompt, engine.store)
    return BlendedPrefill(plan, open_runner, open_loader, selector, PrefillOptions(tile_rows=7, **options))


def finish(run: BlendedPrefill) -> PrefillResult:
    while not run.advance():
        pass
    return run.result()


def greedy(model: torch.nn.Module, prompt: Prompt, steps: int) -> list[int]:
    """The greedy answer of the model's own `generate`."""
    answer = _kept_answer if id(model) in SHARED else _own_answer
    return list(answer(model, tuple(prompt.token_ids.tolist()), steps))


def _own_answer(model: torch.nn.Module, prompt: tuple[int, ...], steps: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    options = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return answer[0, len(prompt) :].tolist()


_kept_answer = cache(_own_answer)


def rows_of(prompt: Prompt, *segments: int) -> list[int]:
    """Positions of the segments with these indices."""
    ends = np.cumsum([len(segment) for segment in prompt.segments])
    return [p for index in segments for p in range(ends[index] - len(prompt.segments[index]), ends[index])]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """The largest error is at most `tolerance` of the largest expected value."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    scale = float(expected.abs().max()) + 1e-30
    error = float((actual - expected).abs().max()) / scale
    assert error <= tolerance, f"{what} is off by {error:.1e} of its scale, allowed {tolerance:.0e}"


def assert_same(
    result: PrefillResult,
    logits: torch.Tensor,
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tolerance: float,
) -> None:
    """Compares logits, and the keys and values of every layer at every position."""
    assert len(result.kv) == len(kv)
    assert_close(result.logits, logits, tolerance, "logits")
    for layer, (actual, expected) in enumerate(zip(result.kv, kv, strict=True)):
        for name, mine, theirs in zip(("keys", "values"), actual, expected, strict=True):
            assert_close(mine, theirs, tolerance, f"{name} of layer {layer}")


def assert_as_reference(outcome: Outcome, reference: Reference, tolerance: float) -> None:
    """Checks that the same rows were recomputed, with the same result."""
    assert outcome.recomputed == reference.recomputed
    assert outcome.report.recomputed_tokens == len(reference.recomputed)
    assert_same(outcome.result, reference.logits, reference.kv, tolerance)
