"""Prefills of models with recurrent layers: from which snapshot they go on, and where they leave new ones.

    prompt     | BOS | system   | chunk A | chunk B | question |
    KV held    | yes | yes      | yes     | yes     |          |
    snapshot   |     |          | yes     |         |          |
    resumed    |------- loaded ---------->| computed, every row in every layer up to the last recurrent one

Snapshots are looked for at the ends of the exact prefix's blocks, the deepest first. Behind the one that is found all
rows are computed, for a state is a function of everything in front of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.core.errors import BlockLostError, LoadTimeoutError
from cacheblend.core.failures import LOST_BLOCK, count_failure
from cacheblend.core.fuse.prefill import Recurrence
from cacheblend.core.fuse.runner import LayerRunner
from cacheblend.core.names import BlockName, state_name
from cacheblend.core.plan.blocks import Block, BlockSource
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.recurrent import LayerKinds, SnapshotFormat, States, copy_of

SHORTEST = 16
"""Tokens in front of a snapshot at least: fewer are computed sooner than a state is read."""

STEP_ROWS = 16
"""Rows computed together that one row by itself is taken to cost, where layers go on from a state row by row."""


@dataclass(frozen=True)
class PromptStates:
    """What the recurrent layers keep of a prompt.

    Attributes:
        last: behind its last row.
        snapshots: behind the rows up to a position, by the name of the chain that ends there.
    """

    last: States
    snapshots: dict[BlockName, States]

    def taken(self) -> States:
        """A copy of `last` for an answer, which goes on from it."""
        return copy_of(self.last)


class Resuming(Recurrence):
    """One prefill's states.

    Args:
        kinds: of the model's layers.
        source: the store.
        device: of the model.
        token_bytes: bytes of a token's KV in the store.
        chunks: stored chunks can be exact prefixes.

    Attributes:
        states: that the pass goes on from; empty at the prompt's start.
        lost: why snapshots that were held could not be used, one line each.
        saveable_share: see `BlendReport`.
    """

    def __init__(
        self, kinds: LayerKinds, source: BlockSource, device: torch.device, token_bytes: int, *, chunks: bool
    ) -> None:
        self._kinds, self._source, self._device, self._token_bytes = kinds, source, device, token_bytes
        self._chunks = chunks
        self._format = SnapshotFormat(kinds.states)
        self._first, self._cuts = 0, dict[int, BlockName]()
        self.states: States = {}
        self.lost: list[str] = []
        self.saveable_share = kinds.saveable if kinds.states else None

    def first_to_drop(self, num_layers: int) -> int:
        """See `Recurrence`."""
        return self._kinds.first_to_drop

    def last_to_mix(self, num_layers: int) -> int:
        """See `Recurrence`."""
        return self._kinds.last_to_mix

    def begin(self, plan: BlendPlan) -> BlendPlan:
        """Finds the deepest snapshot that can be read; the plan goes on from there."""
        if not self._kinds.states:
            return plan
        stop, self.states = self._deepest(plan)
        plan = plan.resumed_at(stop, loads=len(self._kinds.blended_layers) > 0)
        self._first, self._cuts = stop, {cut: name for cut, name in self._wanted(plan).items() if cut > stop}
        return plan

    def cuts(self, plan: BlendPlan) -> Sequence[int]:
        """See `Recurrence`."""
        return list(self._cuts)

    def row_cuts(self) -> list[int]:
        """`cuts` in rows behind where the pass began."""
        return [cut - self._first for cut in self._cuts]

    def kept(self, runner: LayerRunner) -> PromptStates:
        """See `Recurrence`."""
        assert isinstance(runner, HfLayerRunner)
        return PromptStates(
            runner.states, {self._cuts[self._first + rows]: states for rows, states in runner.snapshots.items()}
        )

    def _deepest(self, plan: BlendPlan) -> tuple[int, States]:
        """Where the deepest snapshot of the exact prefix was taken, and its states; at position 0 there are none."""
        ends: dict[int, BlockName] = {}
        for span in plan.spans:
            if span.source is not Source.PREFIX or span.stop >= len(plan):
                break
            is_close = not self._kinds.stepped or (len(plan) - span.stop) * STEP_ROWS < len(plan)
            if span.is_whole and is_close:  # of a part of a block the state behind it is not known
                ends[span.stop] = state_name(span.name)
        entries = self._source.find(list(ends.values())) if ends else []
        held = [(stop, name) for (stop, name), entry in zip(ends.items(), entries, strict=True) if entry is not None
                and entry.layout == self._format.layout]  # fmt: skip
        for stop, name in reversed(held):
            [found] = self._source.read_layers([name], range(len(self._format.layout.layers)))
            if isinstance(found, LoadTimeoutError):
                break  # the budget has noted it
            if isinstance(found, BlockLostError):
                self.lost.append(f"the states at position {stop}: {found.reason}")
                count_failure(LOST_BLOCK)
            elif (states := self._format.decode(found, self._device)) is not None:
                return stop, states
        return 0, {}

    def _wanted(self, plan: BlendPlan) -> dict[int, BlockName]:
        """Where snapshots are taken: at the end of what is exact, and in front of it so that they do not take more
        bytes than the KV between them. Where layers go on row by row only, at the prompt's end at most."""
        ends, wanted, last = plan.exact_ends(chunks=self._chunks), dict[int, BlockName](), 0
        apart = max(SHORTEST, -(-self._kinds.state_bytes // max(1, self._token_bytes)))
        for stop, name in ends.items():
            if stop - last >= apart or (stop == max(ends) and stop >= SHORTEST):
                wanted[stop] = name
                last = stop
        return {stop: name for stop, name in wanted.items() if not self._kinds.stepped or stop == len(plan)}


def snapshot_blocks(kinds: LayerKinds, states: PromptStates) -> list[Block]:
    """The snapshots of a prompt as blocks for the store."""
    layout = SnapshotFormat(kinds.states)
    return [layout.encode(name, snapshot) for name, snapshot in states.snapshots.items()]
