"""The rows of a prompt that a prefill still computes, and what a selector may know of them.

    position    0 ........ prefix_length ................................ len(plan)
    plan        | exact prefix | text | loaded | miss  | loaded | suffix |
    row                        0 1 2 ...                                     the layer runner's rows
    active      no             yes      candidates: may be dropped, for good

Knows plans and tensors; does not know why a row is kept or dropped (`core.select`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.select.selectors import Candidates


@dataclass
class Cues:
    """What is known of all rows of the runner, [rows] each, on its device; None: not asked for, or unknown.

    Attributes:
        attention, words, sentences: see `Candidates`.
    """

    attention: torch.Tensor | None = None
    words: torch.Tensor | None = None
    sentences: torch.Tensor | None = None


class ActiveRows:
    """The active rows, ascending by position, with their hidden state.

    Args:
        plan: of the prompt.
        hidden: the first layer's input of all rows of the runner, [rows, width].

    Attributes:
        hidden: [n, width] of the active rows.
        index: [n] int64, which of the runner's rows they are.
        cues: of all rows of the runner.
        recomputed: candidates that were kept by the last selection; before any, all of them.
        has_dropped: a row was dropped: nothing is left from which it could be computed.
    """

    def __init__(self, plan: BlendPlan, hidden: torch.Tensor) -> None:
        self._plan, self.hidden = plan, hidden
        self.index = torch.arange(len(hidden), device=hidden.device)
        self.cues = Cues()
        candidates = torch.from_numpy(plan.candidate_rows - plan.prefix_length).to(hidden.device)
        self._is_candidate = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        self._is_candidate[candidates] = True
        self._chunk_offsets = self.of_runner(plan.chunk_offsets)
        self._segments = self.of_runner(plan.segment_indices)
        self.total = self.recomputed = len(candidates)
        self.has_dropped = False

    def __len__(self) -> int:
        return len(self.index)

    def tiles(self, tile_rows: int) -> Iterator[slice]:
        """Slices of at most so many active rows, in order."""
        for start in range(0, len(self), tile_rows):
            yield slice(start, min(start + tile_rows, len(self)))

    def positions(self, tile: slice) -> torch.Tensor:
        """[n] int64, in the prompt."""
        return self.index[tile] + self._plan.prefix_length

    def is_candidate(self, tile: slice) -> torch.Tensor:
        """Boolean [n]: rows with loaded KV that may still be dropped."""
        return self._is_candidate[tile]

    @property
    def has_candidates(self) -> bool:
        """Some row may still be dropped."""
        return bool(self._is_candidate.any())

    def candidates(self, layer: int | None = None, deviation: torch.Tensor | None = None) -> Candidates:
        """What a selector chooses from, at a check layer or before the first one.

        Args:
            layer: the check layer; None before layer 0.
            deviation: [n] of the candidates at that layer.
        """
        rows, cues = self.index[self._is_candidate], self.cues
        return Candidates(
            positions=rows + self._plan.prefix_length,
            chunk_offsets=self._chunk_offsets[rows],
            total=self.total,
            layer=layer,
            deviation=deviation,
            attention=None if cues.attention is None else cues.attention[rows],
            words=None if cues.words is None else cues.words[rows],
            segments=self._segments[rows],
            sentences=None if cues.sentences is None else cues.sentences[rows],
        )

    def put(self, tile: slice, output: torch.Tensor) -> None:
        """Replaces the hidden state of a tile, [n, width]; no copy where the layer has worked in place."""
        place = self.hidden[tile]
        if output.shape == self.hidden.shape:
            self.hidden = output
        elif output.data_ptr() != place.data_ptr():
            place.copy_(output)

    def keep(self, selected: torch.Tensor) -> None:
        """Drops the candidates that are not selected, boolean [candidates]; all other rows stay active."""
        active = ~self._is_candidate
        active[self._is_candidate] = selected
        self.recomputed = int(selected.sum())
        if bool(active.all()):
            return
        self.has_dropped = True
        self.hidden, self.index = self.hidden[active], self.index[active]
        self._is_candidate = self._is_candidate[active]

    def keep_last(self) -> None:
        """Leaves the last row alone: in the last layer only its output is read."""
        self.hidden, self.index = self.hidden[-1:].clone(), self.index[-1:]
        self._is_candidate = self._is_candidate[-1:]

    def of_runner(self, by_position: npt.NDArray[np.generic]) -> torch.Tensor:
        """[len(plan)] by position to [rows] of the runner, on its device."""
        return torch.from_numpy(by_position[self._plan.prefix_length :]).to(self.hidden.device)
