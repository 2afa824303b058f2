"""Tensor-parallel ranks that are threads of one process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from cacheblend.engines.vllm.worker.ranks import Ranks

WAIT_S = 30  # a rank that waits so long for the others waits for ever


@dataclass
class Meeting:
    """Where threads exchange numbers."""

    size: int
    values: dict[int, list[Any]] = field(default_factory=dict)
    exchanges: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, value: list[Any]) -> list[list[Any]]:
        self.values[rank] = value
        if self.barrier.wait(WAIT_S) == 0:
            self.exchanges += 1
        found = [self.values[other] for other in range(self.size)]
        self.barrier.wait(WAIT_S)
        return found


class ThreadGroup:
    """A `Group` whose ranks are threads; `collective` is one of a model's layers."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size, self.rank, self._meeting = meeting.size, rank, meeting
        self._before: Callable[[str], Any] | None = None

    def maximum(self, values: list[int]) -> list[int]:
        return [max(each) for each in zip(*self._meeting.exchange(self.rank, values), strict=True)]

    def collective(self, value: float, at: str = "all reduce") -> float:
        if self._before is not None:
            self._before(at)
        return float(sum(part for (part,) in self._meeting.exchange(self.rank, [value])))

    def combine(self, value: torch.Tensor, how: Literal["sum", "max"], before: Callable[[str], Any]) -> torch.Tensor:
        before(how)
        found = torch.stack([part for (part,) in self._meeting.exchange(self.rank, [value])])
        return found.sum(0) if how == "sum" else found.amax(0)

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        if self._before is not None:
            self._before("gather")
        return torch.cat([part for (part,) in self._meeting.exchange(self.rank, [part])])

    @contextmanager
    def guarded(self, before: Callable[[str], Any]) -> Iterator[None]:
        self._before = before
        try:
            yield
        finally:
            self._before = None


def on_all(size: int, work: Callable[[ThreadGroup, Ranks], Any]) -> tuple[list[Any], Meeting]:
    """What each rank's work returned, or its error."""
    meeting, found = Meeting(size), [None] * size

    def run(rank: int) -> None:
        group = ThreadGroup(meeting, rank)
        try:
            found[rank] = work(group, Ranks(group))
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, meeting
