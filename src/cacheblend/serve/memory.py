"""Limits what a server's process holds besides models and caches.

Two things grow for hours although no tensor is left: the libraries that multiply matrices on CPUs keep a kernel for
each shape that they have seen, and glibc the free memory that prompts of many lengths leave in its heaps, of which it
makes eight a core: each keeps the most that its threads ever had. And a round of Python's garbage collector over all
objects, nearly all of them the libraries', holds up every thread for 0.25 s.
"""

import asyncio
import atexit
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

EVERY_S = 30.0
KERNELS = 256
"""Of 1,024 of 0.7 MB that are kept by default. Three times the kernels of a prefill of 4,000 tokens, whose layers share
theirs; making one takes 0.5 ms."""
HEAPS = max(2, min(8, os.cpu_count() or 1))
"""Of eight a core. On two cores hostile clients, all at once, took 270 MB at their peak, and take 140 with two."""
_M_ARENA_MAX = -8  # glibc's malloc.h


def bound_caches() -> None:
    """Limits the kernel caches to `KERNELS`, and glibc to `HEAPS`; call it before the first matrix product, and before
    there are many threads. Environment variables that say otherwise win."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of oneDNN, and of torch's layer over it
        os.environ.setdefault(name, str(KERNELS))
    said = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not said and (limit := _libc("mallopt")) is not None:
        limit(_M_ARENA_MAX, HEAPS)


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
    if (trim := _libc("malloc_trim")) is None:
        return None
    trim.argtypes = [ctypes.c_size_t]
    return lambda: trim(0)


def _libc(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return None
