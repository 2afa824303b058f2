"""What the benchmarks say that discovery learns: of a trace without, with some and with only recurring passages."""

from collections.abc import Iterator

from lab.servers.discovery import learn_in_order, learning, watch_ms
from lab.servers.ragpulse import random_ids


def requests(*passages: str) -> Iterator[list[int]]:
    """A request for each: new ids, the passages that it names, a question."""
    for number, names in enumerate(passages):
        body = [token for name in names for token in random_ids(f"passage {name}", 90)]
        yield [*random_ids(f"front {number}", 20), *body, *random_ids(f"question {number}", 9)]


def test_what_recurs_is_learnt_in_order() -> None:
    learnt, whole = learn_in_order(requests("ab", "bc", "ac", "ab", "d", "d"), 3)
    assert sorted(learnt.chunks) == sorted(random_ids(f"passage {name}", 90) for name in "abc")
    assert learnt.figures.stored_tokens == learnt.figures.wasted_tokens == 270 and learnt.wasted == 1
    assert whole.figures.stored_tokens == 360 and whole.figures.hit_tokens == 180
    assert whole.wasted == 0.5  # c and d came no more
    assert sorted(whole.found_in(requests("ca", "x", "a"))) == sorted(
        random_ids(f"passage {name}", 90) for name in "ac"
    )
    assert not whole.found_in(requests("x"))


def test_nothing_is_learnt_of_requests_that_share_nothing() -> None:
    told = list[int]()
    with learning() as learner:
        learner.see(requests("a", "b", ""), told.append)
        learnt = learner.learnt
    assert told == [1, 2, 3] and not learnt.chunks and learnt.wasted == 0 and not learnt.figures.runs


def test_a_watcher_that_is_full_is_timed() -> None:
    assert watch_ms(watch_tokens=1 << 15) > 0
