"""The rows of a prompt that a prefill still computes, and what a selector may know of them.

    position    0 ........ prefix_length ................................ len(plan)
    plan        | exact prefix | text | loaded | miss  | loaded | suffix |
    row                        0 1 2 ...                                     the layer runner's rows
    active      no             yes      candidates: may be dropped, for good

How many rows are active is known on the host, which of them only on the device: nothing here waits for it.

Knows plans and tensors; does not know why a row is kept or dropped (`core.select`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.correction import Correctable
from cacheblend.core.kernels.upload import upload, upload_together
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.select.selectors import Candidates


class ActiveRows:
    """The active rows, ascending by position, with their hidden state. `hidden`: the first layer's input of all rows of
    the runner, [rows, width]; `cuts`: positions that no tile of all rows spans, ascending."""

    def __init__(self, plan: BlendPlan, hidden: torch.Tensor, cuts: Sequence[int] = ()) -> None:
        self._plan, self.hidden = plan, hidden  # [n, width] of the active rows
        self._cuts = [cut - plan.prefix_length for cut in cuts]
        self.index = torch.arange(len(hidden), device=hidden.device)  # [n] int64, which of the runner's rows they are
        self._of_tiles: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # of the rows that are active now
        rows = slice(plan.prefix_length, None)
        known = [plan.candidate_rows - plan.prefix_length, plan.chunk_offsets[rows], plan.segment_indices[rows]]
        # the candidates' places among the active rows, ascending
        self._candidates, offsets, segments = upload_together(known, hidden.device)
        self._correctable: Correctable | None = None
        self._all, self._segments = self._candidates, int(plan.segment_indices[-1]) + 1
        self.total = self.recomputed = len(self._candidates)  # all, and those that the last selection kept
        # what is known of all rows of the runner, as if each were a candidate
        self.known = Candidates(self.index + plan.prefix_length, offsets, self.total, segments=segments)
        self.has_dropped = False  # a row was dropped: nothing is left from which it could be computed

    def __len__(self) -> int:
        return len(self.index)

    def tiles(self, tile_rows: int) -> Iterator[slice]:
        """Slices of at most so many active rows, in order."""
        cuts = [] if self.has_dropped else self._cuts
        start = 0
        while start < len(self):
            stop = min(start + tile_rows, len(self), *(cut for cut in cuts if cut > start))
            yield slice(start, stop)
            start = stop

    def index_of(self, tile: slice) -> torch.Tensor:
        """The part of `index` of a tile; as `positions`, the same tensor for as long as no row is dropped."""
        return self._of_tile(tile)[0]

    def positions(self, tile: slice) -> torch.Tensor:  # [n] int64, in the prompt
        return self._of_tile(tile)[1]

    def _of_tile(self, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        key = tile.start, tile.stop
        if key not in self._of_tiles:
            index = self.index[tile]
            self._of_tiles[key] = index, index + self._plan.prefix_length
        return self._of_tiles[key]

    def _leave(self, hidden: torch.Tensor, index: torch.Tensor) -> None:
        self.hidden, self.index = hidden, index
        self._of_tiles.clear()
        self._correctable = None

    @property
    def has_candidates(self) -> bool:  # some row may still be dropped
        return len(self._candidates) > 0

    def candidates(self, layer: int | None = None, deviation: torch.Tensor | None = None) -> Candidates:
        """What a selector chooses from, before layer 0, or at a check layer with deviations [n] of all active rows."""
        rows, known = self.index[self._candidates], vars(self.known).items()
        picked: dict[str, Any] = {name: each[rows] for name, each in known if isinstance(each, torch.Tensor)}
        deviation = None if deviation is None else deviation[self._candidates]
        return Candidates(**picked, total=self.total, layer=layer, deviation=deviation)

    @property
    def correctable(self) -> Correctable:
        """The candidates that were selected, and those that were dropped."""
        if self._correctable is None:
            chosen = self.index[self._candidates]
            left = torch.zeros(len(self.known.positions), dtype=torch.int8, device=chosen.device)
            left.index_fill_(0, self._all, 1).index_fill_(0, chosen, 0)  # `nonzero` would be waited for
            dropped = torch.argsort(left, descending=True, stable=True)[: self.total - len(chosen)]
            positions, segments = self.known.positions, self.known.segments
            assert segments is not None
            shares = (segments[chosen] == torch.arange(self._segments + 1, device=chosen.device)[:, None]).float()
            shares /= shares.sum(1, keepdim=True).clamp(min=1)
            of_all = torch.full((len(self._plan),), self._segments, device=chosen.device)
            of_all.index_copy_(0, positions[dropped], segments[dropped])
            self._correctable = Correctable(self._candidates, positions[chosen], shares, positions[dropped], of_all)
        return self._correctable

    def put(self, tile: slice, output: torch.Tensor) -> None:
        """Replaces the hidden state of a tile, [n, width]; no copy where the layer has worked in place."""
        place = self.hidden[tile]
        if output.shape == self.hidden.shape:
            self.hidden = output
        elif output.data_ptr() != place.data_ptr():
            place.copy_(output)

    def keep(self, selected: torch.Tensor) -> None:
        """Drops the candidates that are not selected (see `Selector.select`); all other rows stay active. Raises
        `InvalidInputError`: it is no selection of these candidates. On a device their order is not checked: that would
        be waited for."""
        most = len(self._candidates)
        if selected.dtype == torch.bool and selected.shape == (most,):
            selected = selected.nonzero().flatten()
        fits = selected.dtype == torch.int64 and selected.dim() == 1 and len(selected) <= most
        if fits and _is_on_host(selected) and len(selected):
            fits = bool((selected.diff() > 0).all()) and int(selected[0]) >= 0 and int(selected[-1]) < most
        if not fits:
            raise InvalidInputError(
                f"a selector gave {selected.dtype} {list(selected.shape)} for {most} candidates; it gives their "
                f"indices, int64, ascending, each once, or {most} booleans"
            )
        self.recomputed = len(selected)
        if len(selected) == most:
            return
        self.has_dropped = True
        count = len(self) - len(self._candidates) + len(selected)
        stays = torch.ones_like(self.index, dtype=torch.bool).index_fill_(0, self._candidates, value=False)
        stays.index_fill_(0, self._candidates[selected], value=True)
        places = stays.cumsum(0) - 1  # among those that stay
        active = torch.zeros_like(self.index[: count + 1])  # the last takes what is dropped
        active.scatter_(0, places.masked_fill_(~stays, count), torch.arange(len(self), device=active.device))
        self._candidates = places[self._candidates[selected]]
        self._leave(self.hidden[active[:count]], self.index[active[:count]])

    def keep_last(self, count: int = 1) -> None:
        """Leaves the last rows, none of them a candidate."""
        self._leave(self.hidden[-count:].clone(), self.index[-count:])
        self._candidates = self._candidates[:0]

    def of_runner(self, by_position: npt.NDArray[np.generic]) -> torch.Tensor:
        """[len(plan)] by position to [rows] of the runner, on its device."""
        return upload(by_position[self._plan.prefix_length :], self.hidden.device)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
