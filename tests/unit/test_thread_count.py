"""Fewer threads where others use the cores, and how long those of a command spin."""

import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from cacheblend.cli.program import BOUNDED, bound_waiting
from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.hf import BlendEngine, thread_count
from cacheblend.engines.hf.thread_count import ThreadCount
from families import tiny_model


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine of two cores, whatever the environment says."""
    before = torch.get_num_threads()
    monkeypatch.setattr(thread_count, "_OWN_THREADS", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def learn(count: ThreadCount, seconds: float, share: float) -> None:
    """Layers of 10 ms, of which the thread ran for a part."""
    for _ in range(round(seconds / 0.01)):
        count.learn(0.01, 0.01 * share)


def used(count: ThreadCount) -> list[int]:
    """Threads around a layer, in one, behind it, and behind both."""
    found = []
    with count.held():
        found.append(torch.get_num_threads())
        with count.layer():
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())
    return [*found, torch.get_num_threads()]


def test_one_thread_while_others_use_the_cores() -> None:
    count = ThreadCount()
    learn(count, 1, 1.0)
    assert used(count) == [2, 2, 2, 2]
    learn(count, 0.02, 0.4)
    assert used(count) == [1, 1, 1, 2], "the program's own number is as it was"
    learn(count, 10, 0.3)
    assert used(count) == [1, 1, 1, 2]
    learn(count, 0.3, 1.0)
    assert used(count) == [2, 2, 2, 2]


def test_more_threads_are_tried_less_often_the_more_often_that_failed() -> None:
    count, waited = ThreadCount(), []
    for _ in range(8):
        learn(count, 0.02, 0.4)
        assert count.is_single
        seconds = 0.0
        while count.is_single:
            learn(count, 0.02, 1.0)
            seconds += 0.02
        waited.append(seconds)
    assert waited == sorted(waited)
    assert waited[0] < 0.5 and 8 <= waited[-1] < 8.5
    learn(count, 20, 1.0)  # it has held
    learn(count, 0.02, 0.4)
    learn(count, 0.3, 1.0)
    assert not count.is_single


def test_a_number_that_was_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for following in (ThreadCount(is_following=False), ThreadCount()):
        following.is_single = following.is_following
        torch.set_num_threads(1 if following.is_following else 2)  # the program's own choice since
        assert set(used(following)) == {torch.get_num_threads()}
    torch.set_num_threads(2)
    with monkeypatch.context() as chosen:
        chosen.setenv("OMP_NUM_THREADS", "2")
        assert not ThreadCount().is_following
    monkeypatch.setattr(thread_count, "_libraries", lambda: None)  # one thread has no number of its own
    count = ThreadCount()
    assert not count.is_following
    count.is_single = True
    assert used(count) == [2, 2, 2, 2]


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    count = ThreadCount()
    learn(count, 4, 0.4)
    assert not caplog.records, "weights that are read take a while, too"
    learn(count, 40, 0.4)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "40 % of the time" in record.message and "OMP_NUM_THREADS=2" in record.message
    assert "or other threads of this one" in record.message  # a thread cannot tell who has its core


def number_of_a_new_thread() -> int:
    found = list[int]()
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def busy() -> ThreadCount:
    count = ThreadCount()
    learn(count, 0.02, 0.4)
    assert count.is_single
    return count


def test_the_number_of_other_threads_never_changes() -> None:
    """Not of those that begin to use torch meanwhile, nor what the program sets elsewhere for them."""
    count = busy()
    with count.held():
        assert (torch.get_num_threads(), number_of_a_new_thread()) == (1, 2)
    ready, go = threading.Event(), threading.Event()

    def serve() -> None:
        torch.get_num_threads()
        ready.set()
        go.wait(60)
        assert used(count) == [1, 1, 1, 2]
        served.append(1)

    served = list[int]()
    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait(60)
    torch.set_num_threads(4)
    go.set()
    thread.join(60)
    assert served == [1] and (torch.get_num_threads(), number_of_a_new_thread()) == (4, 4)


def test_the_number_comes_back_whatever_fails_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the program has set another one meanwhile."""
    count = busy()
    for context in (count.held, count.layer):
        with pytest.raises(KeyError), context():
            raise KeyError
        assert torch.get_num_threads() == 2

    def fail(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(ThreadCount, "learn", fail)
    with pytest.raises(KeyError), count.layer():
        pass
    assert torch.get_num_threads() == 2
    with count.held():
        torch.set_num_threads(3)
    assert torch.get_num_threads() == 3


def test_engines_and_a_program_in_several_threads_keep_their_numbers() -> None:
    """At random: threads run layers of two engines, some of them with numbers that the program has given them."""
    counts, ends = (busy(), busy()), list[tuple[int, int]]()

    def run(seed: int) -> None:
        draw = random.Random(seed)
        own = draw.choice((None, None, 1, 3))
        if own is not None:
            torch.set_num_threads(own)
        before = torch.get_num_threads()
        for _ in range(40):
            count = draw.choice(counts)
            count.is_single = draw.random() < 0.7
            with contextlib.suppress(ZeroDivisionError), count.held(), draw.choice(counts).layer():
                torch.ones(40, 40) @ torch.ones(40, 40)
                draw.choice((int, lambda: 1 // 0))()
        ends.append((before, torch.get_num_threads()))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 12 and all(before == after for before, after in ends)


@pytest.mark.parametrize("shares", [[1.0], [0.3], [0.3, 1.0]])
def test_answers_are_the_same_on_any_number(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided anew at each layer, the number never stays changed behind a request."""
    draw, seen = random.Random(1), set[int]()

    def learn_by_chance(count: ThreadCount, took: float, ran: float) -> None:
        seen.add(torch.get_num_threads())
        count.is_single = draw.choice(shares) < 1

    monkeypatch.setattr(ThreadCount, "learn", lambda count, took, ran: None)
    with BlendEngine(tiny_model("llama"), fingerprint="x", config=BlendConfig(capture=False)) as engine:
        prompt = Prompt.of([text(list(range(3, 40)))])
        alone = engine.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids
        monkeypatch.setattr(ThreadCount, "learn", learn_by_chance)
        for _ in range(3):
            assert engine.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids == alone
            assert torch.get_num_threads() == 2
    assert seen == {2} if shares == [1.0] else 1 in seen


# ---- the command line -------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from cacheblend.cli import main
main(["--version"])
found = {k: v for k, v in os.environ.items() if k.startswith(("OMP", "GOMP", "KMP"))}
print(json.dumps(["torch" in sys.modules, found]))
"""


def environment_of_the_command_line(**chosen: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP", "GOMP", "KMP"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=kept | chosen, capture_output=True, text=True, check=True)
    has_torch, found = json.loads(done.stdout.splitlines()[-1])
    assert not has_torch
    return dict(found)


def test_the_command_line_bounds_how_long_threads_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_of_the_command_line(OMP_NUM_THREADS="2") == {"OMP_NUM_THREADS": "2", **BOUNDED}
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "5"), ("KMP_BLOCKTIME", "200")):
        assert environment_of_the_command_line(**{name: value}) == {name: value}, "the user's own choice stands"
    monkeypatch.setattr(os, "environ", environment := dict[str, str]())
    bound_waiting()  # torch is loaded: it would have no effect here, and one on other programs
    assert environment == {}
