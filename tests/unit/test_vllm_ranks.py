"""Ranks that fail together, each in a thread: whatever fails where, no exchange lacks a rank."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.engines.vllm.worker.ranks import FINE, LOST, RankFailedError, Ranks
from campaign import share
from rank_threads import Meeting, ThreadGroup, on_all

STEPS: list[Callable[[ThreadGroup, Ranks], Any]] = [
    lambda group, ranks: group.collective(1.0),
    lambda group, ranks: ranks.combine(torch.tensor([1.0, group.rank]), "max").tolist(),
    lambda group, ranks: ranks.gather_heads(torch.tensor([group.rank])).tolist(),
    lambda group, ranks: ranks.agree(LOST if group.rank == 1 else FINE, "layer"),
]


@settings(max_examples=share(50))
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
