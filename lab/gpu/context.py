"""What the parts of one run of `lab cuda` share."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend.engines.hf.shapes import build_shape

Progress = Callable[[str], None]
Found = dict[str, Any]
"""What a part found: `figures`, its raw numbers, and `error` if something in it went wrong."""


class Weights:
    """Random weights of one shape at a time, so that parts that follow each other build them once.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: tuple[str, PreTrainedModel] | None = None

    def of(self, shape: str) -> PreTrainedModel:
        """A model of the shape; that of another shape is let go.

        Raises:
            torch.OutOfMemoryError: they do not fit on the device.
        """
        if self._held is None or self._held[0] != shape:
            self._held = None
            free(self._device)
            self._held = shape, build_shape(shape, device=str(self._device))
        return self._held[1]


@dataclass
class Bench:
    """One part of a run of `lab cuda`.

    Attributes:
        device: that is measured.
        dry_run: tiny sizes, to try the parts themselves.
        until: time (monotonic) by which the part should have ended.
        progress: called with what is done next.
        weights: of the shapes.
        keep: called with what a part has found so far, so that it is kept whatever happens next.
        skipped: what was not measured, and why.
    """

    device: torch.device
    dry_run: bool
    until: float
    progress: Progress
    weights: Weights
    keep: Callable[[Found], None] = lambda found: None
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
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
