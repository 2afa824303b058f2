"""One blended pass as torch's profiler saw it: what was read, copied, placed and computed when."""

import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import BlockLostError
from cacheblend.core.plan.blocks import RecordMemory
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.store import MemoryStore
from cacheblend.store.residence import HERE, PageLocked, Residence
from lab.gpu.context import Bench, synchronize

LANES = {"read": "C7", "copy": "C1", "place": "C2", "compute": "C0"}
"""With their colours."""
_BEGIN = "cacheblend: begin"  # an event by which reads, timed by the host's clock, find their place among the others


class Slice(NamedTuple):
    """Work of one lane, from `start_s` to `end_s` after the pass began."""

    lane: str
    start_s: float
    end_s: float


class _Traced(MemoryStore):
    """Memory that times its reads: they run in a thread of which torch's profiler records nothing."""

    def __init__(self, residence: Residence) -> None:
        super().__init__(48 << 30, residence=residence)
        self.reads: list[tuple[float, float]] = []

    def read_layers(
        self, names: Any, layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        started = time.perf_counter()
        try:
            return super().read_layers(names, layers, heads, memory)
        finally:
            self.reads.append((started, time.perf_counter()))


@torch.no_grad()
def measure(bench: Bench) -> dict[str, Any]:
    """See `run.PARTS`: `slices` of a pass of 16,384 tokens, and what share of each lane the pass took."""
    bench.progress("timeline")
    settings = TtftSettings(shape="llama-3.1-8b", chunks=32)
    if bench.dry_run:
        settings = TtftSettings(shape="tiny", chunks=4, chunk_tokens=64)
    draw = random.Random(0)
    model = build_shape(settings.shape or "", device=str(bench.device))
    is_cuda = bench.device.type == "cuda"
    store = _Traced(PageLocked() if is_cuda else HERE)
    config = BlendConfig(capture=False)
    with store, BlendEngine(model, store=store, config=config, fingerprint="bench", name="bench") as engine:
        chunks = open_chunks(settings, engine, draw)
        engine.warm(chunks)
        prompts = [draw_prompt(settings, chunks, engine.runtime.survey.vocab_size, draw) for _ in range(3)]
        for prompt in prompts[:2]:
            engine.prefill(prompt, ratio=0.15)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        with profile(activities=activities) as seen:
            store.reads.clear()
            begun = time.perf_counter()
            with record_function(_BEGIN):
                pass
            engine.prefill(prompts[2], ratio=0.15)
            synchronize(bench.device)
    reads = [(start - begun, end - begun) for start, end in store.reads]
    found = slices_of(seen.events() or [], reads, is_cuda=is_cuda)
    last = max((each.end_s for each in found), default=0.0)
    covered = _joined(found, 0.0)  # slices in which at least one of a lane is under way
    busy = {lane: sum(each.end_s - each.start_s for each in covered if each.lane == lane) for lane in LANES}
    return {
        "tokens": settings.prompt_tokens,
        "seconds": last,
        "busy": {lane: taken / last if last else 0.0 for lane, taken in busy.items()},
        "slices": [list(each) for each in _joined(found)],
    }


def slices_of(events: Iterable[Any], reads: Iterable[tuple[float, float]], *, is_cuda: bool) -> list[Slice]:
    """The profiler's events by lane, and the reads; on a CPU what the host computes, as there is no device to copy to.

    One of the events marks the beginning, after which reads are, from and to, in seconds.
    """
    events = list(events)
    begun = min((event.time_range.start for event in events if event.name == _BEGIN), default=0.0)
    found = [Slice("read", start, end) for start, end in reads]
    for event in events:
        lane = _lane(event.name, str(event.device_type).endswith("CUDA"), is_cuda)
        if lane:
            found.append(Slice(lane, (event.time_range.start - begun) / 1e6, (event.time_range.end - begun) / 1e6))
    return found


def _lane(name: str, on_device: bool, is_cuda: bool) -> str:
    if name == _BEGIN or is_cuda != on_device:
        return ""
    if not is_cuda:
        return "compute" if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::silu") else ""
    if "memcpy" in name.lower() and "htod" in name.lower().replace(" ", ""):
        return "copy"
    return "place" if name.startswith("_place") else "compute"  # our kernels of `placing_triton`


def _joined(slices: list[Slice], gap_s: float = 2e-5) -> list[Slice]:
    """Slices of a lane that follow each other within a gap, as one: a picture shows no more."""
    joined: list[Slice] = []
    for each in sorted(slices):
        if joined and joined[-1].lane == each.lane and each.start_s <= joined[-1].end_s + gap_s:
            joined[-1] = joined[-1]._replace(end_s=max(joined[-1].end_s, each.end_s))
        else:
            joined.append(each)
    return joined
