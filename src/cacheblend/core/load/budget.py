"""How long a request may wait for a store: beyond that, what it waits for is computed.

    look-up ──> layer 0 ──> layer 1 ──> ...       what is read while layers compute costs nothing,
       └───────────┴───────────┴── one budget ──  what the request waits for is taken from the budget

Knows calls and clocks. Does not know how long computing takes, nor what becomes of a request that waited too long.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from cacheblend.core.errors import BlockLostError, LoadTimeoutError
from cacheblend.core.load.threads import DaemonPool, submit_or_call
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import BlockEntry, BlockSource, RecordMemory

PAUSE_S = 5.0  # seconds for which what did not answer is not asked again

LOAD_TIMEOUT = "load timeout"
"""In figures: what is computed because loading it takes longer. A decision, and no failure."""

LEAST_S = 0.5
"""A store that keeps a request waiting for less is not given up unless `load_timeout_s` says so: a disk on a busy
machine may take as long now and then."""

_FOR_S, _MOST = 0.5, 60.0  # a tier that was given up pauses for `PAUSE_S` for each half second, so many times at most
_LONGEST_WAIT_S, _MOMENT_S = 3600.0, 1e-6  # at a time
T = TypeVar("T")

Reading = Callable[[], tuple[str, float]]
"""The tier that is asked now, and since when by the budget's clock; `LOOK_UP`: no tier, but the store as a whole."""

LOOK_UP = ""

logger = logging.getLogger("cacheblend.store")


class LateTiers:
    """The tiers of one store that a request has given up: for a while no other one waits for them. A tier is passed
    over for ten times as long as it was waited for, but `PAUSE_S` at least: so the requests that try it again spend a
    tenth of their time on that, however long they wait. Safe to call from several threads."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._now = clock or (lambda: time.monotonic())  # looked up when it is asked
        self._resume_at: dict[str, float] = {}
        self.silent: set[str] = set()  # have not answered in time since they were given up; "": the store as a whole

    def left_s(self, tier: str) -> float:
        """Seconds for which a tier is passed over yet; 0: it is asked."""
        return max(0.0, self._resume_at.get(tier, -math.inf) - self._now())

    def give_up(self, tier: str, waited_s: float) -> None:
        """A request has waited so long for a tier, in vain. Said once, until the tier answers again."""
        seconds = PAUSE_S * min(_MOST, max(1.0, waited_s / _FOR_S))
        self._resume_at[tier] = max(self._resume_at.get(tier, -math.inf), self._now() + seconds)
        if tier not in self.silent:
            self.silent.add(tier)
            logger.warning(
                "%s kept a request waiting for %.2f s, longer than allowed (load_timeout_s); requests are computed "
                "without it, and it is asked again in %.0f s",
                tier or "the store",
                waited_s,
                seconds,
            )

    def answered(self, tiers: Iterable[str]) -> None:
        for tier in self.silent.intersection(tiers):
            self.silent.discard(tier)
            logger.info("%s answers in time again", tier or "the store")


class LoadBudget:
    """Seconds that one request may wait for the store; used by one thread. All waits are taken from the budget, but no
    tier is given up for another's: each has `LEAST_S` of its own, look-ups too (or as long as `seconds`, where that is
    less). `seconds`: in all; None: as long as `measure` says, but at least `LEAST_S`. `measure`: how long computing
    what is loaded takes, in seconds; called once `LEAST_S` have been spent, since it may have to be measured first;
    None: no bound. `late_tiers`: what other requests have given up, which is not waited for. `clock`: seconds of any
    origin."""

    def __init__(
        self,
        seconds: float | None = None,
        measure: Callable[[], float] | None = None,
        *,
        late_tiers: LateTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given, self._measure, self.clock = seconds, measure, clock
        self._late_tiers, self._seconds = late_tiers, seconds
        self.spent = 0.0  # so far in all
        self.waited: dict[str, float] = {}  # so far by tier; `LOOK_UP`: for the store as a whole
        # what the request gave up waiting for, one line each, and what it did not ask for after others
        self.timeouts: list[str] = []
        self.late: dict[str, float] = {}  # by tier, how long one that was given up was waited for; `LOOK_UP`: any

    def measured_by(self, measure: Callable[[], float]) -> None:
        """Another measure from now on, of what is known to be stored; of no effect on a bound that was given."""
        self._measure, self._seconds = measure, self._given

    def wait(self, call: "Future[Any]", reading: Reading | None = None) -> bool:
        """Waits for a call while the budget lasts; whether the call has ended. `reading`: which tier the call asks, as
        it goes on; None: a look-up."""
        asked = reading or (lambda: (LOOK_UP, -math.inf))
        while not call.done():
            tier, _ = asked()
            # Between two reads it waits for no tier: what others found out about the store does not end it.
            left = self._left(tier, stops=reading is None or tier != LOOK_UP)
            if left <= 0:
                return False
            began = self.clock()
            wait([call], min(left, _LONGEST_WAIT_S))
            now, (next_tier, since) = self.clock(), asked()
            since = min(max(since, began), now)
            self.spent += now - began
            for each, seconds in ((tier, since - began), (next_tier, now - since)):
                self.waited[each] = self.waited.get(each, 0.0) + seconds
        return True

    def skips(self, what: str, tier: str = LOOK_UP) -> bool:
        """Whether a tier is not asked, since another request has given it up; noted."""
        left = 0.0 if self._late_tiers is None else self._late_tiers.left_s(tier)
        if left > 0:
            whom = tier or "the store"
            self.timeouts.append(
                f"{what}: {whom} took too long before (load_timeout_s), and is asked again in {left:.0f} s: computed "
                "instead"
            )
        return left > 0

    def give_up(self, what: str, tier: str = LOOK_UP) -> str:
        """Notes that a tier was waited for long enough, and what was asked of it; returns the line."""
        self.late[tier] = self.spent if tier == LOOK_UP else self.waited.get(tier, 0.0)
        if self.skips(what, tier):  # another request has found out meanwhile
            return self.timeouts[-1]
        allowed = self._seconds or self.spent
        self.timeouts.append(f"{what} takes longer than the {allowed:.2f} s allowed (load_timeout_s): computed instead")
        if self._late_tiers is not None:
            self._late_tiers.give_up(tier, self.late[tier])
        return self.timeouts[-1]

    def _left(self, tier: str, *, stops: bool) -> float:
        if stops and self._late_tiers is not None and self._late_tiers.left_s(tier) > 0:
            return 0.0
        least = LEAST_S if self._given is None else min(LEAST_S, self._given)
        left = least - self.waited.get(tier, 0.0)
        if self._seconds is None and left <= _MOMENT_S:
            self._seconds = math.inf if self._measure is None else max(LEAST_S, self._measure())
        if self._seconds is not None:
            left = max(left, self._seconds - self.spent)
        return left if left > _MOMENT_S else 0.0


class BudgetedSource:
    """A source that answers within a request's budget: what it does not find or read in time is not there. The store is
    asked in `threads`: at most so many calls hang. One that is late goes on there, and what it brings stays in the
    tiers in front of the store, if there are some; the request does not get it."""

    def __init__(self, source: BlockSource, budget: LoadBudget, threads: DaemonPool) -> None:
        self._source, self._budget, self._threads = source, budget, threads
        self._tiers: dict[BlockName, str] = {}  # of blocks that were found
        self.is_late = False  # a call was given up, or not made after others that were; no other is made

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        found = self._in_time("looking blocks up", LOOK_UP, self._source.find, names)
        if found is None:
            return [None] * len(names)
        self._tiers |= {name: entry.tier for name, entry in zip(names, found, strict=True) if entry is not None}
        return found

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        tier = next((self._tiers[name] for name in names if name in self._tiers), LOOK_UP)
        read = self._in_time("reading states", tier, self._source.read_layers, names, layers, heads, memory)
        if read is not None:
            return read
        return [LoadTimeoutError([name], self._budget.timeouts[-1]) for name in names]

    def round_trip_s(self, tier: str) -> float:
        return self._source.round_trip_s(tier)

    def _in_time(self, what: str, tier: str, call: Callable[..., T], *args: object) -> T | None:
        if self.is_late or self._budget.skips(what, tier):
            self.is_late = True
            return None
        asked = submit_or_call(self._threads, call, *args)
        if self._budget.wait(asked, None if tier == LOOK_UP else lambda: (tier, -math.inf)):
            return asked.result()
        asked.cancel()
        self.is_late = True
        self._budget.give_up(what, tier)
        return None
