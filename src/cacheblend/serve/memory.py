"""What a server holds beside models and caches, kept small.

Two things make it creep up for hours though no tensor is left. What multiplies matrices on CPUs (oneDNN, and torch's
own layer over it) keeps a kernel for each shape that it saw, 1,024 of them at 0.7 MB each, and every prompt has shapes
of its own. And glibc keeps the holes that prompts of many lengths leave in its heap.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable

EVERY_S = 30.0
KERNELS = 256
"""Three times those of a prefill of 4,000 tokens, whose layers all have the same; each takes half a millisecond."""

_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own, and that of torch's layer over it."""


def keep_few_kernels() -> None:
    """Before the first product; an administrator's own settings stay."""
    for name in _CACHES:
        os.environ.setdefault(name, str(KERNELS))


async def give_back_now_and_then(every_s: float = EVERY_S) -> None:
    """The heap's holes, to the system, until it is cancelled; returns at once where there is no glibc."""
    trim = heap_trimmer()
    while trim is not None:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim)


def heap_trimmer() -> Callable[[], object] | None:
    """What gives back the heap's free pages, some tens of milliseconds beside the requests; None without glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)
