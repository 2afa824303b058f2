"""Where a `MemoryStore` keeps its records: in ordinary or page-locked memory, or on a GPU."""

import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core import container
from cacheblend.core.errors import InvalidInputError
from cacheblend.store.base import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)
Register = Callable[[int, int], None]
Kept = list[torch.Tensor] | None
SPARE_BYTES = 256 << 20
"""Page-locked memory of a store that is free and stays locked, so that evicting for new records locks nothing."""

_ALIGNMENT = 256  # of records, for fast copies
_MOST_SPARE = 256  # pieces of free memory that stay locked: they are searched one by one
_NO_MEMORY = (2, 304)  # cudaErrorMemoryAllocation, cudaErrorOperatingSystem
_stuck: list[mmap.mmap] = []  # memory that could not be unlocked: unmapped, it would spoil its address


def default_memory_bytes() -> int:
    """4 GiB, or a quarter of the machine's memory, or of its container's, where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(4 << 30, physical // 4, container.memory_bytes() / 4))


class Here:
    """Ordinary memory: the records themselves, copied only where keeping them would keep a larger tensor alive."""

    tier = "memory"  # its name in entries and reports
    copies = False  # whether what is kept never shares memory with what was given; else it may be the same tensor

    def keep(self, records: Sequence[torch.Tensor]) -> Kept:
        """The same records there, where each or all of them together own their memory; None: no memory is left."""
        records = [record.contiguous() for record in records]
        storages = {record.untyped_storage().data_ptr(): record.untyped_storage().nbytes() for record in records}
        if sum(storages.values()) > sum(record.nbytes for record in records) * 9 // 8:
            return [record.clone() for record in records]
        return records

    def taken(self, records: Sequence[torch.Tensor]) -> int:
        """Bytes of memory that `keep` takes for them, at least their own."""
        return sum(record.nbytes for record in records)


class PageLocked:
    """Page-locked (pinned) memory, from which a GPU copies without the host: the records of one call together.

    torch's own comes in powers of two; here a block takes whole pages (4 KiB each). Locking takes long, and letting go
    may wait for the device, so memory that became free stays locked for the next records of its size.

    `register`, `unregister`: lock memory (address, bytes), and let it go (address); None: CUDA's. `spare_bytes`: of
    memory that is free and stays locked, at most. Unless `is_required`, records lie in ordinary memory where no more
    can be locked; so they do where CUDA refuses to lock memory for any other reason. Raises `InvalidInputError`: there
    is no GPU that could copy from it."""

    tier, copies = "memory", True

    def __init__(
        self,
        register: Register | None = None,
        unregister: Callable[[int], None] | None = None,
        *,
        spare_bytes: int = 0,
        is_required: bool = True,
    ) -> None:
        if register is None and not torch.cuda.is_available():
            raise InvalidInputError("page_locked=true needs a GPU, and there is none here: leave it out")
        self._register, self._unregister = register or _register, unregister or _unregister
        self._most_spare, self._is_required = spare_bytes, is_required
        self._spare: deque[mmap.mmap] = deque()  # a finalizer may run anywhere, so no lock: single calls of a deque
        self.not_locked = 0  # how often memory could not be locked
        # Memory that goes while it is locked leaves CUDA a range that the next of its address cannot be locked in.
        weakref.finalize(self, _unlock, self._spare, self._unregister).atexit = False

    def keep(self, records: Sequence[torch.Tensor]) -> Kept:
        try:
            memory = torch.from_numpy(self._locked(self.taken(records)))
        except (RuntimeError, OSError) as error:
            if not self.not_locked:
                logger.warning("memory cannot be page-locked: %s", str(error))  # the error's frames hold records
            self.not_locked += 1
            is_short = isinstance(error, (torch.OutOfMemoryError, OSError))  # other records could make room
            return None if is_short and self._is_required else [record.clone() for record in records]
        kept, at = [], 0
        for record in records:
            part = memory[at : at + record.nbytes].view(record.dtype).view(record.shape)
            kept.append(part.copy_(record))
            at += record.nbytes + -record.nbytes % _ALIGNMENT
        return kept

    def taken(self, records: Sequence[torch.Tensor]) -> int:
        """Whole pages."""
        nbytes = sum(record.nbytes + -record.nbytes % _ALIGNMENT for record in records)
        return nbytes + -nbytes % mmap.PAGESIZE

    def _locked(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Locked memory of whole pages that nothing else uses; it is free once the array is gone."""
        pages: mmap.mmap | None = None
        for _ in range(len(self._spare)):
            try:
                spare = self._spare.popleft()
            except IndexError:  # another thread took it
                break
            if len(spare) == nbytes:
                pages = spare
                break
            self._spare.append(spare)
        if pages is None:
            # Private: the system joins neighbours, of which it allows some ten thousand; a forked process has its own.
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._register(_address(pages), nbytes)
        whole = np.frombuffer(pages, dtype=np.uint8)
        # Tensors keep the array alive, and it dies with the last; all goes when the process ends, locked or not.
        weakref.finalize(whole, self._give_back, pages).atexit = False
        return whole

    def _give_back(self, pages: mmap.mmap) -> None:
        self._spare.append(pages)
        while len(self._spare) > _MOST_SPARE or sum(map(len, self._spare.copy())) > self._most_spare:
            if not _unlock(self._spare, self._unregister, most=1):
                return


class OnDevice(Here):
    """Memory of a GPU (of any device in tests)."""

    tier, copies = "cuda", True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def keep(self, records: Sequence[torch.Tensor]) -> Kept:
        """Returns once they are there, so that any stream may read them."""
        try:
            return [record.to(self.device, copy=True) for record in records]
        except torch.OutOfMemoryError:
            return None


Residence = Here | PageLocked
HERE = Here()


def _unlock(spare: deque[mmap.mmap], unregister: Callable[[int], None], most: int | None = None) -> int:
    """Lets go of so many pieces of free memory, None: of all, each unlocked before it is unmapped; returns how many."""
    done = 0
    while most is None or done < most:
        try:
            pages = spare.popleft()
        except IndexError:  # another thread let it go
            break
        try:
            unregister(_address(pages))
        except RuntimeError as error:
            _stuck.append(pages)
            logger.warning("page-locked memory cannot be unlocked, and is kept: %s", str(error))
        done += 1
        del pages
    return done


def _address(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, dtype=np.uint8).ctypes.data)


def _register(address: int, nbytes: int) -> None:
    failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if failed:
        _clear_error()
        kind = torch.OutOfMemoryError if failed in _NO_MEMORY else RuntimeError
        raise kind(f"{nbytes} bytes cannot be locked (CUDA error {failed}); raise ulimit -l")


def _unregister(address: int) -> None:
    failed = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if failed:
        _clear_error()
        raise RuntimeError(f"CUDA error {failed}")


def _clear_error() -> None:
    """CUDA keeps a thread's last error, and torch would report it behind the next kernel of somebody else: it clears
    what it reports."""
    with suppress(RuntimeError):
        torch.arange(1, device="cuda")
