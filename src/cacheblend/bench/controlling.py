"""The loading controller against every fixed choice: TTFT over a grid of throttled devices and context lengths.

devices    throttled so that loading a context takes 0.1, 0.3, 1, 3 and 10 times as long as its full prefill
arms       the controller; all stored blocks at ratios from the floor to 1; full prefill; in turns on new orders

A fixed ratio is not run on a device from which loading alone takes twice as long as full prefill: it would not be the
lowest.
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks, open_model
from cacheblend.core.config import BlendConfig
from cacheblend.core.controller import MachineProfile
from cacheblend.core.prompt import Prompt
from cacheblend.engines import environment
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.arms import full_recompute
from cacheblend.engines.hf.measuring import measure_machine
from cacheblend.engines.machine import controller_of
from cacheblend.store.speed import measure
from cacheblend.store.throttled import ThrottledStore

SLOWNESS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""T_load of the context over T_prefill, of each device."""

RATIOS = (0.15, 0.3, 0.5, 1.0)
NOT_RUN_OVER = 2.0
"""T_load over T_prefill."""

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
        store = ThrottledStore(_UNTHROTTLED, max_bytes=64 << 30)
        stack.enter_context(store)
        engine = stack.enter_context(
            BlendEngine(model, tokenizer, store=store, config=config, fingerprint="bench", name="bench")
        )
        tokens = [count * settings.chunk_tokens for count in lengths]
        profile = measure_machine(engine, lengths=sorted({256, *tokens}), rounds=settings.runs)
        for chunks in lengths:
            point = replace(settings, chunks=chunks)
            draw = random.Random(settings.seed)
            stored = open_chunks(point, engine, draw)
            store.bytes_per_s = _UNTHROTTLED
            engine.warm(stored)
            context = chunks * settings.chunk_tokens
            nbytes = engine.stored_layout.block_bytes(256) / 256 * context
            for slowness in SLOWNESS:
                throughput = nbytes / (slowness * profile.full_s(context))

                def prompts(point: TtftSettings = point, stored: Any = stored, draw: random.Random = draw) -> Prompt:
                    return draw_prompt(point, stored, engine.survey.vocab_size, draw)

                ratios = [ratio for ratio in RATIOS if ratio >= floor and slowness <= NOT_RUN_OVER]
                cell = _cell(engine, store, profile, throughput, prompts, settings.runs, ratios)
                cells.append({"tokens": context, "load_over_prefill": slowness, **cell})
                if progress is not None:
                    progress(len(cells), len(lengths) * len(SLOWNESS))
    worst = max(cell["over_best"] for cell in cells)
    slow = max(cell["over_full"] for cell in cells if cell["load_over_prefill"] > 1)
    return {
        "figures": {"controller_worst": worst, "slow_device_over_full": slow},
        "model": name,
        "profile": profile.to_dict(),
        "cells": cells,
        "machine": environment.machine(),
        "versions": environment.versions(),
        "commit": environment.commit(),
    }


def _cell(
    engine: BlendEngine,
    store: ThrottledStore,
    profile: MachineProfile,
    throughput: float,
    prompts: Callable[[], Prompt],
    runs: int,
    ratios: list[float],
) -> dict[str, Any]:
    """One device and length: medians of all arms, in turns."""
    store.bytes_per_s = throughput
    tier, speed = measure(store, engine.stored_layout, rounds=1)
    known = replace(profile, tiers={tier: speed})
    controller = controller_of(known, engine.config, engine.stored_layout)
    arms: dict[str, list[float]] = {name: [] for name in ("controller", "full", *(f"r={r}" for r in ratios))}
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
                engine.prefill(prompt, ratio=float(name[2:]))
            if round_:
                times.append(time.perf_counter() - started)
    engine.controller = None
    medians = {name: statistics.median(times) for name, times in arms.items()}
    best = min(seconds for name, seconds in medians.items() if name != "controller")
    return {
        "bytes_per_s": throughput,
        "seconds": arms,
        "over_best": medians["controller"] / best,
        "over_full": medians["controller"] / medians["full"],
        "reason": reasons[-1],
    }


def table(result: dict[str, Any]) -> str:
    """A line a cell."""
    lines = [f"{'tokens':>7}{'load/prefill':>14}{'controller':>12}{'best fixed':>12}{'full':>9}  over best"]
    for cell in result["cells"]:
        medians = {name: statistics.median(times) for name, times in cell["seconds"].items()}
        best = min((seconds, name) for name, seconds in medians.items() if name != "controller")
        lines.append(
            f"{cell['tokens']:>7}{cell['load_over_prefill']:>14}{medians['controller']:>10.3f} s"
            f"{best[0]:>10.3f} s{medians['full']:>7.3f} s  {cell['over_best']:.2f} ({best[1]})"
        )
    return "\n".join(lines)
