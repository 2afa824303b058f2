"""How the threads of OpenMP wait for each other, on which a blend's speed depends where others use the cores, too.

At the end of each parallel operation all threads wait for the last one. By default they spin, GNU's for about 15 ms and
Intel's for 200 ms, longer than the time after which a busy system gives the core to somebody else: the one that is
waited for does not run, and those that wait use the time that it would get. A blend has hundreds of short operations.
Threads that sleep at once cost as much on a quiet machine as is lost, since waking takes as long as the operation.
So they spin for about as long as there is between two operations, and then sleep. Knows no torch: it must not be loaded
before that is set.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

BOUNDED = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""GNU's runtime (torch's own builds) counts turns, Intel's and LLVM's milliseconds; each ignores the other's."""
_CHOICES = ("OMP_WAIT_POLICY", *BOUNDED)

_INTERRUPTIONS = 40
"""A second, of all threads of a process; a quiet machine has a few, one with a second process on each core over 100."""
_LEAST_S = 0.1


def bound_waiting() -> None:
    """Bounds how long the threads of this process, and of those that it starts, spin.

    For programs, at their start: does nothing once torch is loaded, nor where the environment has a choice of its own.
    """
    if "torch" not in sys.modules and not is_chosen(os.environ):
        os.environ.update(BOUNDED)


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the environment says how threads wait."""
    return any(name in environment for name in _CHOICES)


@dataclass(frozen=True)
class Moment:
    """A time, and what the process's threads had been interrupted by others until then.

    Attributes:
        at: by `time.perf_counter`.
        interruptions: a count; None where the system keeps none.
    """

    at: float
    interruptions: int | None

    @classmethod
    def now(cls) -> "Moment":
        """This moment."""
        try:
            import resource
        except ImportError:  # not POSIX
            return cls(time.perf_counter(), None)
        return cls(time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


class BusyWarning:
    """Warns once when a prefill's threads spun while others used their cores."""

    def __init__(self) -> None:
        self._is_due = not is_chosen(os.environ)

    def check(self, began: Moment, threads: int, now: Moment | None = None) -> None:
        """Called after a prefill on a CPU.

        Args:
            began: when the prefill began.
            threads: of an operation.
            now: when it ended; None: now.
        """
        if not self._is_due or threads < 2:
            return
        now = now or Moment.now()
        seconds = now.at - began.at
        if began.interruptions is None or now.interruptions is None or seconds < _LEAST_S:
            return
        rate = (now.interruptions - began.interruptions) / seconds
        if rate > _INTERRUPTIONS:
            self._is_due = False
            choice = " ".join(f"{name}={value}" for name, value in BOUNDED.items())
            logger.warning(
                "others use this machine's cores: %d threads were interrupted %.0f times a second in a prefill of "
                "%.2f s, and those that wait for an interrupted one spin; start the process with %s in its "
                "environment, or call torch.set_num_threads(1)",
                threads,
                rate,
                seconds,
                choice,
            )
