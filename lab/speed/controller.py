"""The loading controller against every fixed choice: TTFT over a grid of throttled devices and context lengths.

devices    a throttled device that holds all chunks, so slow that loading them takes 0.1, 0.3, 1, 3 and 10 times as
           long as the context's full prefill; alone, and with memory in front that holds every other chunk
arms       the controller; full prefill; fixed ratios from the floor to 1, of all blocks (each from the nearest device
           that has it), and of the blocks in memory only; alternating, on new orders of the chunks

A fixed ratio is left out where loading alone takes 1.5 times as long as full prefill: it would not be the fastest.
Blocks do not move between the devices.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks, open_model
from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.core.plan.blocks import Block
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.calibrate import calibrate
from cacheblend.engines.provenance import stamp
from cacheblend.engines.settings import controller_of
from cacheblend.store.combined import CascadeStore
from cacheblend.store.memory import MemoryStore
from lab.bench import Advance, alternating, silent
from lab.speed.throttle import ThrottledStore

SLOWNESS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Loading time of the context over its prefill time, by device."""

RATIOS = (0.15, 0.3, 0.5, 1.0)
NOT_RUN_FROM = 1.5
"""Loading time of the throttled device's blocks over prefill time, from which fixed ratios are left out."""

_UNTHROTTLED = 1e15


@torch.no_grad()
def run(settings: TtftSettings, lengths: tuple[int, ...], advance: Advance = silent) -> dict[str, Any]:
    """The grid over contexts of these lengths, in chunks; the first ratio is the least that may be chosen."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model, tokenizer, name = open_model(settings)
    cells: list[dict[str, Any]] = []
    with _open_devices(model, tokenizer, settings) as devices:
        tokens = [count * settings.chunk_tokens for count in lengths]
        profile = calibrate(devices.engine, lengths=sorted({256, *tokens}), rounds=settings.runs)
        for chunks in lengths:
            point = replace(settings, chunks=chunks)
            prompts = devices.fill(point)
            for slowness, behind_memory in product(SLOWNESS, (False, True)):
                cells.append(_cell(devices, profile, point, slowness, behind_memory, prompts))
                advance(len(cells), 2 * len(lengths) * len(SLOWNESS))
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
    """Memory that accepts no more blocks once it is `full`."""

    full = False

    def write(self, block: Block) -> bool:
        return not self.full and super().write(block)


@dataclass
class _Devices:
    """Memory, a throttled device, and engines on them.

    Attributes:
        near, far: memory with every other chunk, and the throttled device with all of them.
        in_memory, on_device: engines on `near` alone, on `far` alone.
        engine: on both.
    """

    near: _Filled
    far: ThrottledStore
    in_memory: BlendEngine
    on_device: BlendEngine
    engine: BlendEngine

    def fill(self, point: TtftSettings) -> Callable[[], Prompt]:
        """Stores the chunks of a context; returns what draws prompts of them."""
        draw = random.Random(point.seed)
        stored = open_chunks(point, self.engine, draw)
        self.near.full, self.far.bytes_per_s = False, _UNTHROTTLED
        self.in_memory.warm(stored[::2])
        self.on_device.warm(stored)
        self.engine.store.flush()
        self.near.full = True
        return lambda: draw_prompt(point, stored, self.engine.runtime.survey.vocab_size, draw)


@contextmanager
def _open_devices(model: Any, tokenizer: Any, settings: TtftSettings) -> Iterator[_Devices]:
    config = BlendConfig(capture=False, recompute_ratio=settings.ratios[0], load_timeout_s=math.inf)
    with ExitStack() as stack:
        near = _Filled(max_bytes=64 << 30)
        far = ThrottledStore(_UNTHROTTLED, max_bytes=64 << 30)
        both = stack.enter_context(CascadeStore([near, far]))
        options: dict[str, Any] = {"config": config, "fingerprint": "bench", "name": "bench"}
        engines = (BlendEngine(model, tokenizer, store=store, **options) for store in (near, far, both))
        yield _Devices(near, far, *(stack.enter_context(engine) for engine in engines))


def _cell(
    devices: _Devices,
    profile: CostModel,
    point: TtftSettings,
    slowness: float,
    behind_memory: bool,
    prompts: Callable[[], Prompt],
) -> dict[str, Any]:
    """Throttles the device, then measures the controller against the fixed choices, alternating."""
    context = point.chunks * point.chunk_tokens
    nbytes = devices.engine.runtime.stored_layout.block_bytes(256) / 256 * context
    devices.far.bytes_per_s = nbytes / (slowness * profile.full_s(context))
    (tier,), speed = devices.far.tier_names, TierSpeed(devices.far.bytes_per_s)
    known = replace(profile, tiers={**profile.tiers, tier: speed})
    decider = devices.engine if behind_memory else devices.on_device
    floor = point.ratios[0]
    ratios = sorted({floor, *(ratio for ratio in RATIOS if ratio > floor)})
    fixed = {f"memory r={ratio}": (devices.in_memory, ratio) for ratio in ratios if behind_memory}
    if slowness * (point.chunks // 2 / point.chunks if behind_memory else 1.0) < NOT_RUN_FROM:
        fixed |= {f"all r={ratio}": (decider, ratio) for ratio in ratios}
    controller = controller_of(known, decider.config, decider.runtime.stored_layout)
    reasons = []

    def seconds(name: str, _: None) -> float:
        prompt = prompts()
        decider.runtime.prefiller.controller = controller if name == "controller" else None
        started = time.perf_counter()
        if name == "full":
            full_recompute(decider, prompt)
        elif name == "controller":
            reasons.append(decider.prefill(prompt).report.decision)
        else:
            by, ratio = fixed[name]
            by.prefill(prompt, ratio=ratio)
        return time.perf_counter() - started

    asked = {name: partial(seconds, name) for name in ("controller", "full", *fixed)}
    arms = alternating(asked, lambda: None, point.runs, swaps=False)
    decider.runtime.prefiller.controller = None
    medians = {name: statistics.median(times) for name, times in arms.items()}
    best = min(seconds for name, seconds in medians.items() if name != "controller")
    return {
        "tokens": context,
        "load_over_prefill": slowness,
        "behind_memory": behind_memory,
        "bytes_per_s": devices.far.bytes_per_s,
        "seconds": arms,
        "over_best": medians["controller"] / best,
        "over_full": medians["controller"] / medians["full"],
        "reason": reasons[-1],
    }
