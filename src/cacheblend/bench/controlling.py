"""The loading controller against every fixed choice: TTFT over a grid of throttled devices and context lengths.

devices    a throttled one that holds all chunks, such that loading them takes 0.1, 0.3, 1, 3 and 10 times as long as
           the context's full prefill: alone, and behind memory that has every other chunk
arms       the controller; full prefill; ratios from the floor to 1 of all blocks, each from the nearest device that
           has it, and of what memory has alone; in turns on new orders

A fixed ratio is not run where loading alone takes longer than full prefill by half: it would not be the lowest. Nothing
moves from one device to the other.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from cacheblend.bench.stamp import stamp
from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks, open_model
from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.controller import CostModel
from cacheblend.core.plan.blocks import Block
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.cost_model import controller_of
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.calibrate import calibrate
from cacheblend.store.combined.cascade import CascadeStore
from cacheblend.store.combined.throttled import ThrottledStore
from cacheblend.store.memory import MemoryStore
from cacheblend.store.speed import measure

SLOWNESS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""T_load of the context over T_prefill, of each device."""

RATIOS = (0.15, 0.3, 0.5, 1.0)
NOT_RUN_FROM = 1.5
"""T_load of the throttled device's part over T_prefill."""

_UNTHROTTLED = 1e15
Progress = Callable[[int, int], None]


@torch.no_grad()
def run(
    settings: TtftSettings, lengths: tuple[int, ...] = (4, 8, 16), progress: Progress | None = None
) -> dict[str, Any]:
    """The grid.

    Args:
        settings: model or shape, tokens of a chunk, runs, seed; the first ratio is the floor.
        lengths: chunks of a context.
        progress: called with (cells done, cells in all).

    Raises:
        InvalidInputError: the model cannot be opened.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model, tokenizer, name = open_model(settings)
    floor = settings.ratios[0]
    config = BlendConfig(capture=False, recompute_ratio=floor)
    cells: list[dict[str, Any]] = []
    with ExitStack() as stack:
        near = _Filled(max_bytes=64 << 30)
        far = ThrottledStore(_UNTHROTTLED, max_bytes=64 << 30)
        both = CascadeStore([near, far])
        stack.enter_context(both)
        in_memory, on_device, engine = (
            stack.enter_context(
                BlendEngine(model, tokenizer, store=store, config=config, fingerprint="bench", name="bench")
            )
            for store in (near, far, both)
        )
        tokens = [count * settings.chunk_tokens for count in lengths]
        profile = calibrate(engine, lengths=sorted({256, *tokens}), rounds=settings.runs)
        ratios = sorted({floor, *(ratio for ratio in RATIOS if ratio > floor)})
        for chunks in lengths:
            point = replace(settings, chunks=chunks)
            draw = random.Random(settings.seed)
            stored = open_chunks(point, engine, draw)
            near.full, far.bytes_per_s = False, _UNTHROTTLED
            in_memory.warm(stored[::2])
            on_device.warm(stored)
            both.flush()
            near.full = True
            context = chunks * settings.chunk_tokens
            nbytes = engine.stored_layout.block_bytes(256) / 256 * context

            def prompts(point: TtftSettings = point, stored: Any = stored, draw: random.Random = draw) -> Prompt:
                return draw_prompt(point, stored, engine.survey.vocab_size, draw)

            for slowness, behind_memory in product(SLOWNESS, (False, True)):
                far.bytes_per_s = nbytes / (slowness * profile.full_s(context))
                tier, speed = measure(far, engine.stored_layout, rounds=1)
                known = replace(profile, tiers={**profile.tiers, tier: speed})
                decider = engine if behind_memory else on_device
                fixed = {f"memory r={ratio}": (in_memory, ratio) for ratio in ratios if behind_memory}
                if slowness * (chunks // 2 / chunks if behind_memory else 1.0) < NOT_RUN_FROM:
                    fixed |= {f"all r={ratio}": (decider, ratio) for ratio in ratios}
                cell = {
                    "tokens": context,
                    "load_over_prefill": slowness,
                    "behind_memory": behind_memory,
                    "bytes_per_s": far.bytes_per_s,
                }
                cells.append(cell | _cell(decider, known, fixed, prompts, settings.runs))
                if progress is not None:
                    progress(len(cells), 2 * len(lengths) * len(SLOWNESS))
    worst = max(cell["over_best"] for cell in cells)
    slow = max(cell["over_full"] for cell in cells if cell["load_over_prefill"] > 1 and not cell["behind_memory"])
    return {
        "figures": {"controller_worst": worst, "slow_device_over_full": slow},
        "model": name,
        "profile": profile.to_dict(),
        "cells": cells,
        **stamp(),
    }


class _Filled(MemoryStore):
    """Memory that can be told to take nothing more.

    Attributes:
        full: it takes nothing.
    """

    full = False

    def write(self, block: Block) -> bool:
        """See `KVStore.write`."""
        return not self.full and super().write(block)


def _cell(
    engine: BlendEngine,
    profile: CostModel,
    fixed: Mapping[str, tuple[BlendEngine, float]],
    prompts: Callable[[], Prompt],
    runs: int,
) -> dict[str, Any]:
    """One device and length: medians of all arms, in turns."""
    controller = controller_of(profile, engine.config, engine.stored_layout)
    arms: dict[str, list[float]] = {name: [] for name in ("controller", "full", *fixed)}
    reasons = []
    for round_ in range(runs + 1):
        for name, times in arms.items():
            prompt = prompts()
            engine.controller = controller if name == "controller" else None
            started = time.perf_counter()
            if name == "full":
                full_recompute(engine, prompt)
            elif name == "controller":
                reasons.append(engine.prefill(prompt)[1].decision)
            else:
                by, ratio = fixed[name]
                by.prefill(prompt, ratio=ratio)
            if round_:
                times.append(time.perf_counter() - started)
    engine.controller = None
    medians = {name: statistics.median(times) for name, times in arms.items()}
    best = min(seconds for name, seconds in medians.items() if name != "controller")
    return {
        "seconds": arms,
        "over_best": medians["controller"] / best,
        "over_full": medians["controller"] / medians["full"],
        "reason": reasons[-1],
    }


def table(result: dict[str, Any]) -> str:
    """A line a cell."""
    head = f"{'tokens':>7}{'load/prefill':>14}{'memory':>8}{'controller':>12}{'best fixed':>12}{'full':>9}  over best"
    lines = [head]
    for cell in result["cells"]:
        medians = {name: statistics.median(times) for name, times in cell["seconds"].items()}
        best = min((seconds, name) for name, seconds in medians.items() if name != "controller")
        near = "half" if cell["behind_memory"] else ""
        lines.append(
            f"{cell['tokens']:>7}{cell['load_over_prefill']:>14}{near:>8}{medians['controller']:>10.3f} s"
            f"{best[0]:>10.3f} s{medians['full']:>7.3f} s  {cell['over_best']:.2f} ({best[1]})"
        )
    return "\n".join(lines)
