"""Freed memory, given back to the system.

Prompts of many lengths leave holes in glibc's heap, which it keeps: what a server holds creeps up for hours though no
more is in use, and stays where the busiest moment left it.
"""

import asyncio
import ctypes
from collections.abc import Callable

EVERY_S = 30.0


async def give_back_now_and_then(every_s: float = EVERY_S) -> None:
    """Until it is cancelled; returns at once where there is no glibc."""
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
