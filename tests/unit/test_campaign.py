"""What a run leaves out has its turn in another one."""

from typing import Any

import pytest

from campaign import leave_out, rotating, seeds


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid: str, *marks: Any) -> None:
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self._marks if mark.name == name), None)


def items() -> list[Any]:
    values = rotating(["core", *"abcdefg", ("h", 1)], core=["core"])
    marks = [getattr(value, "marks", ()) for value in values]
    made = [Item(f"t.py::{test}[{at}]", *marks[at]) for test in ("one", "two") for at in range(len(values))]
    return [*made, *(Item(f"t.py::grid[{at}]", pytest.mark.slow.mark) for at in range(7)), Item("t.py::quick")]


@pytest.mark.parametrize("first", [0, 3, 10**6 - 1])
def test_five_runs_one_after_the_other_have_every_test_and_each_about_a_fifth(first: int) -> None:
    had: set[str] = set()
    for seed in range(first, first + 5):
        kept = items()
        left = leave_out(kept, seed, 5)
        names = {item.nodeid for item in kept}
        assert {"t.py::quick", "t.py::one[0]", "t.py::two[0]"} <= names and 17 <= len(left) <= 21
        assert {at.partition("[")[2] for at in names if "one" in at} == {
            at.partition("[")[2] for at in names if "two" in at
        }  # the same families
        had |= names
    assert had == {item.nodeid for item in items()}


def test_all_run_where_every_campaign_does() -> None:
    kept = items()
    assert leave_out(kept, 7, 1) == [] and len(kept) == len(items())


@pytest.mark.parametrize(("count", "known"), [(16, 600), (600, 600), (1, 5), (5, 12)])
def test_seeds_are_known_to_go_well_and_none_comes_twice(count: int, known: int) -> None:
    drawn = seeds(count, known)
    assert len(set(drawn)) == count and set(drawn) <= set(range(known))
    assert set(range(count - count // 2)) <= set(drawn)
