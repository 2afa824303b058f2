"""A selector that remembers what it was asked and what it kept, for those who want to see why."""

from dataclasses import dataclass, field

import torch

from cacheblend.core.select.selectors import Candidates, Measure, Selector


@dataclass
class Recorded:
    """Chooses as `inner` does.

    Attributes:
        inner: whose choice it is.
        asked: candidates of each selection, in order; a pass that is begun anew selects again.
        keeps: [candidates] bool of each selection, True for those that were kept.
    """

    inner: Selector
    asked: list[Candidates] = field(default_factory=list)
    keeps: list[torch.Tensor] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        """Positions that the last selection kept, ascending."""
        return self.asked[-1].positions[self.keeps[-1]].tolist() if self.asked else []

    @property
    def check_layers(self) -> tuple[int, ...]:
        """See `Selector`."""
        return self.inner.check_layers

    @property
    def at_start(self) -> bool:
        """See `Selector`."""
        return self.inner.at_start

    @property
    def question_rows(self) -> int:
        """See `Selector`."""
        return self.inner.question_rows

    @property
    def measure(self) -> Measure:
        """See `Selector`."""
        return self.inner.measure

    def select(self, candidates: Candidates) -> torch.Tensor:
        """See `Selector`."""
        keep = self.inner.select(candidates)
        self.asked.append(candidates)
        self.keeps.append(keep)
        return keep
