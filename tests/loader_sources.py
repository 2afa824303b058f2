"""Sources for the loader whose records say where they came from, plans over them, and what must be loaded."""

import threading
import time
from collections.abc import Sequence

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.names import BlockName, root_name
from cacheblend.core.plan.blocks import BlockEntry, EmptySource, KVLayout, LayerShape, RecordMemory
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text

ROOT = root_name("model", "float32")
BOS = 1
LAYOUT = KVLayout((LayerShape(2, 8), LayerShape(2, 8), LayerShape(4, 4), LayerShape(2, 8)), torch.float32)
FULL, HALF = (KeyRotation(1e2 ** (-torch.arange(n) / n), "half") for n in (4, 2))
ROTATIONS = (FULL, None, HALF, FULL)
PLANNER = Planner(ROOT, Anchor("bos", BOS), block_size=4)


class FakeSource:
    """Random records, the same for the same block and layer."""

    def __init__(self, plan: BlendPlan, lost: Sequence[tuple[BlockName, int]] = (), delay_s: float = 0.0) -> None:
        self.held = {s.name: plan.prompt.token_ids[s.start : s.stop] for s in plan.spans[: len(plan.spans) - 1]}
        self.lost, self.delay_s = set(lost), delay_s
        self.reads: list[tuple[BlockName, int]] = []
        self.threads: set[str] = set()

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [BlockEntry(self.held[n], LAYOUT, "memory") if n in self.held else None for n in names]

    def record(self, name: BlockName, layer: int) -> torch.Tensor:
        shape = LAYOUT.layers[layer]
        generator = torch.Generator().manual_seed(int.from_bytes(name[:6], "little") + layer)
        return torch.randn(shape.kv_heads, 2, len(self.held[name]), shape.head_dim, generator=generator)

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay_s * len(names) * len(layers))
        self.reads += [(name, layer) for name in names for layer in layers]
        heads = slice(None) if heads is None else heads
        return [
            BlockLostError([name], "gone")
            if any((name, layer) in self.lost for layer in layers)
            else [self._in(memory, self.record(name, layer)[heads]) for layer in layers]
            for name in names
        ]

    def round_trip_s(self, tier: str) -> float:
        return 0.0

    @staticmethod
    def _in(memory: RecordMemory | None, record: torch.Tensor) -> torch.Tensor:
        if memory is None:
            return record
        taken = memory(record.nbytes)
        taken.copy_(record.contiguous().view(-1).view(torch.uint8))
        return taken.view(record.dtype).view(record.shape)


class CountingSource:
    """Zeros; notes which layers each call asked for."""

    def __init__(self, plan: BlendPlan) -> None:
        self.tokens = {span.name: len(span) for span in plan.spans}
        self.calls: list[range] = []

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        self.calls.append(layers)
        return [[torch.zeros(2, 2, self.tokens[name], 8) for _ in layers] for name in names]

    def round_trip_s(self, tier: str) -> float:
        return 0.0


def planned(drop: int | None = None) -> tuple[BlendPlan, FakeSource]:
    """BOS | A (exact) | text | B | C | B | question; `drop` takes one span out of the store."""
    a, b, c = chunk(range(10, 16)), chunk(range(20, 29)), chunk(range(30, 33))
    prompt = Prompt.of([text([BOS]), a, text([2, 3]), b, c, b, text([4, 5])])
    names = PLANNER.plan(prompt, FakeSource(PLANNER.plan(prompt, EmptySource())))
    source = FakeSource(names)
    for span in names.spans:
        if names.prompt.segments[span.segment].is_chunk is False and span.start:
            source.held.pop(span.name, None)
    if drop is not None:
        source.held.pop(names.spans[drop].name)
    return PLANNER.plan(prompt, source), source


def deep_plan(layers: int) -> tuple[KVLayout, BlendPlan]:
    """A chunk of 4 tokens behind another one that misses, in a model of so many layers."""
    layout = KVLayout((LayerShape(2, 8),) * layers, torch.float32)
    plan, source = planned()
    kept = [span.name for span in plan.spans if span.source is Source.LOADED]
    source.held = {name: ids for name, ids in source.held.items() if name in kept}
    return layout, PLANNER.plan(plan.prompt, source)


def check(plan: BlendPlan, source: FakeSource, loaded: Sequence[tuple[torch.Tensor, torch.Tensor]], first: int) -> None:
    for layer, (keys, values) in enumerate(loaded):
        shape = LAYOUT.layers[layer]
        assert keys.shape == values.shape == (shape.kv_heads, len(plan), shape.head_dim)
        for span in plan.spans:
            wanted = span.source is Source.PREFIX or (span.source is Source.LOADED and layer >= first)
            assert ((span.name, layer) in source.reads) == wanted
            if not wanted:
                continue
            record = source.record(span.name, layer)
            expected, rotation = record[:, 0], ROTATIONS[layer]
            if rotation is not None and span.source is Source.LOADED:
                shift = torch.full((len(span),), span.start - span.stored_start)
                expected = reposition_keys(expected, turn_by(rotation, shift))
            torch.testing.assert_close(keys[:, span.start : span.stop], expected, rtol=0, atol=1e-6)
            assert torch.equal(values[:, span.start : span.stop], record[:, 1])
