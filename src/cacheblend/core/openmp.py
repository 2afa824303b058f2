"""OpenMP's threads, which compute torch's operations on a CPU, as the calling thread sees them.

A thread that has computed keeps a team of threads, asleep, until it ends. As soon as all teams together have more
threads than there are cores, waiting threads sleep at each barrier instead of spinning (libgomp). A program that had
opened an engine in its main thread, and computed in another one, took 1.6 times as long (docs/log.md, 2026-11-29). So
who stops computing ends its team.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SOFT = 1  # `omp_pause_soft`: settings are kept


class Libraries(NamedTuple):
    """Functions of the libraries that torch has loaded, for the calling thread alone. `openmp` sets how many threads
    compute; `mkl` too, 0 for OpenMP's, and returns what was set before; `pause` ends the thread's team."""

    openmp: Callable[[int], object]
    mkl: Callable[[int], int]
    pause: Callable[[int], object]


@functools.cache
def libraries() -> Libraries | None:
    """None where these cannot be set for one thread alone."""
    import torch

    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            mkl = getattr(library, "MKL_Set_Num_Threads_Local", lambda _: 0)
            return Libraries(library.omp_set_num_threads, mkl, getattr(library, "omp_pause_resource_all", lambda _: -1))
    return None


def end_team() -> None:
    """Ends the team of the calling thread, which does not compute for now; its next operation makes another one in some
    .1 ms. Does nothing where no torch is loaded, or its library cannot."""
    if "torch" in sys.modules and (found := libraries()) is not None:
        found.pause(_SOFT)
