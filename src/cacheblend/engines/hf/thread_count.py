"""How many threads compute a layer on a CPU: fewer where others use the cores.

OpenMP's threads wait for each other after each operation, and they spin meanwhile. Beside busy programs the thread that
is waited for often does not run at all, and a blend, which has hundreds of short operations, takes many times as long
as on one thread. That others use the cores shows in the thread that computes: it runs for a part of the time only.

    quiet, 2 threads   ran / took = 1            busy, 2 threads   .2 to .5     one thread from the next layer on
    quiet, 1 thread    1 for a while: 2 again    busy, 1 thread    .2 to .5     stays

`torch.set_num_threads` is the process's: threads that begin to use torch meanwhile would stay at that, and setting the
number back would undo what the program has set elsewhere. So the libraries under it are told, for this thread alone.
"""

import logging
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext

import torch

from cacheblend.core import container, openmp

logger = logging.getLogger(__name__)

_PERIOD_S = 0.02  # layers are looked at together until they have taken so long
_BUSY, _QUIET = 0.75, 0.95  # share of the time that the thread runs; in between nothing changes
_TRIES_S = (0.25, 8.0)  # quiet seconds before more threads are tried: at first, and at most; each failure doubles them
_SAID_AFTER_S = 5.0  # busy seconds; weights that are read from a disk when they are first used take less
_OWN_THREADS = torch.get_num_threads()
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def fit_threads() -> None:
    """For a program that is this process alone: no more threads than a container's quota has processors for. Else they
    use it up, and all wait for the next period. Left alone where the environment sets a number."""
    global _OWN_THREADS
    most = container.processors()
    if most < torch.get_num_threads() and not any(name in os.environ for name in _NAMES):
        _OWN_THREADS = max(1, math.ceil(most))
        torch.set_num_threads(_OWN_THREADS)


class ThreadCount:
    """Decides how many threads compute a layer: one while others use the cores, else as many as torch has. Left alone
    where the environment sets a number, where the program has set another one than there was when this module was
    loaded, and where it cannot be set for one thread alone. Says once that it has come to one thread. `is_following`:
    False leaves the number alone. `is_single`: the next layer is computed by one thread."""

    def __init__(self, is_following: bool = True) -> None:
        chosen = any(name in os.environ for name in _NAMES)
        self.is_following = is_following and not chosen and openmp.libraries() is not None
        self.is_single = False
        self._took = self._ran = 0.0
        self._quiet = 0.0  # seconds in which nobody else used the cores, since `is_single` changed
        self._patience = _TRIES_S[0]
        self._busy = 0.0  # seconds in which others used the cores; infinite once that was said

    def held(self) -> AbstractContextManager[None]:
        """A context for what is around a layer: loading, placing, selecting."""
        return _Threads(self)

    def layer(self) -> AbstractContextManager[None]:
        """A context to compute a layer in, or anything else without waits for a device or a store."""
        return _Threads(self, is_measured=True) if self.is_following and _OWN_THREADS > 1 else nullcontext()

    def learn(self, took: float, ran: float) -> None:
        """What a layer took, and how long its thread ran, in seconds."""
        self._took, self._ran = self._took + took, self._ran + ran
        if self._took < _PERIOD_S:
            return
        share, took = self._ran / self._took, self._took
        self._took = self._ran = 0.0
        if share > _QUIET:
            self._quiet += took
        elif share < _BUSY:
            self._busy += took
            if _SAID_AFTER_S < self._busy < math.inf:
                self._busy = math.inf
                logger.warning(
                    "other programs, or other threads of this one, use this machine's cores, or a container's quota is "
                    "used up (a thread runs for %.0f %% of the time): layers are computed by one thread instead of %d "
                    "meanwhile; set OMP_NUM_THREADS to as many as there are cores for",
                    100 * share,
                    _OWN_THREADS,
                )
        if self.is_single:
            if share <= _QUIET:
                self._quiet = 0.0
            if self._quiet > self._patience:
                self._quiet, self.is_single = 0.0, False
                self._patience = min(2 * self._patience, _TRIES_S[1])
            return
        if self._quiet > self._patience:
            self._patience = _TRIES_S[0]
        if share < _BUSY:
            self._quiet, self.is_single = 0.0, True


class _Threads:
    """One thread, if it is to be one, and as many as before in the end, of this thread alone; a layer is measured."""

    def __init__(self, count: ThreadCount, *, is_measured: bool = False) -> None:
        self._count, self._is_set, self._is_measured = count, False, is_measured

    def __enter__(self) -> None:
        libraries = openmp.libraries() if self._count.is_single and self._count.is_following else None
        if libraries is not None and torch.get_num_threads() == _OWN_THREADS:
            self._is_set = True
            libraries.openmp(1)
            self._mkl_before = libraries.mkl(1)
        if self._is_measured:
            self._began, self._ran = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        if self._is_measured:
            took, ran = time.perf_counter() - self._began, time.thread_time() - self._ran
        libraries = openmp.libraries() if self._is_set else None
        if libraries is not None:
            libraries.mkl(self._mkl_before)
            if torch.get_num_threads() == 1:  # else the program has set another one inside
                libraries.openmp(_OWN_THREADS)
        if self._is_measured:
            self._count.learn(took, ran)
