"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable

import torch

_SLEEP_CYCLES = 2_000_000  # about a millisecond


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    """Median of some rounds, after two that warm up.

    On CUDA by events, and the device sleeps in front of the first until the host has asked for all of the work: what
    is measured is the device's part, as in a pass, in which the host is ahead.
    """
    for _ in range(2):
        work()
    if device.type != "cuda":
        return statistics.median(_on_host(work) for _ in range(rounds))
    taken = []
    for _ in range(rounds):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        taken.append(begun.elapsed_time(ended) / 1e3)
    return float(statistics.median(taken))


def _on_host(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
