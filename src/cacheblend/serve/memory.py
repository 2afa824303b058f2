"""Limits what a server's process holds besides models and caches.

Two things grow for hours although no tensor is left: the libraries that multiply matrices on CPUs keep a kernel for
each shape that they have seen, and glibc the free memory that prompts of many lengths leave in its heap. And a round of
Python's garbage collector over all objects, nearly all of them the libraries', holds up every thread for 0.25 s.
"""

import asyncio
import atexit
import ctypes
import gc
import os
from collections.abc import Callable

EVERY_S = 30.0
KERNELS = 256
"""Of 1,024 of 0.7 MB that are kept by default. Three times the kernels of a prefill of 4,000 tokens, whose layers share
theirs; making one takes 0.5 ms."""


def keep_few_kernels() -> None:
    """Limits the kernel caches to `KERNELS`; call it before the first matrix product. Variables that are set stay."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of oneDNN, and of torch's layer over it
        os.environ.setdefault(name, str(KERNELS))


def collect_no_libraries() -> None:
    """Leaves what there is so far out of the garbage collector's rounds; call it once, when the model is open."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries complain of what is left in the end


async def trim_heap_periodically(every_s: float = EVERY_S) -> None:
    """Returns the heap's free pages to the system until it is cancelled; ends at once where there is no glibc."""
    trim = heap_trimmer()
    while trim is not None:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim)


def heap_trimmer() -> Callable[[], object] | None:
    """A function that returns the heap's free pages to the system within some 10 ms; None without glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)
