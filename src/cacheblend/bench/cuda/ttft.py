"""Time to first token on a GPU: full prefill by transformers, and blends from its memory, the host's, and a disk.

Lengths are measured in the order of their importance, so that a run that is short of time has the first ones.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend.bench.cuda.context import Bench
from cacheblend.bench.shapes import build_shape
from cacheblend.bench.ttft import Arm, TtftSettings, draw_prompt, open_chunks, summary, timed
from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import FirstToken, full_recompute, fused
from cacheblend.store import DiskStore, KVStore, MemoryStore
from cacheblend.store.residence import HERE, OnDevice, PageLocked

RATIOS = (0.15, 0.05, 1.0)
STORES = ("pinned memory", "device", "disk")
MOST_BYTES = 48 << 30
"""Of a store; no prompt here needs as much."""


@dataclass(frozen=True)
class Point:
    """One length of one shape.

    Attributes:
        shape: of `SHAPES`.
        key: of its figures; "" if it has none.
        chunks, chunk_tokens: of the prompt.
        runs: measured rounds.
        seconds: that it takes about; it is not begun if fewer are left.
    """

    shape: str
    key: str
    chunks: int
    chunk_tokens: int = 512
    runs: int = 5
    seconds: float = 15.0


POINTS = (
    Point("llama-3.1-8b", "16k", 32, seconds=25),
    Point("llama-3.1-8b", "32k", 64, runs=3, seconds=40),
    Point("llama-3.1-8b", "4k", 8, seconds=10),
    Point("qwen3-32b", "", 32, runs=3, seconds=60),
    Point("qwen3-32b", "", 8, runs=3, seconds=20),
    Point("qwen3-32b", "", 64, runs=2, seconds=120),
)
DRY = (Point("tiny", "16k", 4, 64, 1, 1.0), Point("tiny", "4k", 2, 64, 1, 1.0))


@torch.no_grad()
def measure(bench: Bench) -> dict[str, Any]:
    """See `run.PARTS`."""
    found: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    points = DRY if bench.dry_run else POINTS
    for shape in dict.fromkeys(point.shape for point in points):
        name = f"ttft {shape}"
        if not bench.has_time(name, min(point.seconds for point in points if point.shape == shape)):
            continue
        bench.progress(f"ttft: weights of {shape}")
        try:
            model = build_shape(shape, device=str(bench.device))
        except torch.OutOfMemoryError:
            bench.skipped[name] = "its weights do not fit on this device"
            continue
        for point in points:
            tokens = point.chunks * point.chunk_tokens
            if point.shape != shape or not bench.has_time(f"{name}, {tokens} tokens", point.seconds):
                continue
            bench.progress(f"ttft: {shape}, {tokens} tokens")
            try:
                arms = _measure(point, model, bench)
            except torch.OutOfMemoryError:
                bench.skipped[f"{name}, {tokens} tokens"] = "it does not fit on this device"
                torch.cuda.empty_cache()
                continue
            found.append({"shape": shape, "tokens": tokens, "arms": arms})
            figures |= _figures(point, arms)
        del model
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"figures": figures, "points": found}


def _measure(point: Point, model: PreTrainedModel, bench: Bench) -> list[dict[str, Any]]:
    settings = TtftSettings(shape=point.shape, chunks=point.chunks, chunk_tokens=point.chunk_tokens, runs=point.runs)
    draw = random.Random(0)
    with ExitStack() as stack:
        engines = {store: stack.enter_context(_engine(model, store, bench)) for store in STORES}
        first = engines[STORES[0]]
        chunks = open_chunks(settings, first, draw)
        for engine in engines.values():
            engine.warm(chunks)
        full = [Arm(f"full, {how}", partial(_full, first, how)) for how in _attention()]
        arms = [*full, *(_blend(engines[STORES[0]], STORES[0], ratio) for ratio in RATIOS)]
        arms += [_blend(engines[store], store, RATIOS[0]) for store in STORES[1:]]
        for run in range(settings.runs + 1):
            prompt = draw_prompt(settings, chunks, first.survey.vocab_size, draw)
            for arm in arms:
                seconds, report = timed(arm, prompt, model)
                if run:
                    arm.seconds.append(seconds)
                    arm.reports += [report] if report else []
    fastest = min(full, key=lambda arm: statistics.median(arm.seconds))
    fastest.name = "full"
    row_layers = settings.prompt_tokens * len(engines[STORES[0]].survey.layout.layers)
    return [summary(arm, arms) | {"row_layer_limit": _limit(arm, row_layers)} for arm in arms]


def _attention() -> list[str]:
    """The kinds of attention that transformers has here for full prefill."""
    return ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") is not None else [])]


def _full(engine: BlendEngine, how: str, prompt: Prompt) -> FirstToken:
    before = engine.model.config._attn_implementation
    engine.model.set_attn_implementation(how)
    try:
        return full_recompute(engine, prompt)
    finally:
        engine.model.set_attn_implementation(before)


def _blend(engine: BlendEngine, store: str, ratio: float) -> Arm:
    chosen = engine.config.make_selector(ratio)
    return Arm("blend", partial(fused, engine, selector=chosen), ratio=ratio, store=store)


def _limit(arm: Arm, row_layers: int) -> float | None:
    """How much faster a blend would be if time were proportional to rows times layers."""
    return row_layers / arm.reports[-1].row_layers if arm.reports else None


@contextmanager
def _engine(model: PreTrainedModel, store: str, bench: Bench) -> Iterator[BlendEngine]:
    with ExitStack() as stack:
        kept: KVStore
        if store == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
            kept = DiskStore(folder, max_bytes=MOST_BYTES, durable=False)
        elif store == "device":
            kept = MemoryStore(MOST_BYTES, residence=OnDevice(bench.device))
        else:
            kept = MemoryStore(MOST_BYTES, residence=PageLocked() if bench.device.type == "cuda" else HERE)
        stack.enter_context(kept)
        config = BlendConfig(capture=False)
        yield stack.enter_context(
            BlendEngine(model, None, store=kept, config=config, fingerprint="bench", name="bench")
        )


def _figures(point: Point, arms: list[dict[str, Any]]) -> dict[str, float]:
    if not point.key:
        return {}
    blends = {arm["ratio"]: arm for arm in arms if arm["arm"] == "blend" and arm["store"] == STORES[0]}
    figures = {f"ttft_speedup_{point.key}": float(blends[0.15]["speedup_vs_full"])}
    if point.key == "16k":
        figures["of_limit_16k"] = figures["ttft_speedup_16k"] / blends[0.15]["row_layer_limit"]
        figures["ttft_speedup_16k_r05"] = float(blends[0.05]["speedup_vs_full"])
    return figures
