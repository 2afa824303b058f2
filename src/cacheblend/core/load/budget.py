"""How long a request may wait for a store: beyond that, what it waits for is computed.

    look-up ──> layer 0 ──> layer 1 ──> ...       what is read while layers compute costs nothing,
       └───────────┴───────────┴── one budget ──  what the request waits for is taken from the budget

Knows calls and clocks. Does not know how long computing takes, nor what becomes of a request that waited too long.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from cacheblend.core.errors import BlockLostError, LoadTimeoutError
from cacheblend.core.load.threads import DaemonPool, submit_or_call
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import BlockEntry, BlockSource, RecordMemory

LOAD_TIMEOUT = "load timeout"
"""In figures: what is computed because loading it takes longer. A decision, and no failure."""

LEAST_S = 0.5
"""A store that keeps a request waiting for less is not given up unless `load_timeout_s` says so: a disk on a busy
machine may take as long now and then."""

_LONGEST_WAIT_S = 3600.0  # at a time
T = TypeVar("T")


class LoadBudget:
    """Seconds that one request may wait for the store; used by one thread.

    Args:
        seconds: in all; None: as long as `measure` says, but at least `LEAST_S`.
        measure: how long computing what is loaded takes, in seconds; called once `LEAST_S` have been spent, since it
            may have to be measured first. None: no bound.
        clock: seconds of any origin.

    Attributes:
        spent: so far.
        timeouts: what the request gave up waiting for, one line each.
        late: seconds for which a tier was waited for when it was given up, with those before it.
    """

    def __init__(
        self,
        seconds: float | None = None,
        measure: Callable[[], float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given, self._measure, self._clock = seconds, measure, clock
        self._seconds = seconds
        self.spent = 0.0
        self.timeouts: list[str] = []
        self.late: dict[str, float] = {}

    def measured_by(self, measure: Callable[[], float]) -> None:
        """Another measure from now on, of what is known to be stored; of no effect on a bound that was given."""
        self._measure, self._seconds = measure, self._given

    def wait(self, call: "Future[Any]") -> bool:
        """Waits for a call while the budget lasts; whether the call has ended."""
        began, before = self._clock(), self.spent
        while not call.done():
            self.spent = before + self._clock() - began
            left = self._left()
            if left <= 0:
                return False
            wait([call], min(left, _LONGEST_WAIT_S))
        self.spent = before + self._clock() - began
        return True

    def give_up(self, what: str, tier: str = "") -> str:
        """Notes that the budget is used up, and what was waited for, of which tier if that is known; returns the line.

        Other tiers may be quick: what is left out from now on leaves them another `LEAST_S`, or a smaller budget anew.
        """
        allowed = self._seconds or self.spent
        self.timeouts.append(f"{what} takes longer than the {allowed:.2f} s allowed (load_timeout_s): computed instead")
        if tier:
            self.late[tier] = self.spent
        if self._seconds is not None:
            self.spent = min(self.spent, max(0.0, self._seconds - LEAST_S))
        return self.timeouts[-1]

    def _left(self) -> float:
        if self._seconds is None:
            if self.spent < LEAST_S:
                return LEAST_S - self.spent
            if self._measure is None:
                return float("inf")
            self._seconds = max(LEAST_S, self._measure())
        return self._seconds - self.spent


class BudgetedSource:
    """A source that answers within a request's budget: what it does not find or read in time is not there.

    Its calls are made in a thread. One that is late goes on there, and what it brings stays in the tiers in front of
    the store, if there are some; the request does not get it.

    Args:
        source: the store.
        budget: the request's.
        threads: that ask the store; at most so many calls hang.

    Attributes:
        is_late: a call was given up; no other is made.
    """

    def __init__(self, source: BlockSource, budget: LoadBudget, threads: DaemonPool) -> None:
        self._source, self._budget, self._threads = source, budget, threads
        self.is_late = False

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `BlockSource`; None for each name if it takes too long."""
        found = self._in_time("looking blocks up", self._source.find, names)
        return [None] * len(names) if found is None else found

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """See `BlockSource`; a `LoadTimeoutError` for each name if it takes too long."""
        read = self._in_time("reading states", self._source.read_layers, names, layers, heads, memory)
        if read is not None:
            return read
        return [LoadTimeoutError([name], self._budget.timeouts[-1]) for name in names]

    def round_trip_s(self, tier: str) -> float:
        """See `BlockSource`."""
        return self._source.round_trip_s(tier)

    def _in_time(self, what: str, call: Callable[..., T], *args: object) -> T | None:
        if self.is_late:
            return None
        asked = submit_or_call(self._threads, call, *args)
        if self._budget.wait(asked):
            return asked.result()
        asked.cancel()
        self.is_late = True
        self._budget.give_up(what)
        return None
