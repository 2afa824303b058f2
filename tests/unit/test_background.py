"""Background work between requests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cacheblend.engines.hf.background import Background

SOON = 5.0  # seconds: only a failing test waits that long


@contextmanager
def request_on(background: Background) -> Iterator[None]:
    """A request under way."""
    background.begin_request()
    try:
        yield
    finally:
        background.end_request()


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background(limit=3)
    yield made
    made.close()


def test_jobs_run_in_order_on_another_thread_which_ends(background: Background) -> None:
    done: list[tuple[int, str]] = []
    for i in range(3):
        assert background.submit(i, lambda i=i: done.append((i, threading.current_thread().name)))
    assert background.flush(SOON)
    assert done == [(i, "cacheblend-background") for i in range(3)]
    end = time.monotonic() + SOON
    while any(t.name == "cacheblend-background" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(t.name == "cacheblend-background" for t in threading.enumerate())


def test_no_job_is_begun_while_a_request_is_under_way_and_it_waits_for_none(background: Background) -> None:
    ran, begun, go_on, second = (threading.Event() for _ in range(4))
    with pytest.raises(KeyError), request_on(background):  # also by one that fails
        with request_on(background):
            background.submit("a", ran.set)
        assert not ran.wait(0.05)
        raise KeyError
    assert ran.wait(SOON)
    background.submit("long", lambda: (begun.set(), go_on.wait(SOON)))
    assert begun.wait(SOON)
    background.submit("next", second.set)
    with request_on(background):
        go_on.set()
        assert not second.wait(0.05)
    assert second.wait(SOON)


def test_what_waits_is_not_queued_twice_and_more_than_the_limit_is_dropped_and_counted(background: Background) -> None:
    runs: list[int] = []
    with request_on(background):
        assert background.submit("a", lambda: runs.append(1))
        assert background.submit("a", lambda: runs.append(2))
    assert background.flush(SOON) and runs == [1]
    background.submit("a", lambda: runs.append(3))
    assert background.flush(SOON) and runs == [1, 3]
    assert background.dropped == 0
    runs.clear()
    with request_on(background):
        taken = [background.submit(i, lambda i=i: runs.append(i)) for i in range(5)]
    assert taken == [True] * 3 + [False] * 2
    assert background.dropped == 2
    assert background.flush(SOON) and runs == [0, 1, 2]
    none = Background(limit=0)
    assert not none.submit("a", lambda: None) and none.dropped == 1
    none.close()


@pytest.mark.may_fail("background work")
def test_a_failing_job_does_not_end_the_thread(background: Background, caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()
    with request_on(background):
        background.submit("bad", lambda: 1 / 0)
        background.submit("good", ran.set)
    assert background.flush(SOON)
    assert ran.is_set()
    assert background.failed == 1
    assert "ZeroDivisionError" in caplog.text


def test_flush_works_the_queue_off_during_a_request_or_gives_up_after_its_timeout(background: Background) -> None:
    ran, go_on = threading.Event(), threading.Event()
    with request_on(background):
        background.submit("a", ran.set)
        assert background.flush(SOON)
        assert ran.is_set()
        background.submit("b", ran.clear)
        time.sleep(0.05)
        assert ran.is_set()  # the flush is over: a request holds the queue again
    assert background.flush(SOON) and background.flush(0)
    background.submit("a", lambda: go_on.wait(SOON))
    started = time.monotonic()
    assert not background.flush(0.05)
    assert time.monotonic() - started < SOON / 2
    go_on.set()
    assert background.flush(SOON)


def test_close_drops_what_waits_and_ends_the_thread() -> None:
    background = Background(limit=5)
    begun, go_on, never = threading.Event(), threading.Event(), threading.Event()
    background.submit("long", lambda: (begun.set(), go_on.wait(SOON)))
    assert begun.wait(SOON)
    background.submit("waits", never.set)
    threading.Timer(0.02, go_on.set).start()
    background.close()
    assert go_on.is_set()
    assert not never.is_set()
    assert not background.submit("late", never.set)
    assert background.flush(SOON)
    background.close()


def test_a_caller_that_is_never_idle_catches_up_and_patient_jobs_do_not_take_all_places() -> None:
    background, done = Background(limit=4), list[tuple[object, str]]()

    def note(name: object) -> None:
        done.append((name, threading.current_thread().name))

    with request_on(background):
        background.submit("patient", lambda: note("patient"), patient=True)
        background.submit("a", lambda: note("a"))
        assert not background.catch_up(60.0)
        assert background.catch_up(0.0)
        assert not background.catch_up(0.0)
        assert done == [("a", threading.current_thread().name)]
    assert background.flush(SOON) and done.pop()[0] == "patient" and done.pop()
    with request_on(background):
        for number in range(9):
            assert background.submit(number, lambda n=number: note(n), patient=True)
        assert background.submit("a", lambda: note("a"))
    assert background.flush(SOON)
    assert [name for name, _ in done] == [8, "a"] and background.dropped == 8
    background.close()


@pytest.mark.may_fail("background work")
def test_a_thread_that_cannot_be_started_is_started_later(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends whatever the system's limits are, and what waits is done once there is a thread."""
    start, tries, done = threading.Thread.start, iter(range(9)), list[int]()

    def scarce(thread: threading.Thread) -> None:
        if next(tries) < 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with request_on(background):
        assert background.submit("a", lambda: done.append(1))
    assert not done and background.flush(SOON) and done == [1]
    background.close()
