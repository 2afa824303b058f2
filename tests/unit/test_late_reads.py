"""Reads that were given up and end later: what they write lies in no memory that another request uses."""

import gc
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend.core.errors import BlockLostError, LoadTimeoutError
from cacheblend.core.load import staging_buffers
from cacheblend.core.load.budget import LoadBudget
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.load.staging_buffers import StagingMemory
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName, chain_names
from cacheblend.core.plan.blocks import KVLayout, LayerShape, RecordMemory
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.store import MemoryStore
from store_blocks import ROOT, raw_block

LAYERS, SLAB, SLABS = 4, 1 << 14, 4
LAYOUT = KVLayout((LayerShape(2, 8),) * LAYERS, torch.float32)
PLANNER = Planner(ROOT, block_size=8)


class LateStore(MemoryStore):
    """Memory that copies records to where the reader wants them; reads of some blocks take that memory and hang.

    Attributes:
        hanging: the blocks; a call goes on when its gate is opened.
        gates: of the calls that hang or hung.
        places: of all records that were read, by the memory they lie in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hanging: set[BlockName] = set()
        self.gates: list[threading.Event] = []
        self.ended = threading.Semaphore(0)

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        found = super().read_layers(names, layers, heads)
        assert memory is not None
        places = [[memory(record.nbytes) for record in records] for records in found]  # type: ignore[union-attr]
        hangs = bool(self.hanging.intersection(names))
        if hangs:
            self.gates.append(threading.Event())
            self.gates[-1].wait()
        for records, own in zip(found, places, strict=True):
            for record, place in zip(records, own, strict=True):  # type: ignore[arg-type]
                place.copy_(record.contiguous().view(-1).view(torch.uint8))
        if hangs:
            self.ended.release()
        views: Any = [
            [place.view(record.dtype).view(record.shape) for record, place in zip(records, own, strict=True)]  # type: ignore[arg-type]
            for records, own in zip(found, places, strict=True)
        ]
        return views


def stored(store: MemoryStore, number: int) -> tuple[Segment, BlockName]:
    """A chunk whose records hold its number."""
    segment = chunk(np.arange(8) + 100 * number)
    (name,) = chain_names(ROOT, [segment.token_ids])
    records = [torch.full((2, 2, 8, 8), float(number) + layer / 10) for layer in range(LAYERS)]
    store.write(raw_block(name, ROOT, segment.token_ids, records))
    return segment, name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_read_that_ends_late_writes_into_no_memory_of_others(
    seed: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, draw = StagingMemory(SLABS * SLAB, SLAB), random.Random(seed)
    monkeypatch.setattr(staging_buffers, "memory_of", lambda device: memory)
    store, threads = LateStore(), DaemonPool(16, "test-late")
    chunks = [stored(store, number) for number in range(1, 11)]
    late = draw.sample(range(10), 5)
    store.hanging = {chunks[at][1] for at in late}

    def loader_of(number: int, budget: LoadBudget) -> LayerLoader:
        plan = PLANNER.plan(Prompt.of([text([1, 2]), chunks[number][0], text([3])]), store)
        return LayerLoader(
            plan,
            store,
            LAYOUT,
            [None] * LAYERS,
            read_ahead=draw.choice([1, 3]),
            overlap=overlap,
            threads=threads,
            budget=budget,
        )

    under_way: list[tuple[int, LayerLoader]] = []
    hung = ended = 0
    for number in draw.sample(range(10), 10):
        loader = loader_of(number, LoadBudget(0.02 if number in late else 60.0))
        if number in late:
            with pytest.raises(LoadTimeoutError):
                loader.layer(0)
            loader.close()
            hung += 1
        else:
            check(loader.layer(0), number, 0)
            under_way.append((number, loader))  # its next layers lie in slabs
        if draw.random() < 0.4 and ended < len(store.gates):
            store.gates[ended].set()
            assert store.ended.acquire(timeout=60)
            ended += 1
    for gate in store.gates[ended:]:
        gate.set()
        assert store.ended.acquire(timeout=60)
    for number, loader in under_way:
        for layer in range(LAYERS):
            check(loader.layer(layer), number, layer)
        loader.close()
    assert hung == len(late) == len(store.gates)
    threads.close()
    threads.join(60)
    del loader, under_way
    gc.collect()
    slabs = [memory.slab() for _ in range(SLABS)]
    assert all(slab is not None for slab in slabs) and memory.slab() is None  # no more than that were ever there
    assert memory.nbytes == SLABS * SLAB


def check(kv: Any, number: int, layer: int) -> None:
    """Every loaded row has its chunk's records, whatever other reads have done."""
    expected = float(number + 1) + layer / 10
    assert torch.all(kv.keys[:, 2:10] == expected) and torch.all(kv.values[:, 2:10] == expected)
