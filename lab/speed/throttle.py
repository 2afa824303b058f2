"""Memory that is as slow as a given device: for measuring what slow devices would do, and for tests."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import BlockEntry, RecordMemory
from cacheblend.store.memory import MemoryStore


class ThrottledStore(MemoryStore):
    """Memory whose reads take as long as those of a device with this throughput.

    Reads queue up, as on one device or wire; waiting keeps no processor busy. Writes are not slowed.

    Args:
        bytes_per_s: read throughput.
        tier: the store's name in entries and reports.
        max_bytes: bound; None for the default of `MemoryStore`.

    Raises:
        InvalidInputError: a throughput that is not above 0.
    """

    def __init__(self, bytes_per_s: float, *, tier: str = "throttled", max_bytes: int | None = None) -> None:
        if not bytes_per_s > 0:
            raise InvalidInputError(f"a throughput above 0 is needed, got {bytes_per_s}")
        super().__init__(max_bytes)
        self.bytes_per_s, self._tier = bytes_per_s, tier
        self._device, self._free_at = threading.Lock(), 0.0

    @property
    def tier_names(self) -> tuple[str, ...]:
        return (self._tier,)

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [entry and replace(entry, tier=self._tier) for entry in super().find(names)]

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        read = super().read_layers(names, layers, heads, memory)
        size = sum(record.nbytes for each in read if not isinstance(each, BlockLostError) for record in each)
        with self._device:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + size / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))
        return read
