"""What the parts of one run of `lab cuda` share."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.bench import silent

Progress = Callable[[str], None]
Found = dict[str, Any]
"""What a part found: `figures`, its raw numbers, and `error` if something in it went wrong."""
TRACEBACK_LINES = 12
"""That are kept of each error."""

_SLEEP_CYCLES = 2_000_000  # about a millisecond


@dataclass
class Bench:
    """One part of a run of `lab cuda`, which should have ended at a time (monotonic).

    `keep` is called with what was found so far, so that it is kept whatever happens next; `skipped`: what, and why.
    """

    device: torch.device
    dry_run: bool
    until: float
    progress: Progress
    keep: Callable[[Found], None] = silent
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; if not, `what` counts as skipped."""
        if self.left_s >= seconds:
            return True
        self.skipped[what] = f"only {max(0.0, self.left_s):.0f} s were left"
        return False


def free(device: torch.device) -> None:
    """Gives memory back that nothing uses any more, also of tensors that refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Waits for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    """Median seconds of some rounds, after two that warm up.

    On CUDA by events, and the device sleeps in front of the first until the host has asked for all of the work: what
    is measured is the device's part, as in a pass, in which the host is ahead.
    """
    for _ in range(2):
        work()
    taken = []
    for _ in range(rounds):
        if device.type != "cuda":
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
            continue
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        taken.append(begun.elapsed_time(ended) / 1e3)
    return float(statistics.median(taken))
