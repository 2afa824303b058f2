"""Stand-ins for what a worker of the plug-in computes, and a worker side with them."""

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from cacheblend.core.kernels.attention import HeadShape
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.vllm.jobs import BlendJob
from cacheblend.engines.vllm.worker.paged_cache import LayerGroups
from cacheblend.engines.vllm.worker.prefill_factory import Opener
from cacheblend.engines.vllm.worker.ranks import Ranks
from cacheblend.engines.vllm.worker.worker import Worker

LAYERS = 4


class Prefill:
    """A stand-in for `BlendedPrefill`: `reads` are the layers whose reads do not end by themselves."""

    def __init__(self, rows: int = 10, fails_at: int = -1, reads: dict[int, Any] | None = None) -> None:
        self.layer, self.active_rows, self.fails_at = 0, rows, fails_at
        self.reads = reads or {}
        self.is_closed = False
        self.error: type[Exception] = RuntimeError
        self.reading, self.lost_reads = "s3", 0

    @property
    def done(self) -> bool:
        return self.layer == LAYERS

    @property
    def awaited(self) -> Any:
        read = self.reads.get(self.layer)
        return None if read is None or read.done() else read

    def next_layer(self) -> Any:
        held = torch.zeros(8)
        self.held = weakref.ref(held)
        if self.layer == self.fails_at:
            raise self.error("injected")
        self.layer += 1
        return
        yield held

    def result(self) -> Any:
        report = SimpleNamespace(
            wait_s=0.0, load_s=0.0, fallbacks=[], recomputed_tokens=3, row_layers=LAYERS * self.active_rows
        )
        return SimpleNamespace(report=report, plan=Planned(), read_s={"disk": 0.25})

    def close(self) -> None:
        self.is_closed = True


class Planned:
    def hit_tokens(self) -> dict[str, int]:
        return {"prefix": 0, "disk": 7}

    def __len__(self) -> int:
        return 10


class Store:
    """Never takes a block before `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.writes = self.drops = 0

    def write(self, block: Any) -> bool:
        self.writes += 1
        return self.gate.wait()

    def put_manifest(self, manifest: Any) -> None:
        pass

    def drop_copies(self) -> None:
        self.drops += 1


def make_worker(store: Any, group: Any, budget: int = 10_000, tile_rows: int = 100) -> Any:
    model: Any = SimpleNamespace(
        adapters=None,
        layout=KVLayout((LayerShape(1, 2),) * LAYERS, torch.float32),
        device=torch.device("cpu"),
        total_kv_heads=1,
        head_shapes=[HeadShape(1, 1, 2)] * LAYERS,
        rotations=[None] * LAYERS,
        attention=[SimpleNamespace()] * LAYERS,
    )
    planner: Any = SimpleNamespace(codec="raw")
    ranks, groups = Ranks(group), LayerGroups([0] * LAYERS)
    opener = Opener(model, store, planner, ranks, groups, block_size=4, tile_rows=tile_rows)
    return Worker(opener, Hkvd(), budget)


def blend(name: str, **fields: Any) -> Any:
    return BlendJob(name, None, Hkvd(), 4, [[5, 6, 7]], **fields)  # type: ignore[arg-type]
