"""One model behind engines with stores in page-locked memory, on the device, and on a disk."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.engines.hf import BlendEngine
from cacheblend.store import DiskStore, KVStore, MemoryStore
from cacheblend.store.residence import HERE, OnDevice, PageLocked

ON_DISK = "disk"
STORES = ("pinned memory", "device", ON_DISK)
_MOST_BYTES = 48 << 30  # of a store; no prompt here needs as much


@dataclass(frozen=True)
class Engines:
    """Engines of one model, opened once for all lengths.

    Attributes:
        model: of all of them.
        by_store: one for each of `STORES`.
        folder: of the store on the disk.
    """

    model: PreTrainedModel
    by_store: dict[str, BlendEngine]
    folder: Path

    @property
    def first(self) -> BlendEngine:
        """That of the store that counts."""
        return self.by_store[STORES[0]]

    def files(self) -> list[Path]:
        """Of the store on the disk."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def row_layers(self, tokens: int) -> int:
        """What a full prefill of so many tokens computes."""
        return tokens * len(self.first.survey.layout.layers)

    def clear(self) -> None:
        """Empties the stores."""
        for engine in self.by_store.values():
            engine.store.prune(0)


@contextmanager
def open_engines(model: PreTrainedModel, device: torch.device) -> Iterator[Engines]:
    """Engines with empty stores."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
        stores: tuple[KVStore, ...] = (
            MemoryStore(_MOST_BYTES, residence=PageLocked() if device.type == "cuda" else HERE),
            MemoryStore(_MOST_BYTES, residence=OnDevice(device)),
            DiskStore(folder, max_bytes=_MOST_BYTES, durable=False),
        )
        engines = {}
        for name, store in zip(STORES, stores, strict=True):
            stack.enter_context(store)
            config = BlendConfig(capture=False)
            engine = BlendEngine(model, None, store=store, config=config, fingerprint="bench", name="bench")
            engines[name] = stack.enter_context(engine)
        yield Engines(model, engines, Path(folder))
