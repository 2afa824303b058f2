"""What the parts of one run of `bench cuda` share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Progress = Callable[[str], None]


@dataclass
class Bench:
    """One run of `bench cuda`.

    Attributes:
        device: that is measured.
        dry_run: tiny sizes, to try the parts themselves.
        until: time (monotonic) by which all parts should have ended.
        progress: called with what is done next.
        skipped: what was not measured, and why.
    """

    device: torch.device
    dry_run: bool
    until: float
    progress: Progress
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
