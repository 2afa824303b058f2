"""A selector that records its calls, for inspection."""

from dataclasses import dataclass, field

import torch

from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.select.selectors import Candidates, FoundSpan, Selector, as_mask


@dataclass
class Recorded(Selector):
    """Selects as `inner` does, and records every call.

    Attributes:
        inner: the selector that decides.
        asked: candidates of each call, in order; a pass that is restarted selects again.
        keeps: [candidates] bool of each call, True for the rows that were kept.
    """

    inner: Selector
    asked: list[Candidates] = field(default_factory=list)
    keeps: list[torch.Tensor] = field(default_factory=list)
    _of_model: Selector | None = None

    @property
    def kept(self) -> list[int]:
        """Positions that the last call kept, ascending."""
        return self.asked[-1].positions[self.keeps[-1]].tolist() if self.asked else []

    @property
    def name(self) -> str:
        """See `Selector`."""
        return self.inner.name

    @property
    def share(self) -> float | None:
        """See `Selector`."""
        return self.inner.share

    @property
    def check_layers(self) -> tuple[int, ...]:
        """See `Selector`."""
        return self._selector.check_layers

    @property
    def at_start(self) -> bool:
        """See `Selector`."""
        return self._selector.at_start

    @property
    def question_rows(self) -> int:
        """See `Selector`."""
        return self._selector.question_rows

    @property
    def hops(self) -> int:
        """See `Selector`."""
        return self._selector.hops

    @property
    def hop_spans(self) -> int:
        """See `Selector`."""
        return self._selector.hop_spans

    @property
    def hop_rows(self) -> int:
        """See `Selector`."""
        return self._selector.hop_rows

    def found_spans(self, candidates: Candidates, count: int) -> list[FoundSpan]:
        """See `Selector`; not recorded."""
        return self._selector.found_spans(candidates, count)

    @property
    def measure(self) -> Measure:
        """See `Selector`."""
        return self._selector.measure

    def of_model(self, layers: int) -> Selector:
        """See `Selector`; itself, so that who made it finds the record."""
        self._of_model = self.inner.of_model(layers)
        return self

    @property
    def _selector(self) -> Selector:
        return self.inner if self._of_model is None else self._of_model

    def select(self, candidates: Candidates) -> torch.Tensor:
        """See `Selector`."""
        selected = self._selector.select(candidates)
        self.asked.append(candidates)
        self.keeps.append(as_mask(selected, len(candidates.positions)))
        return selected
