"""Where a `MemoryStore` keeps its records: in ordinary or page-locked memory, or on a GPU.

Knows tensors and devices; knows no names, no bound and no eviction.
"""

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.store.base import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)
Register = Callable[[int, int], None]
_ALIGNMENT = 256  # of records, for fast copies


def default_memory_bytes() -> int:
    """4 GiB, or a quarter of the machine's memory where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 4)


class Residence(Protocol):
    """Where records are kept.

    Attributes:
        tier: name of the tier in entries and reports.
    """

    tier: str

    def keep(self, records: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The same records there, where each or all of them together own their memory; None: no memory is left."""
        ...


class Here:
    """Ordinary memory: the records themselves, copied only where keeping them would keep a larger tensor alive."""

    tier = "memory"

    def keep(self, records: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """See `Residence`."""
        records = [record.contiguous() for record in records]
        storages = {record.untyped_storage().data_ptr(): record.untyped_storage().nbytes() for record in records}
        if sum(storages.values()) > sum(record.nbytes for record in records) * 9 // 8:
            return [record.clone() for record in records]
        return records


class PageLocked:
    """Page-locked (pinned) memory, from which a GPU copies without the host: the records of one call together.

    torch's own comes in powers of two; here a block takes whole pages (4 KiB each).

    Args:
        register, unregister: lock memory (address, bytes), and let it go (address); None: CUDA's.

    Raises:
        InvalidInputError: there is no GPU that could copy from it.
    """

    tier = "memory"

    def __init__(self, register: Register | None = None, unregister: Callable[[int], None] | None = None) -> None:
        if register is None and not torch.cuda.is_available():
            raise InvalidInputError("page_locked=true needs a GPU, and there is none here: leave it out")
        self._register, self._unregister = register or _register, unregister or _unregister

    def keep(self, records: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """See `Residence`."""
        sizes = [record.nbytes + -record.nbytes % _ALIGNMENT for record in records]
        nbytes = sum(sizes)
        nbytes += -nbytes % mmap.PAGESIZE
        whole = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)  # of pages that nothing else uses
        address = whole.ctypes.data
        try:
            self._register(address, nbytes)
        except torch.OutOfMemoryError as error:
            logger.warning("%s", error)
            return None
        weakref.finalize(whole, self._unregister, address)  # tensors keep the array alive, and it dies with the last
        memory = torch.from_numpy(whole)
        kept, at = [], 0
        for record, size in zip(records, sizes, strict=True):
            part = memory[at : at + record.nbytes].view(record.dtype).view(record.shape)
            kept.append(part.copy_(record))
            at += size
        return kept


class OnDevice:
    """Memory of a GPU.

    Args:
        device: the GPU; any device in tests.
    """

    tier = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def keep(self, records: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """See `Residence`. Returns once they are there, so that any stream may read them."""
        try:
            return [record.to(self.device, copy=True) for record in records]
        except torch.OutOfMemoryError:
            return None


HERE = Here()
"""Where records are kept unless something else is said."""


def _register(address: int, nbytes: int) -> None:
    failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if failed:
        raise torch.OutOfMemoryError(f"{nbytes} bytes cannot be locked (CUDA error {failed}); raise ulimit -l")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
