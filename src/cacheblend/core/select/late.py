"""A selector that is asked later than it says, because earlier layers need all rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.select.selectors import Candidates, Selector


@dataclass(frozen=True)
class Late(Selector):
    """Another selector, whose checks are made at the first layers that can be checked.

    Checks that fall on the same layer are made once, with what the last of them keeps.

    Attributes:
        inner: what chooses the rows; without the question's attention.
        moved: for each layer with a check, ascending, the inner selector's own check layer.
    """

    inner: Selector
    moved: tuple[tuple[int, int], ...]

    @staticmethod
    def of(selector: Selector, layers: Sequence[int]) -> Selector:
        """The selector for a model in which only these layers, ascending, can be checked; itself if nothing changes."""
        moved = dict[int, int]()
        for check in selector.check_layers:
            if (layer := next((layer for layer in layers if layer >= check), None)) is not None:
                moved[layer] = check
        same = tuple(moved.items()) == tuple((check, check) for check in selector.check_layers)
        return selector if same else Late(selector, tuple(moved.items()))

    @property
    def name(self) -> str:
        """The inner selector's."""
        return self.inner.name

    @property
    def share(self) -> float | None:
        """The inner selector's."""
        return self.inner.share

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Where it is asked."""
        return tuple(layer for layer, _ in self.moved)

    @property
    def at_start(self) -> bool:
        """As the inner selector says: without checks that can be made it keeps all rows."""
        return self.inner.at_start

    @property
    def measure(self) -> Measure:
        """The inner selector's."""
        return self.inner.measure

    def select(self, candidates: Candidates) -> torch.Tensor:
        """What the inner selector chooses at its own check layer."""
        own = None if candidates.layer is None else dict(self.moved)[candidates.layer]
        return self.inner.select(replace(candidates, layer=own))
