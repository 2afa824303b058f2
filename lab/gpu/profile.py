"""Where the time of a pass goes: kernels by name, how often each is started, and how long the device waits for them.

The folder that the variable OUT names gets a trace of each pass, for chrome://tracing.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks
from cacheblend.core.config import BlendConfig
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.store import MemoryStore
from cacheblend.store.residence import HERE, PageLocked
from lab.gpu.context import Bench, Found, synchronize
from lab.gpu.ttft import HYBRID, chosen

MOST_KERNELS = 40
"""Names that are kept of each pass, those that take longest."""

_PASS_S = 3.0  # that a pass takes about, with those in front of it


@torch.no_grad()
def measure(bench: Bench) -> Found:
    """Full prefill and blends at two lengths: seconds without the profiler, and what the profiler saw. Kernels are
    compiled anew: how many while the engine is opened, and how many by the requests behind that."""
    kernels = tempfile.TemporaryDirectory(prefix="cacheblend-bench-")
    with kernels, patch.dict(os.environ, TRITON_CACHE_DIR=kernels.name):
        return _measure(bench, Path(kernels.name))


def _measure(bench: Bench, kernels: Path) -> Found:
    found: Found = {"passes": {}, "first": {}}
    is_cuda, shape = bench.device.type == "cuda", "tiny" if bench.dry_run else "llama-3.1-8b"
    model = build_shape(shape, device=str(bench.device))
    store = MemoryStore(48 << 30, residence=PageLocked() if is_cuda else HERE)
    config, begun = BlendConfig(capture=False), time.perf_counter()
    with store, BlendEngine(model, store=store, config=config, fingerprint="bench", name="bench") as engine:
        compiled = _count(kernels)
        found["first"] = {"open_s": time.perf_counter() - begun, "compiled": compiled}
        for chunks in (1, 2) if bench.dry_run else (8, 32):
            draw, length = random.Random(0), 64 if bench.dry_run else 512
            settings = TtftSettings(shape=shape, chunks=chunks, chunk_tokens=length)
            stored = open_chunks(settings, engine, draw)
            engine.warm(stored)
            prompt = draw_prompt(settings, stored, engine.runtime.survey.vocab_size, draw)
            if "first_s" not in found["first"]:
                found["first"]["first_s"], found["first"]["second_s"] = (
                    engine.prefill(prompt, selector=chosen(engine, "blend", 0.15)).report.ttft_s for _ in range(2)
                )
            passes: dict[str, Callable[[], object]] = {"full": partial(full_recompute, engine, prompt)}
            for name, ratio in (("blend", 0.15), ("blend", 0.05), (HYBRID, 0.15)):
                selector = chosen(engine, name, ratio)
                passes[f"{name}, r = {ratio:g}"] = partial(engine.prefill, prompt, selector=selector)
            for name, run in passes.items():
                what = f"{settings.prompt_tokens} tokens, {name}"
                if bench.has_time(f"profile, {what}", 0.0 if bench.dry_run else _PASS_S):
                    bench.progress(f"profile: {what}")
                    found["passes"][what] = _profiled(run, what, bench)
                    bench.keep(found)
            store.prune(0)
            found["first"]["compiled_by_requests"] = _count(kernels) - compiled
    return found


def _count(kernels: Path) -> int:
    return sum(1 for _ in kernels.rglob("*.cubin"))


def _profiled(run: Callable[[], object], what: str, bench: Bench) -> dict[str, Any]:
    is_cuda = bench.device.type == "cuda"
    taken = []
    for _ in range(2 if bench.dry_run else 6):
        begun = time.perf_counter()
        run()
        synchronize(bench.device)
        taken.append(time.perf_counter() - begun)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as seen:
        run()
        synchronize(bench.device)
    if folder := os.environ.get("OUT"):
        with tempfile.TemporaryDirectory(dir=folder) as beside:  # complete, or not there
            file = Path(beside) / "trace.json.gz"
            seen.export_chrome_trace(str(file))
            file.rename(Path(folder) / f"trace-{what.replace(' ', '-').replace(',', '')}.json.gz")
    return {"s": min(taken[1:])} | summary(seen.events() or [], is_cuda=is_cuda)


def summary(events: Iterable[Any], *, is_cuda: bool) -> dict[str, Any]:
    """Of a profiler's events, times in seconds: how many kernels were started, from the first one's beginning to the
    last one's end, the share of it in which the device did nothing, and [name, count, time] of those that took longest.
    On a CPU of PyTorch's operations, which contain each other."""
    own = [e for e in events if str(e.device_type).endswith("CUDA") == is_cuda and (is_cuda or e.name[:6] == "aten::")]
    spans = sorted((each.time_range.start / 1e6, each.time_range.end / 1e6) for each in own)
    busy, end = 0.0, spans[0][0] if spans else 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    by_name: dict[str, list[Any]] = {}
    for each in own:
        entry = by_name.setdefault(each.name, [each.name[:120], 0, 0.0])
        entry[1:] = entry[1] + 1, entry[2] + (each.time_range.end - each.time_range.start) / 1e6
    whole = end - spans[0][0] if spans else 0.0
    kernels = sorted(by_name.values(), key=lambda entry: -entry[2])[:MOST_KERNELS]
    return {"launches": len(own), "device_s": whole, "idle": 1 - busy / whole if whole else 0.0, "kernels": kernels}
