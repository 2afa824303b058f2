"""One model behind engines with stores in page-locked memory, on the device, and on a disk."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.compilation import compile_layers
from cacheblend.store import DiskStore, KVStore, MemoryStore
from cacheblend.store.residence import HERE, OnDevice, PageLocked

ON_DISK = "disk"
STORES = ("pinned memory", "device", ON_DISK)
COMPILED = "pinned memory, compiled layers"
_MOST_BYTES = 48 << 30  # of a store; no prompt here needs as much


@dataclass(frozen=True)
class Engines:
    """Engines of one model, opened once for all lengths.

    Attributes:
        model: of all of them.
        by_store: one for each of `STORES`, and for `COMPILED` if it was asked for.
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
        return tokens * self.first.survey.num_layers

    def clear(self) -> None:
        """Empties the stores."""
        for engine in self.by_store.values():
            engine.store.prune(0)


@contextmanager
def open_engines(model: PreTrainedModel, device: torch.device, *, compiled: bool = False) -> Iterator[Engines]:
    """Engines with empty stores.

    Args:
        model: of all of them.
        device: of the model.
        compiled: open one more, `COMPILED`, over the first one's store.

    Raises:
        InvalidInputError: the layers cannot be compiled.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
        stores: tuple[KVStore, ...] = (
            MemoryStore(_MOST_BYTES, residence=PageLocked() if device.type == "cuda" else HERE),
            MemoryStore(_MOST_BYTES, residence=OnDevice(device)),
            DiskStore(folder, max_bytes=_MOST_BYTES, durable=False),
        )
        engines = {}
        for store in stores:
            stack.enter_context(store)
        for name, store in (*zip(STORES, stores, strict=True), *([(COMPILED, stores[0])] if compiled else [])):
            config = BlendConfig(capture=False, load_timeout_s=math.inf)
            engine = BlendEngine(model, None, store=store, config=config, fingerprint="bench", name="bench")
            engines[name] = stack.enter_context(engine)
        if compiled and (reason := compile_layers(engines[COMPILED].view, device)):
            raise InvalidInputError(f"layers are not compiled: {reason}")
        yield Engines(model, engines, Path(folder))
