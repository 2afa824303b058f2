"""Daemon threads: order, bound, closing, and a process that ends while a call hangs; torch's threads: fewer where
others use the cores, and how long those of a command spin.
"""

import contextlib
import gc
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from cacheblend.cli.program import BOUNDED, bound_waiting
from cacheblend.core import openmp
from cacheblend.core.config import BlendConfig
from cacheblend.core.load import threads as threads_module
from cacheblend.core.load.threads import DaemonPool, results_of
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.hf import BlendEngine, thread_count
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.thread_count import ThreadCount
from cacheblend.store import MemoryStore, WriteBehind
from families import tiny_model


def test_calls_run_in_order_as_many_at_once_as_there_are_threads() -> None:
    pool, order = DaemonPool(1, "test"), list[int]()
    futures = [pool.submit(order.append, number) for number in range(50)]
    failing = pool.submit(int, "x")
    assert [future.result() for future in futures] == [None] * 50
    assert order == list(range(50))
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result()
    assert pool.submit(lambda: 7).result() == 7  # the thread goes on after an error
    pool, all_in = DaemonPool(3, "test"), threading.Barrier(4)
    for _ in range(2):
        futures = [pool.submit(all_in.wait) for _ in range(3)]
        all_in.wait()
        for future in futures:
            future.result()
    gate = threading.Event()
    running = [pool.submit(gate.wait) for _ in range(3)]
    waiting = pool.submit(gate.wait)
    while not all(future.running() for future in running):
        pass
    assert not waiting.running()
    gate.set()
    assert waiting.result()
    pool = DaemonPool(4, "test")
    assert [pool.submit(int, str(number)).result(30) for number in range(200)] == list(range(200))
    assert len(pool._shared.threads) == 1  # one call after the other takes one thread


def test_what_follows_another_call_takes_no_thread_until_then() -> None:
    first, pool, gate = DaemonPool(1, "first"), DaemonPool(1, "test"), threading.Event()
    for what in (gate.wait, lambda: int("x") if gate.wait() else 0):
        gate.clear()
        call, done = first.submit(what), list[int]()
        followers = [pool.submit_after(call, partial(done.append, number)) for number in range(9)]
        assert pool.submit(lambda: 7).result(30) == 7
        assert all(follower.cancel() for follower in followers[::2]) and not done
        gate.set()
        if what == gate.wait:
            assert [follower.result(30) for follower in followers[1::2]] == [None] * 4 and done == [1, 3, 5, 7]
            assert pool.submit_after(call, lambda: 8).result(30) == 8
            continue
        for follower in followers[1::2]:
            with pytest.raises(ValueError, match="invalid literal"):
                follower.result(30)
        assert not done
    gate.clear()
    waits = [pool.submit_after(first.submit(gate.wait), lambda: 9) for _ in range(2)]
    pool.close()
    first.close()  # cancels the second
    gate.set()
    for follower in waits:
        with pytest.raises(CancelledError):
            follower.result(30)

    # cancelled, it keeps nothing, while what it follows hangs
    class Buffers:
        def fill(self) -> None: ...

    pool, gate, buffers = DaemonPool(1, "test"), threading.Event(), Buffers()
    kept, hanging = weakref.ref(buffers), pool.submit(gate.wait)
    follower = pool.submit_after(hanging, buffers.fill)
    follower.cancel()
    del buffers
    assert kept() is None and not hanging.done()
    gate.set()
    pool.close()
    # cancelled with the pool also while it waits for a thread
    pool, gate, ended = DaemonPool(1, "test"), threading.Event(), Future[None]()
    begun = pool.submit(gate.wait)
    while not begun.running():
        pass
    behind = pool.submit_after(ended, int)
    ended.set_result(None)  # `int` waits for a thread
    chain = [pool.submit(int)]
    while len(chain) < 4:
        chain.append(pool.submit_after(chain[-1], int))
    pool.close()
    for each in (behind, *chain):
        with pytest.raises(CancelledError):
            each.result(30)
    gate.set()
    assert begun.result(30)


def test_a_call_that_is_dropped_asks_other_pools_for_nothing_more() -> None:
    outer, inner, go_on, begun = DaemonPool(2, "outer"), DaemonPool(1, "inner"), threading.Event(), list[int]()

    def ask(number: int) -> int:
        begun.append(number)
        assert go_on.wait(30)
        return number

    def look_up(first: int) -> list[int]:
        return results_of([inner.submit(ask, first + number) for number in range(5)])

    dropped, other = outer.submit(look_up, 0), outer.submit(look_up, 100)
    while len(dropped.asked) < 5 or len(other.asked) < 5:
        assert not dropped.done()
    waiting = outer.submit(look_up, 200)
    for call in (dropped, waiting):
        call.drop()
    go_on.set()
    with pytest.raises(CancelledError):
        dropped.result(30)
    assert other.result(30) == [100, 101, 102, 103, 104] and waiting.cancelled()
    assert set(begun) - {100, 101, 102, 103, 104} <= {0}  # it had begun, or another one had
    again = outer.submit(lambda: results_of([inner.submit(ask, 7)]))
    assert again.result(30) == [7] and other.asked == again.asked == ()
    go_on.clear()
    inner.submit(ask, 8)
    has_begun, early = threading.Event(), threading.Event()
    late = outer.submit(lambda: (has_begun.set(), early.wait(30), look_up(300)))
    assert has_begun.wait(30)
    late.drop()  # before it asks
    early.set()
    with pytest.raises(CancelledError):
        late.result(30)
    go_on.set()
    assert inner.submit(ask, 9).result(30) == 9 and not set(begun) & set(range(300, 305))
    outer.close()
    inner.close()


def test_a_long_loop_lets_other_threads_go_on_after_some_items(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    monkeypatch.setattr(threads_module.time, "sleep", lambda seconds: seen.append(-1))
    for number in threads_module.standing_aside(iter(range(40))):
        seen.append(number)
    assert [*filter(lambda each: each >= 0, seen)] == [*range(40)]
    assert [at for at, each in enumerate(seen) if each < 0] == [15, 32]


def test_closing_cancels_what_waits_and_a_call_that_hangs_keeps_nothing_from_ending() -> None:
    pool, gate, begun = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return gate.wait()

    running, waiting = pool.submit(hang), pool.submit(int)
    begun.wait()
    pool.close()
    pool.close()
    assert not running.done()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(int)
    gate.set()
    assert running.result()

    class Large:  # threads end with their pool and keep no result
        pass

    pool = DaemonPool(1, "cacheblend-test-end")
    made = weakref.ref(pool.submit(Large).result())
    pool.submit(int).result()  # the thread has let go of the first result
    gc.collect()
    assert made() is None
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("cacheblend-test-end")]
    assert threads
    del pool
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    # a hanging call does not keep the process from ending
    program = (
        "import threading; from cacheblend.core.load.threads import DaemonPool\n"
        "pool, begun = DaemonPool(1, 'test'), threading.Event()\n"
        "pool.submit(lambda: (begun.set(), threading.Event().wait())); begun.wait(); print('end')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "end"


def test_a_forked_process_has_threads_of_its_own_for_pools_whose_locks_another_thread_held() -> None:
    pool = DaemonPool(1, "test")
    started, end = threading.Event(), threading.Event()
    pool.submit(lambda: (started.set(), end.wait(60)))
    started.wait(60)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._shared.starting:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        answer = pool.submit(lambda: 7).result(20)
        pool.close()
        pool.join(20)
        os._exit(0 if answer == 7 else 1)
    release.set()
    end.set()
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    holder.join()
    assert done == (child, 0) and pool.submit(lambda: 2).result(30) == 2  # and the other process goes on
    pool.close()


@pytest.mark.parametrize("seed", range(5))
def test_calls_that_hang_hold_up_no_other_while_there_are_threads(seed: int) -> None:
    """Callers come at the same moment, as threads become idle; some calls never end."""
    rng, most = random.Random(seed), 6
    for _ in range(20):
        pool, gate, hanging = DaemonPool(most, "test"), threading.Event(), rng.randrange(most)
        at_once = threading.Barrier(3 + hanging)

        def hang(pool: DaemonPool = pool, gate: threading.Event = gate, at_once: threading.Barrier = at_once) -> None:
            at_once.wait(30)
            pool.submit(gate.wait)

        def ask(pool: DaemonPool = pool, at_once: threading.Barrier = at_once) -> list[int]:
            at_once.wait(30)
            return [pool.submit(int, str(number)).result(30) for number in range(15)]

        with ThreadPoolExecutor(3 + hanging) as callers:
            hung = [callers.submit(hang) for _ in range(hanging)]
            asked = [callers.submit(ask) for _ in range(3)]
            assert [each.result() for each in asked] == [list(range(15))] * 3
            assert [each.result() for each in hung] == [None] * hanging
        assert len(pool._shared.threads) <= most
        gate.set()
        pool.close()


def interrupt_at(line: int, call: Callable[[], object]) -> bool:
    """Calls it, with a KeyboardInterrupt in front of the so many-th line of the pool's; False: it has fewer."""
    left, module = line, threads_module.__file__

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module:
            return None
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_anywhere_leaves_a_pool_that_answers(threads: int) -> None:
    """Of a caller, at each line; in a thread of its own: Python keeps an error that a trace interrupted."""
    with ThreadPoolExecutor(1) as caller:
        caller.submit(interrupt_everywhere, threads).result()


def interrupt_everywhere(threads: int) -> None:
    line, pool = 0, DaemonPool(threads, "test")
    while interrupt_at(line, lambda: pool.submit(time.sleep, 0.0001)):
        line += 1
        answers = [pool.submit(int, str(number)) for number in range(2 * threads)]
        assert [answer.result(30) for answer in answers] == list(range(2 * threads))
    assert line > 5
    fresh, pools = 0, [DaemonPool(threads, "test")]  # kept, else they are closed inside of what is traced
    while interrupt_at(fresh, lambda: pools[-1].submit(int)):
        fresh += 1
        pools.append(DaemonPool(threads, "test"))
    assert fresh > line  # a thread is started


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


@pytest.mark.parametrize(
    ("owner", "call"), [(WriteBehind(MemoryStore()), "flush"), (Background(4), "begin_request")], ids=["writer", "jobs"]
)
def test_an_interrupt_while_a_lock_is_taken_holds_up_nobody(
    owner: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = threading.Condition.__enter__

    def interrupted(condition: threading.Condition) -> bool:
        held = enter(condition)
        if condition is owner._changed:
            raise KeyboardInterrupt  # Python looks for signals when a function of its own has called, not when C has
        return held

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(threading.Condition, "__enter__", interrupted)
        getattr(owner, call)()
    other = threading.Thread(target=getattr(owner, call), daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive()


def test_one_thread_beside_others(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    count = ThreadCount()
    learn(count, 4, 0.4)
    assert not caplog.records, "weights that are read take a while, too"
    learn(count, 40, 0.4)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "40 % of the time" in record.message and "by one thread instead of 2" in record.message
    assert "or other threads of this one" in record.message  # a thread cannot tell who has its core
    count = ThreadCount()
    learn(count, 1, 1.0)
    assert used(count) == [2, 2, 2, 2]
    learn(count, 0.02, 0.4)
    assert used(count) == [1, 1, 1, 2], "the program's own number is as it was"
    learn(count, 10, 0.3)
    assert used(count) == [1, 1, 1, 2]
    learn(count, 0.3, 1.0)
    assert used(count) == [2, 2, 2, 2]
    count, waited = ThreadCount(), []  # more threads are tried less often the more often that failed
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
    for following in (ThreadCount(is_following=False), ThreadCount()):  # a number that was chosen is left alone
        following.is_single = following.is_following
        torch.set_num_threads(1 if following.is_following else 2)  # the program's own choice since
        assert set(used(following)) == {torch.get_num_threads()}
    torch.set_num_threads(2)
    with monkeypatch.context() as chosen:
        chosen.setenv("OMP_NUM_THREADS", "2")
        assert not ThreadCount().is_following
    monkeypatch.setattr(openmp, "libraries", lambda: None)  # one thread has no number of its own
    count = ThreadCount()
    assert not count.is_following
    count.is_single = True
    assert used(count) == [2, 2, 2, 2]


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


def test_the_numbers_of_other_threads_never_change_and_ones_own_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
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
    torch.set_num_threads(2)
    count = busy()  # the number comes back whatever fails inside, unless the program has set another one meanwhile
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


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_who_stops_computing_leaves_no_team_of_threads_behind() -> None:
    """Opening, warming, answering and prefilling, in the main thread and through a scheduler: after each the next
    parallel operation begins a team, so none slept meanwhile. Counted in a process of its own, with two threads."""
    program = """
import os, threading, time, torch
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.openmp import end_team
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent

def tasks():
    return len(os.listdir("/proc/self/task"))

def has_team():
    before = tasks()
    torch.ones(1 << 20).exp()
    began = tasks() - before
    end_team()
    return not began

def answered():
    done = threading.Event()
    scheduler = Scheduler(engine.runtime, Limits())
    ask = Ask(engine.prompt(asked), SamplingParams(max_new_tokens=3))
    scheduler.submit(ask, lambda event: done.set() if isinstance(event, DoneEvent) else None)
    done.wait()
    before, end = tasks(), time.monotonic() + 5  # its thread waits for requests, without a team
    while tasks() >= before and time.monotonic() < end:
        scheduler.close()
    time.sleep(0.2)
    return before - tasks()

def begun_by_a_pool():
    before, pool = tasks(), DaemonPool(1, "test")
    pool.submit(lambda: torch.ones(1 << 20).exp()).result()
    time.sleep(0.2)
    return tasks() - before

torch.ones(1 << 20).exp()
assert has_team(), "the test itself"
engine = BlendEngine.from_pretrained("nano", store="memory", config={"discover": False})
passages = [Passage("The lighthouse was lit in 1871."), Passage("Mussels grow on ropes.")]
asked = ["Answer. ", *passages, " When was it lit?"]
print("opened", has_team())
engine.warm(passages)
print("warmed", has_team())
engine.generate(asked, max_new_tokens=3)
print("answered", has_team())
engine.prefill(engine.prompt(asked))
engine.flush(60)
print("prefilled", has_team())
print("threads that end with a scheduler", answered())
print("threads that a pool has begun", begun_by_a_pool())
"""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    stages = ["opened", "warmed", "answered", "prefilled"]
    ends, begins = "threads that end with a scheduler 1", "threads that a pool has begun 1"
    assert ran.stdout.splitlines() == [*(f"{stage} False" for stage in stages), ends, begins]
