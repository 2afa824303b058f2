"""Ranks that fail together, each in a thread: whatever fails where, no exchange lacks a rank."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.engines.vllm.ranks import FINE, LOST, RankFailedError, Ranks

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
        self._before: Callable[[str], None] | None = None

    def maximum(self, values: list[int]) -> list[int]:
        return [max(each) for each in zip(*self._meeting.exchange(self.rank, values), strict=True)]

    def collective(self, value: float, at: str = "all reduce") -> float:
        if self._before is not None:
            self._before(at)
        return float(sum(part for (part,) in self._meeting.exchange(self.rank, [value])))

    def combine(self, value: torch.Tensor, how: Literal["sum", "max"], before: Callable[[str], None]) -> torch.Tensor:
        before(how)
        found = torch.stack([part for (part,) in self._meeting.exchange(self.rank, [value])])
        return found.sum(0) if how == "sum" else found.amax(0)

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        if self._before is not None:
            self._before("gather")
        return torch.cat([part for (part,) in self._meeting.exchange(self.rank, [part])])

    @contextmanager
    def guarded(self, before: Callable[[str], None]) -> Iterator[None]:
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


STEPS: list[Callable[[ThreadGroup, Ranks], Any]] = [
    lambda group, ranks: group.collective(1.0),
    lambda group, ranks: ranks.combine(torch.tensor([1.0, group.rank]), "max").tolist(),
    lambda group, ranks: ranks.gather_heads(torch.tensor([group.rank])).tolist(),
    lambda group, ranks: ranks.agree(LOST if group.rank == 1 else FINE, "layer"),
]


@settings(max_examples=50)
@given(
    st.integers(2, 3),
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6),
    st.dictionaries(st.integers(0, 2), st.integers(0, 6), max_size=3),
)
def test_all_ranks_fail_or_none_wherever_errors_are(size: int, steps: list[int], fails_at: dict[int, int]) -> None:
    """`fails_at`: by rank, the step in front of which it fails."""

    def work(group: ThreadGroup, ranks: Ranks) -> tuple[Any, Any]:
        outcome: Any = None
        try:
            with ranks.section():
                outcome = []
                for number, step in enumerate([*steps, None]):
                    if fails_at.get(group.rank) == number:
                        raise ValueError(group.rank)
                    if step is not None:
                        outcome.append(STEPS[step](group, ranks))
        except Exception as error:
            outcome = type(error)
        with ranks.section():
            return outcome, group.collective(2.0)  # the next section is whole

    found, meeting = on_all(size, work)
    first = min((at for rank, at in fails_at.items() if rank < size and at <= len(steps)), default=None)
    assert meeting.barrier.n_waiting == 0
    assert [after for _, after in found] == [2.0 * size] * size
    outcomes = [outcome for outcome, _ in found]
    if first is None:
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert len(outcomes[0]) == len(steps)
    else:
        failed = [fails_at.get(rank) == first for rank in range(size)]
        assert outcomes == [ValueError if own else RankFailedError for own in failed]


def test_an_error_that_somebody_swallows_still_ends_the_section() -> None:
    def work(group: ThreadGroup, ranks: Ranks) -> Any:
        with ranks.section():
            if group.rank == 0:
                raise ValueError
            for _ in range(3):
                with suppress(RankFailedError):
                    group.collective(1.0)
        return "went on"

    found, _ = on_all(2, work)
    assert [type(one) for one in found] == [ValueError, RankFailedError]


@pytest.mark.parametrize("leaves", [False, True])
def test_ranks_that_do_different_things_fail_and_do_not_hang(leaves: bool) -> None:
    def work(group: ThreadGroup, ranks: Ranks) -> Any:
        try:
            with ranks.section():
                if not (leaves and group.rank):
                    group.collective(1.0, f"{100 + group.rank} rows")
        except RankFailedError:
            return ranks.agree_each([group.rank, 7, -group.rank])
        return "went on"

    found, _ = on_all(2, work)
    assert found == [[1, 7, 0]] * 2


def test_one_rank_exchanges_nothing() -> None:
    class Alone(ThreadGroup):
        def maximum(self, values: list[int]) -> list[int]:
            raise AssertionError

    ranks = Ranks(Alone(Meeting(1), 0))
    with ranks.section():
        value = torch.ones(2)
        assert ranks.combine(value, "sum") is value
        assert ranks.gather_heads(value) is value
        assert ranks.agree(LOST, "layer") == LOST
    assert ranks.agree_each([3, 1]) == [3, 1]
    with pytest.raises(ValueError, match="own"), ranks.section():
        raise ValueError("own")
